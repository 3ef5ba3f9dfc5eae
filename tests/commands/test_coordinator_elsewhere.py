"""`dart coordinator --run` begins a run or continues it, and `dart worker --run` finds it, as a cluster starts both."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import yaml
from click.testing import CliRunner
from run_processes.told import events

from dart.cli import main
from dart.commands.running import JobRun
from dart.commands.train import _listening
from dart.config import load, parse
from dart.config.cluster import Needs
from dart.errors import UserError
from dart.launch.plan import Group, plan
from dart.processes import secrets
from dart.rundir import RunDirectory

HANG_SECONDS = 240
SETTINGS = {
    "model": {"path": "builtin:tiny-qwen3vl"},
    "environment": {"tasks": {"names": ["click-test"]}, "slots": 1},
    "stop": {"updates": 1},
    "evaluation": {"episodes": 0},
}


# ---- the plan ----


def test_a_run_is_its_coordinator_and_the_workers_that_it_needs() -> None:
    wanted = SETTINGS | {
        "environment": {"tasks": {"names": ["click-test"]}, "workers": 3},
        "rollout": {"replicas": 2, "tensor_parallel": 2, "environment": {"VLLM_LOGGING_LEVEL": "ERROR"}},
        "trainer": {"ranks": 4},
        "cluster": {"env": {"cpus": 0.5, "memory_gb": 3}},
    }
    coordinator, env, rollout, train = plan(parse(wanted))
    assert (coordinator.part, coordinator.count, coordinator.gpus) == ("coordinator", 1, 0)
    assert env == Group("env", 3, Needs(cpus=0.5, memory_gb=3.0))
    assert (rollout.count, rollout.gpus, rollout.environment) == (2, 2, {"VLLM_LOGGING_LEVEL": "ERROR"})
    assert (train.count, train.gpus) == (4, 1)
    assert [env.name(2), rollout.name(0), train.name(0)] == ["env-2", "rollout-0", "train"]


def test_on_processors_nothing_asks_for_gpus() -> None:
    assert {group.gpus for group in plan(parse(SETTINGS | {"cluster": {"device": "cpu"}}))} == {0}


# ---- secrets ----


def test_tokens_stay_and_the_certificate_follows_the_host(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    secrets.prepare(folder, "10.0.0.7")
    first = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert set(first) == {f"{role}.token" for role in ("env", "rollout", "train", "control")} | {
        secrets.CERTIFICATE, secrets.KEY, secrets.AUTHORITY
    }  # fmt: skip
    assert len({content for name, content in first.items() if name.endswith(".token")}) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    secrets.prepare(folder, "10.0.0.7")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == first
    secrets.prepare(folder, "node-3")
    changed = {file.name for file in folder.iterdir() if file.read_bytes() != first[file.name]}
    assert changed == {secrets.CERTIFICATE, secrets.KEY, secrets.AUTHORITY}


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_certificate_that_was_only_half_written_is_made_again(
    tmp_path: Path, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 4 + written  # the tokens come first

    def until_the_disk_is_full(file: Path, content: bytes) -> None:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= 1
        file.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(secrets, "write_private", until_the_disk_is_full)
        with pytest.raises(UserError, match="tokens cannot be kept there"):
            secrets.prepare(tmp_path, "localhost")
    secrets.prepare(tmp_path, "localhost")
    assert (tmp_path / secrets.AUTHORITY).read_bytes() == (tmp_path / secrets.CERTIFICATE).read_bytes()


@pytest.mark.parametrize("host", ["[::1]", "::1", "0.0.0.0", "node-3"])
def test_any_host_may_be_listened_on(host: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(SETTINGS))
    made = load(config, _listening(RunDirectory(tmp_path / "run"), host, 0)).server
    assert made.host == host and made.tls_certificate is not None
    assert secrets._names(made.tls_certificate, host.strip("[]")), "clients dial it with and without brackets"


async def test_the_certificate_is_good_for_its_host_and_no_other(tmp_path: Path) -> None:
    async def reached(named: str) -> bool:
        folder = tmp_path / named
        secrets.prepare(folder, named)
        key, certificate = (folder / secrets.KEY).read_bytes(), (folder / secrets.CERTIFICATE).read_bytes()
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
        await server.start()
        trusted = grpc.ssl_channel_credentials((folder / secrets.AUTHORITY).read_bytes())
        try:
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
                await asyncio.wait_for(channel.channel_ready(), 3 if named != "127.0.0.1" else HANG_SECONDS)
        except TimeoutError:
            return False
        finally:
            await server.stop(None)
        return True

    assert await reached("127.0.0.1")
    assert not await reached("127.0.0.2")


# ---- wrong use ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--run", "r", "--resume", "s"], "omit one of them"),
        (["--host", "127.0.0.1"], "add --run RUN"),
        (["--initial-weights", "--run", "r"], "--initial-weights applies only to a run that is continued"),
    ],
)
def test_the_coordinator_says_what_is_missing(tmp_path: Path, options: list[str], said: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(SETTINGS))
    result = CliRunner().invoke(main, ["coordinator", str(file), *options])
    assert result.exit_code == 2 and said in result.output


@pytest.mark.parametrize("options", [[], ["--coordinator", "127.0.0.1:1", "--run", "r"]])
def test_a_worker_is_told_its_coordinator_in_one_way(options: list[str]) -> None:
    result = CliRunner().invoke(main, ["worker", "--role", "env", *options])
    assert result.exit_code == 2 and "or its run with --run RUN, not both" in result.output


# ---- processes ----


@asynccontextmanager
async def started(words: Sequence[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("a") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dart", *words, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def readied(run: RunDirectory, worker: str, times: int) -> None:
    """Wait until the worker has become ready so many times."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            states = [(event["worker"], event["state"]) for event in events(run.metrics, "worker")]
            if states.count((worker, "ready")) >= times:
                return
            await asyncio.sleep(0.1)


@pytest.mark.browser
async def test_a_killed_coordinator_continues_and_its_worker_finds_it_again(tmp_path: Path) -> None:
    file, run = tmp_path / "config.yaml", RunDirectory(tmp_path / "a run")
    file.write_text(yaml.safe_dump(SETTINGS))
    begin = ["coordinator", str(file), "--run", str(run.path), "--host", "127.0.0.1", "--quiet"]
    worker = ["worker", "--role", "env", "--run", str(run.path), "--id", "env-0"]
    async with started(worker, tmp_path / "worker.log") as env:  # before there is a coordinator
        async with started(begin, tmp_path / "coordinator.log") as coordinator:
            await readied(run, "env-0", 1)
            address = run.address.read_text()
            coordinator.kill()
            await coordinator.wait()
        async with started(begin, tmp_path / "coordinator.log"):
            await readied(run, "env-0", 2)
            assert run.address.read_text() == address
            assert env.returncode is None, "it redialled, and was not started again"
            # Whoever may read the run's directory needs to name no token.
            async with started(["status", str(run.path), "--json"], tmp_path / "status.json") as status:
                assert await status.wait() == 0
            assert "env-0" in (tmp_path / "status.json").read_text()
    async with await run.open() as database:
        assert len(await database.runs()) == 1


def test_a_finished_run_is_not_begun_again(tmp_path: Path) -> None:
    file, run = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(SETTINGS))
    run.mkdir()
    (run / "summary.json").write_text("{}")
    result = CliRunner().invoke(main, ["coordinator", str(file), "--run", str(run), "--quiet"])
    assert result.exit_code == 0 and "is finished" in result.output


def test_a_run_that_is_continued_needs_no_source_and_may_begin_with_its_initial_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = tmp_path / "config.yaml", RunDirectory(tmp_path / "run")
    gone = {"pool": {"enabled": True, "sources": [str(tmp_path / "gone")]}}
    file.write_text(yaml.safe_dump(SETTINGS | {"curation": gone}))
    wanted: list[JobRun] = []
    monkeypatch.setattr("dart.commands.train.run_held", lambda one, hold: wanted.append(one))
    command = ["coordinator", str(file), "--run", str(run.path), "--quiet"]
    begun = CliRunner().invoke(main, command)
    assert begun.exit_code == 2 and "gone is not a run directory" in begun.output

    asyncio.run(make(run))
    for options in ([], ["--initial-weights"]):
        continued = CliRunner().invoke(main, [*command, *options])
        assert continued.exit_code == 130, continued.output
    assert [(one.either, one.initial_weights) for one in wanted] == [(True, False), (True, True)]


async def make(run: RunDirectory) -> None:
    async with await run.open_to_work(create=True) as database:
        await database.start_run(run.name, "run", {}, started=1.0)


async def test_runs_that_begin_at_the_same_moment_do_not_meet(tmp_path: Path) -> None:
    file, folder = tmp_path / "config.yaml", tmp_path / "lab" / "ours"
    file.write_text(yaml.safe_dump(SETTINGS | {"run": {"directory": str(folder)}, "dashboard": {"enabled": False}}))
    given = RunDirectory(tmp_path / "lab" / "theirs" / "deep" / "run")
    same = ["coordinator", str(file), "--quiet"]
    async with (
        started(same, tmp_path / "1.log"), started(same, tmp_path / "2.log"),
        started([*same, "--run", str(given.path), "--host", "127.0.0.1"], tmp_path / "3.log"),
    ):  # fmt: skip
        async with asyncio.timeout(HANG_SECONDS):
            while len(found := [given, *map(RunDirectory, folder.glob("*"))]) < 3 or not all(
                run.address.is_file() for run in found
            ):
                await asyncio.sleep(0.1)
        result = await asyncio.to_thread(CliRunner().invoke, main, ["runs", str(tmp_path), "--all"])
        lines = [line for line in result.output.splitlines() if "127.0.0.1:" in line]
        assert result.exit_code == 0 and len(lines) == 3, result.output
        assert len({run.address.read_text() for run in found}) == 3
        assert all(any(str(run.path) in line and run.address.read_text() in line for line in lines) for run in found)
    few = CliRunner().invoke(main, ["runs", str(tmp_path / "lab"), "--json"])
    assert few.exit_code == 2 and "no run under" in few.output
