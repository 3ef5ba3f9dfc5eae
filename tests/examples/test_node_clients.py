"""examples/node with a real coordinator: its env worker and its Control client, as their README starts them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from dashboards.scripted import scripted_workers
from run_processes.told import events

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "node"
HANG_SECONDS = 180
CLICK = "Action: click(start_box='(48,101)')"
"""On the first of the four boxes, which is the right one in a quarter of the tasks."""
STALLED_SECONDS = 2.0
BROKEN = "Observed.image: Image.sha256 is empty, and must be 32 bytes long while the episode goes on"


@pytest.fixture(scope="session")
def built() -> Path:
    """The example, built in place."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed: examples/node needs Node.js 20 or later")
    installed, wanted = EXAMPLE / "node_modules" / ".package-lock.json", EXAMPLE / "package-lock.json"
    if not installed.is_file() or installed.stat().st_mtime < wanted.stat().st_mtime:
        done = npm("ci", "--no-audit", "--no-fund")
        if done.returncode:
            pytest.skip(f"npm ci failed in examples/node, which needs the network: {done.stderr[-500:]}")
    done = npm("run", "build")
    assert done.returncode == 0, done.stdout + done.stderr
    return EXAMPLE


def npm(*arguments: str, at: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["npm", *arguments], cwd=at, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )


def copied(example: Path, to: Path) -> Path:
    """A copy of the example, with the same installed packages, to be changed."""
    to.mkdir()
    for name in ("src", "build"):
        shutil.copytree(example / name, to / name)
    for name in ("package.json", "tsconfig.json"):
        shutil.copy(example / name, to / name)
    (to / "node_modules").symlink_to(example / "node_modules")
    return to


def with_a_wrong_field(file: Path, right: str, wrong: str) -> None:
    text = file.read_text()
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))


# ---- processes ----


@dataclass(slots=True)
class Started:
    process: asyncio.subprocess.Process
    log: Path

    async def said(self, words: str) -> None:
        """Wait until its log holds these words."""
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                over = self.process.returncode is not None
                if words in self.log.read_text():
                    return
                assert not over, self.log.read_text()[-3000:]
                await asyncio.sleep(0.05)

    async def ended(self) -> int:
        async with asyncio.timeout(HANG_SECONDS):
            return await self.process.wait()


@asynccontextmanager
async def started(words: Sequence[str], log: Path, at: Path) -> AsyncIterator[Started]:
    with log.open("w") as out:
        process = await asyncio.create_subprocess_exec(*words, cwd=at, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield Started(process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Place:
    """A folder with a config, and a port for its coordinator."""

    def __init__(self, folder: Path, **changes: dict[str, object]) -> None:
        self.folder = folder
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        settings = yaml.safe_load((EXAMPLE / "colours.yaml").read_text())
        settings["server"] = {"port": self.port}
        settings["trainer"] |= {"trajectories_per_update": 16}
        for section, fields in changes.items():
            settings[section] = settings.get(section, {}) | fields
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def run(self) -> Path:
        (run,) = (self.folder / "runs").iterdir()
        return run

    def events(self, kind: str) -> list[dict[str, object]]:
        return events(self.run / "metrics.jsonl", kind)

    async def events_of(self, kind: str, least: int = 1) -> list[dict[str, object]]:
        """Wait until there are so many."""
        async with asyncio.timeout(HANG_SECONDS):
            while len(found := self.events(kind)) < least:
                await asyncio.sleep(0.1)
        return found

    @asynccontextmanager
    async def coordinator(self, *more: str) -> AsyncIterator[Started]:
        words = [sys.executable, "-m", "dart", "coordinator", "config.yaml", "--quiet", *more]
        async with started(words, self.folder / "coordinator.out", self.folder) as coordinator:
            await coordinator.said(f"listens on {self.address}")
            yield coordinator

    def worker(self, example: Path) -> AbstractAsyncContextManager[Started]:
        words = ["node", str(example / "build" / "worker.js"), "--coordinator", self.address, "--id", "node-0"]
        return started(words, self.folder / "worker.out", self.folder)

    async def dart(self, command: str) -> str:
        return await output(sys.executable, "-m", "dart", command, "--address", self.address)

    async def control(self, *words: str) -> str:
        return await output("node", str(EXAMPLE / "build" / "control.js"), *words, "--coordinator", self.address)


async def output(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "400"}
    )
    async with asyncio.timeout(HANG_SECONDS):
        told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    return told.decode()


# ---- a worker that does well ----


async def test_a_run_with_the_node_worker_ends_well(built: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, stop={"updates": 2})
    async with place.coordinator() as coordinator, place.worker(built) as worker:
        async with scripted_workers(place.address, CLICK):
            assert await coordinator.ended() == 0, coordinator.log.read_text()[-3000:]
        assert await worker.ended() == 0
    summary = json.loads((place.run / "summary.json").read_text())
    assert summary["updates"] == 2 and summary["trajectories"] >= 32
    assert not place.events("violation")
    assert "joined run" in worker.log.read_text() and "ended: " in worker.log.read_text()


async def test_the_control_client_shows_and_steers_a_run(built: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, stop={"updates": 100_000})
    async with place.coordinator(), place.worker(built), scripted_workers(place.address, CLICK):
        await place.events_of("update")
        told = await place.control("status")
        assert "training" in told and "node-0 ready" in told
        shown = (await place.control("trajectories")).splitlines()
        assert len(shown) >= 16 and all("colours/four-boxes#" in line for line in shown)
        assert {line.split(" reward ")[1].split()[0] for line in shown} == {"0", "1"}
        await place.control("pause")
        assert "paused" in await place.control("status")
        await place.control("resume")
        assert "paused" not in await place.control("status")
        words = ["node", str(EXAMPLE / "build" / "control.js"), "watch", "--coordinator", place.address]
        async with started(words, tmp_path / "watch.out", tmp_path) as watching:
            await watching.said(" update {")


async def test_the_worker_dials_again_when_the_coordinator_restarts(built: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, stop={"updates": 4}, checkpoint={"every_updates": 1})
    async with place.worker(built) as worker:
        async with place.coordinator() as first, scripted_workers(place.address, CLICK):
            await place.events_of("checkpoint")
            first.process.kill()
            await first.ended()
        await worker.said("dialling")
        async with (
            place.coordinator("--resume", str(place.run)) as second,
            scripted_workers(place.address, CLICK),
        ):
            assert await second.ended() == 0, second.log.read_text()[-3000:]
        assert await worker.ended() == 0
    assert worker.log.read_text().count("joined run") == 2


@pytest.mark.parametrize("dialled_in", [True, False])
async def test_ctrl_c_ends_the_worker(built: Path, tmp_path: Path, dialled_in: bool) -> None:
    place = Place(tmp_path)
    async with AsyncExitStack() as stack:
        if dialled_in:
            await stack.enter_async_context(place.coordinator())
        worker = await stack.enter_async_context(place.worker(built))
        await worker.said("joined run" if dialled_in else "dialling")
        worker.process.send_signal(signal.SIGINT)
        assert await worker.ended() == 0
        assert "ended: stopped" in worker.log.read_text()


# ---- a worker that is wrong ----


async def test_the_worker_says_why_it_is_refused(built: Path, tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.coordinator(), place.worker(built) as first:
        await first.said("joined run")
        words = ["node", str(built / "build" / "worker.js"), "--coordinator", place.address, "--id", "node-0"]
        async with started(words, tmp_path / "second.out", tmp_path) as second:
            assert await second.ended() == 2
            assert "the name node-0 is in use by node-0, which is alive: stop that worker first" in (
                second.log.read_text()
            )


async def test_a_worker_needs_the_token_of_its_role(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENV_TOKEN", "the-token")
    place = Place(tmp_path, server={"tokens": {"env": "env:ENV_TOKEN"}})
    async with place.coordinator():
        monkeypatch.setenv("DART_TOKEN", "another")
        async with place.worker(built) as wrong:
            assert await wrong.ended() == 2
            assert "set DART_TOKEN to the token for env workers" in wrong.log.read_text()
        monkeypatch.setenv("DART_TOKEN", "the-token")
        async with place.worker(built) as right:
            await right.said("joined run")


def test_the_compiler_refuses_a_wrong_field(built: Path, tmp_path: Path) -> None:
    wrong = copied(built, tmp_path / "wrong")
    with_a_wrong_field(wrong / "src" / "worker.ts", "Image = { sha256,", "Image = { sha: sha256,")
    done = subprocess.run(
        ["node", str(built / "node_modules" / "typescript" / "bin" / "tsc")], cwd=wrong, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode and "src/worker.ts" in done.stdout and "'sha'" in done.stdout


async def test_a_wrong_field_of_ready_ends_the_worker_with_the_reason(built: Path, tmp_path: Path) -> None:
    wrong = copied(built, tmp_path / "wrong")
    with_a_wrong_field(wrong / "build" / "session.js", "{ slots: this.slots }", "{ slot: this.slots }")
    place = Place(tmp_path)
    async with place.coordinator(), place.worker(wrong) as worker:
        await worker.said("this worker cannot be used: Ready.slots is 0, and must be from 1 to 65,536")
        assert await worker.ended() == 2


@asynccontextmanager
async def misled_run(built: Path, folder: Path, watchdog: dict[str, object]) -> AsyncIterator[tuple[Place, Started]]:
    """A run whose env worker has a wrong name for a field of `Image`, as one without a compiler may have, after it was
    quarantined for that."""
    wrong = copied(built, folder / "wrong")
    with_a_wrong_field(wrong / "build" / "worker.js", "image = { sha256,", "image = { sha: sha256,")
    place = Place(folder, watchdog=watchdog)
    async with place.coordinator(), place.worker(wrong) as worker, scripted_workers(place.address, CLICK):
        await place.events_of("violation", least=3)
        yield place, worker


@pytest.fixture
async def misled(built: Path, tmp_path: Path) -> AsyncIterator[tuple[Place, Started]]:
    async with misled_run(built, tmp_path, {"sampling_seconds": STALLED_SECONDS}) as run:
        yield run


async def test_status_names_the_wrong_field_and_its_worker(misled: tuple[Place, Started]) -> None:
    place, _ = misled
    told = (await place.dart("status")).splitlines()
    (line,) = [line for line in told if line.split()[:2] == ["node-0", "env"]]
    assert "quarantined" in line and BROKEN in line, line


async def test_why_names_the_wrong_field_once_the_run_counts_as_stalled(misled: tuple[Place, Started]) -> None:
    place, _ = misled
    await place.events_of("stalled")
    told = await place.dart("why")
    assert "node-0" in told and BROKEN in told, told


async def test_the_worker_says_that_its_episodes_are_given_up(misled: tuple[Place, Started]) -> None:
    _, worker = misled
    await worker.said("was given up before its end; `dart status` says why")


async def test_the_workers_own_log_names_the_wrong_field(misled: tuple[Place, Started]) -> None:
    _, worker = misled
    async with asyncio.timeout(STALLED_SECONDS):
        await worker.said(BROKEN)


async def test_why_names_the_wrong_field_at_once(built: Path, tmp_path: Path) -> None:
    async with misled_run(built, tmp_path, {}) as (place, _):
        told = await place.dart("why")
    assert BROKEN in told, told


async def test_status_and_why_name_a_worker_whose_ready_is_refused(built: Path, tmp_path: Path) -> None:
    wrong = copied(built, tmp_path / "wrong")
    with_a_wrong_field(wrong / "build" / "session.js", "{ slots: this.slots }", "{ slot: this.slots }")
    place = Place(tmp_path)
    async with place.coordinator(), place.worker(wrong) as worker:
        await worker.ended()
        told = [await place.dart(command) for command in ("status", "why")]
    assert all("Ready.slots is 0" in text for text in told), told
