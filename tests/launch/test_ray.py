"""`dart launch ray` on a real Ray cluster of several nodes on this machine: whole small runs of the ladder demo, one of
which loses a node; and what is refused before anything starts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import yaml
from click.testing import CliRunner
from run_processes.told import events

from dart.cli import main
from dart.config import load
from dart.config.cluster import Needs, Ray
from dart.errors import USER_ERROR
from dart.launch.plan import Group, plan
from dart.launch.ray import Driver, _Awaited, _Signals, _signals
from dart.launch.ray_cluster import RayCluster
from dart.launch.supervisor import Order, Place, Unusable
from dart.rundir import RunDirectory

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "ladder_demo.yaml"
RUN_SECONDS = 1500
"""A guard against hanging: each run starts two engines, on cores that others may use as well."""
HANG_SECONDS = 240
SMALL = (
    "cluster.device=cpu",
    "cluster.coordinator.cpus=1",
    "cluster.env.cpus=1",
    "cluster.rollout.cpus=1",
    "cluster.train.cpus=3",
    "dashboard.port=0",
    "environment.slots=8",
    "rollout.slots=8",
    "curation.rollouts=4",
    "curation.step_limit=10",
    "trainer.trajectories_per_update=8",
    "evaluation.episodes=4",
    "evaluation.decodings=[sampled]",
    "checkpoint.every_updates=1",
)
ASKED = "DART_TEST_RAY"
needs_ray = pytest.mark.skipif(
    not os.environ.get(ASKED) or importlib.util.find_spec("ray") is None,
    reason=f"`make test-ray` installs Ray and runs it, which takes ten minutes ({ASKED}=1)",
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The head node has room for a coordinator, an env worker and a replica, and not for a rank."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of Ray's processes, which import dart
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    try:
        yield made
    finally:
        made.shutdown()


@dataclass
class Launched:
    process: subprocess.Popen[str]
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(Path(re.findall(r"^\S+ run (\S+)$", self.said, re.MULTILINE)[0]))

    def wait_until(self, happened: Callable[[], object]) -> None:
        until = time.monotonic() + RUN_SECONDS
        while not happened():
            assert self.process.poll() is None and time.monotonic() < until, self.said
            time.sleep(0.2)

    def updates(self) -> int:
        return len(events(self.run.metrics, "update")) if " run " in self.said else 0


@contextlib.contextmanager
def launched(cluster: Any, folder: Path, *settings: str) -> Iterator[Launched]:
    options = [*SMALL, f"cluster.ray.address={cluster.address}", f"run.directory={folder}", *settings]
    command = [sys.executable, "-m", "dart", "launch", "ray", str(DEMO)]
    for option in options:
        command += ["--set", option]
    output = folder / f"said-{time.monotonic_ns()}"
    with output.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    try:
        yield Launched(process, output)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def processes_of(run: RunDirectory) -> list[str]:
    """Commands of processes that this machine has for the run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            dials = run.address.is_file() and run.address.read_text() in words
            if "launch" not in words and (str(run.path) in words or dials):
                found.append(" ".join(words))
    return found


def kill(launched: Launched, words: set[str]) -> None:
    """The one process, which is waited for, whose command has all these words."""

    def found() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if words <= set(process.info["cmdline"] or ())]

    launched.wait_until(found)
    [process] = found()
    process.kill()


def nothing_is_left(cluster: Any, launched: Launched) -> None:
    """No process, no actor, no placement group; and no secret in any log of Ray's or of the run's."""
    import ray

    assert not processes_of(launched.run)
    ray.init(cluster.address, log_to_driver=False)
    try:
        assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}
        until = time.monotonic() + 60
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"] and time.monotonic() < until:
            time.sleep(0.2)  # Ray counts an actor's cores as free a moment after its end
        assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]
    finally:
        ray.shutdown()
    secrets = [file.read_text().strip() for file in launched.run.secrets.glob("*.token")]
    secrets.append((launched.run.secrets / "dashboard").read_text().strip().rpartition("=")[2])
    logs = [*Path(cluster.head_node.get_logs_dir_path()).glob("**/*"), *launched.run.logs.iterdir(), launched.output]
    read = [log.read_text(errors="replace") for log in logs if log.is_file()]
    assert len(secrets) == 5 and any("coordinator listens on" in text for text in read)
    assert not [secret for secret in secrets if any(secret in text for text in read)]


@needs_ray
@pytest.mark.browser
@pytest.mark.engine
@pytest.mark.torch
def test_a_run_on_two_nodes(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=8)
    with launched(cluster, tmp_path, "stop.updates=3") as it:
        assert it.process.wait(RUN_SECONDS) == 0, it.said
    assert json.loads(it.run.summary.read_text())["updates"] == 3
    nodes = dict(re.findall(r"^\S+ (\S+): on \S+, Ray's node (\w+)$", it.said, re.MULTILINE))
    assert set(nodes) == {"coordinator", "env-0", "rollout-0", "rollout-1", "train"}
    assert nodes["coordinator"] == cluster.head_node.node_id[:8] != nodes["train"]
    assert nodes["rollout-0"] != nodes["rollout-1"]
    assert "again" not in it.said
    nothing_is_left(cluster, it)


@needs_ray
@pytest.mark.browser
@pytest.mark.engine
@pytest.mark.torch
def test_a_node_with_the_ranks_is_lost_and_the_run_goes_on_to_its_end(cluster: Any, tmp_path: Path) -> None:
    lost = cluster.add_node(num_cpus=8)
    with launched(cluster, tmp_path, "stop.updates=5", "trainer.ranks=2") as it:
        it.wait_until(lambda: it.updates() >= 2)
        kill_everything_of(lost)
        cluster.add_node(num_cpus=8)
        assert it.process.wait(RUN_SECONDS) == 0, it.said
    assert json.loads(it.run.summary.read_text())["updates"] == 5
    nodes = re.findall(r"^\S+ (train-[01]): on \S+, Ray's node (\w+)$", it.said, re.MULTILINE)
    assert len(set(nodes)) == 4, "each rank was on the node that was lost, and then on another"
    assert "the coordinator is started again with every trainer rank, and continues the run" in it.said
    nothing_is_left(cluster, it)


def kill_everything_of(node: Any) -> None:
    """As when a machine goes down: no process of it can do anything any more."""
    [raylet] = node.all_processes["raylet"]
    there = psutil.Process(raylet.process.pid)
    for process in [there, *there.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@needs_ray
@pytest.mark.browser
def test_two_runs_on_one_cluster_end_whole_one_by_ctrl_c_and_one_killed(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=20)
    with launched(cluster, tmp_path) as one, launched(cluster, tmp_path) as other:
        for it in (one, other):
            it.wait_until(lambda it=it: "train: on" in it.said and it.run.address.is_file())
        assert one.run.path != other.run.path
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(RUN_SECONDS) == 130, one.said
        assert not processes_of(one.run) and processes_of(other.run)
        run = other.run
        kill(other, {"worker", "env-0", run.address.read_text()})
        other.wait_until(lambda: other.said.count("env-0: on") == 2)
        assert "env-0 was killed by signal 9: it is started again" in other.said
        kill(other, {"coordinator", str(run.path)})
        other.wait_until(lambda: other.said.count("train: on") == 2)
        assert re.search("coordinator was killed by signal 9.*: the coordinator is started again with", other.said)
        assert other.said.count(f"the coordinator listens on {run.address.read_text()}") == 2
        other.process.kill()
        until = time.monotonic() + HANG_SECONDS
        while processes_of(other.run):
            assert time.monotonic() < until, processes_of(other.run)
            time.sleep(0.2)
    assert f"--run {one.run.path}" in one.said
    nothing_is_left(cluster, other)


def test_the_coordinator_is_told_the_command_that_continues_the_run(tmp_path: Path) -> None:
    config, again = load(DEMO), ("dart", "launch", "ray", "/a b.yaml", "--run", "@run")
    driver = Driver(config, plan(config), None, cast(RayCluster, None), _Signals(), again=again)
    driver.run_directory, coordinator = str(tmp_path), driver.processes["coordinator"]
    coordinator.place = Place("127.0.0.1", 1, "here")
    assert driver._order(coordinator).words[-2:] == ("--again", "dart launch ray '/a b.yaml' --run @run")
    assert driver._interrupted().splitlines()[-1] == f"dart launch ray '/a b.yaml' --run {tmp_path}"


@needs_ray
def test_each_replica_and_rank_gets_gpus_of_its_own_from_ray(cluster: Any, tmp_path: Path) -> None:
    """Nodes that claim to have GPUs: what Ray assigns, as the processes see it."""
    cluster.add_node(num_cpus=8, num_gpus=4)
    cluster.add_node(num_cpus=8, num_gpus=4)
    groups = (
        Group("coordinator", 1, Needs()),
        Group("rollout", 2, Needs(memory_gb=0.1), gpus=2),
        Group("train", 4, Needs(), gpus=1),
    )
    with RayCluster.joined(Ray(address=cluster.address), groups) as joined:
        joined.reserve(print, lambda: False)
        actors = [joined.actor(group, n, group.name(n)) for group in groups for n in range(group.count)]
        for number, actor in enumerate(actors):
            words = ("worker", "--role", "env", "--run", str(tmp_path), "--id", f"worker-{number}")
            actor.run.remote(1, Order(str(number), words, str(tmp_path), str(tmp_path), 1 << 20))
        seen: dict[int, list[str]] = {}
        until = time.monotonic() + HANG_SECONDS
        while len(seen) < len(actors):
            assert time.monotonic() < until
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if str(tmp_path) in process.cmdline() and "worker" in process.cmdline():
                        number = int(process.cmdline()[-2].rpartition("-")[2])
                        seen[number] = process.environ().get("CUDA_VISIBLE_DEVICES", "").split(",")
    assert len(seen[1]) == len(seen[2]) == 2 and [len(seen[number]) for number in (3, 4, 5, 6)] == [1] * 4
    assert sorted(gpu for number in range(1, 7) for gpu in seen[number]) == sorted("01230123")


@needs_ray
def test_wrong_input_that_a_worker_finds_ends_everything_with_its_message(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=8)
    with launched(cluster, tmp_path, "rollout.engine_args={no_such_argument: 1}") as it:
        assert it.process.wait(RUN_SECONDS) == 2, it.said
    assert "error: " in it.said and "no_such_argument" in it.said.splitlines()[-1]
    assert not processes_of(it.run)


@needs_ray
def test_a_cluster_that_is_not_there_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["launch", "ray", str(DEMO), "--set", "cluster.ray.address=127.0.0.1:1"])
    assert result.exit_code == 2 and "cluster.ray.address: '127.0.0.1:1'" in result.output


def test_what_would_be_started_is_shown_without_ray(tmp_path: Path) -> None:
    settings = ["--set", "cluster.train.memory_gb=64", "--set", "trainer.ranks=2", "--run", str(tmp_path / "r")]
    result = CliRunner().invoke(main, ["launch", "ray", str(DEMO), *settings, "--dry-run"])
    coordinator, env, rollout, train = yaml.safe_load(result.output)
    assert coordinator["command"] == f"dart coordinator FILES/config.yaml --run {tmp_path / 'r'} --host NODE --quiet"
    assert (env["count"], env["gpus"], rollout["count"], rollout["gpus"]) == (1, 0, 2, 1)
    assert (train["count"], train["gpus"], train["memory_gb"]) == (2, 1, 64.0)
    assert train["environment"]["WORLD_SIZE"] == "2" and "--role train" in train["command"]
    assert not (tmp_path / "r").exists()


def test_the_coordinator_is_ended_no_sooner_than_its_checkpoint_may_take() -> None:
    config = load(DEMO, ("cluster.device=cpu", "checkpoint.interrupt_seconds=600"))
    driver = Driver(config, plan(config), None, RayCluster(config.cluster.ray, ()), _Signals())
    actor = SimpleNamespace(stop=SimpleNamespace(remote=lambda _, seconds: seconds))
    for name in ("coordinator", "env-0"):
        driver.processes[name].actor, driver.processes[name].running = actor, True
        driver._stop(driver.processes[name])
    given = {awaited.process.name: seconds for seconds, awaited in driver._pending.items()}
    assert given == {"coordinator": 630.0, "env-0": 60.0}


def test_a_node_that_joins_later_and_lacks_dart_is_passed_over_until_it_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dart.launch.ray.WAITING_SECONDS", 0.0)
    config = load(DEMO, ("cluster.device=cpu",))
    asked, killed = list[object](), list[object]()
    cluster = SimpleNamespace(
        actor=lambda *_: object(), ask_place=lambda actor: asked.append(actor) or actor, kill=killed.append
    )
    for value in (Unusable("a node of the cluster has no dart"), Place("10.0.0.9", 1, "its node", "0.0.1")):
        driver = Driver(config, plan(config), None, cast(RayCluster, cluster), _Signals())
        first, process = driver.processes["env-0"], driver.processes["rollout-0"]
        driver.restarts.listening(0.0, moved=False)
        for one in (first, process):
            driver._place(one)
        driver._answered(_Awaited(first, first.actor, 0), value)
        assert driver.end is not None and driver.end.code == USER_ERROR, "it has never run: it is the user's error"
        driver.end, process.starts = None, 1
        before = process.actor
        driver._answered(_Awaited(process, before, 0), value)
        assert driver.end is None and process.actor is None and killed[-1] is before
        assert "rollout-0: " in capsys.readouterr().out
        driver._start_what_is_due()
        assert process.actor not in (None, before) and asked[-1] is process.actor


def test_only_a_second_ctrl_c_cuts_the_end_short() -> None:
    """A terminal that closes sends a signal twice, from the shell and from the kernel."""
    with _signals() as arrived:
        for number in (signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(arrived) == 3


def test_client_certificates_are_refused(tmp_path: Path) -> None:
    settings = ["--set", "server.tls_client_ca=ca.pem"]
    result = CliRunner().invoke(main, ["launch", "ray", str(DEMO), *settings, "--dry-run"])
    assert result.exit_code == 2 and "server.tls_client_ca" in result.output


def test_without_ray_it_says_what_to_install() -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("Ray is installed here")
    result = CliRunner().invoke(main, ["launch", "ray", str(DEMO)])
    assert result.exit_code == 2 and "pip install 'dart-gui-rl[ray]'" in result.output
