"""Evaluations and collections wait an outage out, as training does; what is broken by itself still ends them.

The real coordinator with simulated workers, in virtual time.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_processes.told import events

from benchmarks.simulation import virtual_time
from benchmarks.simulation.store import NoDatabase
from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica, SimulatedTrainer
from dart import config
from dart.commands.evaluate import undone
from dart.coordinator.run import Run
from dart.coordinator.start import Start
from dart.core.curation.quarantine import FIRST_SECONDS
from dart.core.types import Trajectory
from dart.errors import UserError
from dart.job import Collect, Evaluate, Job, Train
from dart.rundir import RunDirectory
from dart.store.blobs import BlobUnreachable
from dart.v1 import session_pb2 as pb

TASKS = ["task-0", "task-1", "task-2", "task-3"]
EPISODES, WORKED = 120, 20
COLLECT = Collect("policy", (0, 1000), per_task=20, most_attempts=60, samples=1, temperature=1.0)
JOBS: dict[str, Job] = {"evaluate": Evaluate(), "collect": COLLECT, "train": Train()}
OUTAGE_SECONDS = 1800.0
HANG_SECONDS = 86_400.0
TIMINGS = Timings(failures_per_step=0.0)


class Store(NoDatabase):
    async def group(self, group_id: str) -> None:
        """No earlier process has evaluated anything."""


class Cluster:
    """Two env workers and two replicas. `broken`: a task whose every set-up fails, all of them if it is empty, with
    this failure `code`. `fails`: "env" or "rollout", the role that fails throughout the outage.

    The outage begins when the job, or the evaluation after training, has finished `worked` episodes.
    """

    def __init__(self, run: Run, fails: str, worked: int, broken: str, code: int) -> None:
        self._run, self._fails, self._worked, self._broken = run, fails, worked, broken
        self._ends: float | None = None
        self.code = code
        for number in range(2):
            Envs(self, run, f"env-{number}")
            Replica(self, run, f"rollout-{number}")
        SimulatedTrainer(run.fleet, TIMINGS)

    def down(self, role: str, task: str = "") -> bool:
        now, evaluation, collection = (
            asyncio.get_running_loop().time(),
            self._run.evaluations.current,
            self._run.collection,
        )
        finished = len(evaluation.outcomes) if evaluation else collection.finished_attempts if collection else -1
        if self._ends is None and finished >= self._worked:
            self._ends = now + OUTAGE_SECONDS
        during = self._ends is not None and now < self._ends
        wrong = role == "env" and self._broken in (task, "")
        return wrong or (during and role == self._fails)


class Envs(SimulatedEnvs):
    def __init__(self, cluster: Cluster, run: Run, name: str) -> None:
        self._cluster, self.name = cluster, name
        super().__init__(run.fleet, name, 8, TIMINGS, TASKS, seed=0)

    def reset(self, command: pb.Reset) -> None:
        if self._cluster.down("env", command.task.name):
            failure = pb.Failure(code=self._cluster.code, message="the cloud is gone")
            self.answer(command, 1.0, failure=failure)
        else:
            super().reset(command)


class Replica(SimulatedReplica):
    def __init__(self, cluster: Cluster, run: Run, name: str) -> None:
        self._cluster = cluster
        super().__init__(run.fleet, name, TIMINGS, seed=0)

    def generate(self, command: pb.Generate) -> None:
        if self._cluster.down("rollout"):
            self.answer(command, 1.0, failure=pb.Failure(code=pb.FAILURE_CODE_ENGINE, message="out of memory"))
        else:
            super().generate(command)


def settings(job: Job) -> config.Config:
    return config.parse(
        {
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"tasks": {"names": TASKS}},
            "rollout": {"replicas": 2},
            "curation": {"rollouts": 4, "step_limit": 10},
            "trainer": {"trajectories_per_update": 16},
            "evaluation": {"episodes": EPISODES, "before": False, "decodings": ["sampled"]},
            "stop": {"updates": 2},
            "server": {"lost_after_seconds": 1e9, "reply_timeout_seconds": 1e9},
        }
    )


def worked(
    job: Job,
    directory: Path,
    fails: str = "",
    after: int = WORKED,
    broken: str = "none",
    code: int = pb.FAILURE_CODE_ENVIRONMENT,
) -> tuple[dict[str, Any], float]:
    """The run's summary, and how long it took."""

    async def work() -> tuple[dict[str, Any], float]:
        began = asyncio.get_running_loop().time()
        run = Run(settings(job), RunDirectory(directory), Store(), job, Start())  # type: ignore[arg-type]
        Cluster(run, fails, after, broken, code)
        async with asyncio.timeout(HANG_SECONDS):
            summary = await run.work()
        run.journal.close()
        return summary, asyncio.get_running_loop().time() - began

    return virtual_time.run(work())


@pytest.mark.parametrize("fails", ["env", "rollout"])
@pytest.mark.parametrize("job", JOBS)
def test_an_outage_is_waited_out(job: str, fails: str, tmp_path: Path) -> None:
    after = 0 if job == "train" else WORKED  # what has worked in training counts in the evaluation after it
    summary, seconds = worked(JOBS[job], tmp_path, fails, after)
    assert seconds > OUTAGE_SECONDS
    if job == "collect":
        tallies = summary["collected"]["per_task"].values()
        assert all(tally["kept"] == 20 or tally["attempts"] == 60 for tally in tallies)
    else:
        (success,) = events(tmp_path / "metrics.jsonl", "evaluation")
        assert success["episodes"] == EPISODES and success["infrastructure_attempts"] > 0
    assert events(tmp_path / "metrics.jsonl", "stalled"), "it is told while it lasts"


@pytest.mark.parametrize("job", ["evaluate", "collect"])
def test_a_job_of_which_nothing_has_worked_ends(job: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\d+ attempts in a row"):
        worked(JOBS[job], tmp_path, "env", after=0)


@pytest.mark.parametrize("broken", TASKS)
@pytest.mark.parametrize("code", [pb.FAILURE_CODE_ENVIRONMENT, pb.FAILURE_CODE_TASK])
@pytest.mark.parametrize("job", ["evaluate", "train"])
def test_a_task_that_never_works_is_not_evaluated(job: str, code: int, broken: str, tmp_path: Path) -> None:
    summary, _ = worked(JOBS[job], tmp_path, broken=broken, code=code)
    success = summary["evaluation"] if job == "evaluate" else summary["success_after"]["sampled"]
    assert success["episodes"] == EPISODES * 3 // 4 and broken not in success["per_task"]
    assert {one["task"] for one in success["not_evaluated"]} == {broken}
    assert sum(one["episodes"] for one in success["not_evaluated"]) == EPISODES // 4
    assert all("the cloud is gone" in one["why"] for one in success["not_evaluated"])
    if job == "evaluate":
        document = json.loads((tmp_path / "evaluation.json").read_text())
        assert {each["task"] for each in document["instances"] if not each["samples"]} == {broken}
        assert document["pass_at_k"]["1"]["mean"] == pytest.approx(success["mean"])


def test_attempts_that_the_world_could_not_judge_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(self: Envs, command: pb.Act) -> None:
        if command.last and command.assignment.attempt == 1 and "-task-1-" in command.assignment.assignment_id:
            why = "judge raised FileNotFoundError"
            self.answer(command, 1.0, failure=pb.Failure(code=pb.FAILURE_CODE_ENVIRONMENT, message=why))
        else:
            SimulatedEnvs.act(self, command)

    monkeypatch.setattr(Envs, "act", act)
    summary, _ = worked(JOBS["evaluate"], tmp_path)
    unjudged = summary["evaluation"]["unjudged_attempts"]
    assert list(unjudged) == ["task-1"] and 0 < unjudged["task-1"] <= EPISODES // 4
    (line,) = undone(summary["evaluation"])
    count = unjudged["task-1"]
    assert line.startswith(f"not judged: {count} attempts failed at their verdict, {count} of them of task-1; if")


@pytest.mark.parametrize("code", [pb.FAILURE_CODE_ENVIRONMENT, pb.FAILURE_CODE_TASK])
def test_a_task_that_never_works_is_quarantined_in_training(code: int, tmp_path: Path) -> None:
    worked(JOBS["train"], tmp_path, broken="task-1", code=code)
    quarantines = events(tmp_path / "metrics.jsonl", "task_quarantined")
    assert quarantines and {event["task"] for event in quarantines} == {"task-1"}
    assert all("the cloud is gone" in event["why"] for event in quarantines)
    seconds = [event["seconds"] for event in quarantines]
    assert seconds == [FIRST_SECONDS * 2**number for number in range(len(seconds))]


@pytest.mark.parametrize("where", ["act", "judge"])
def test_a_task_of_which_no_attempt_ends_is_quarantined_in_training(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its set-ups succeed: what it needs is missing later. Its roll-outs, which are tried again before others begin,
    would in the end hold all environments, and then look like an outage."""

    def act(self: Envs, command: pb.Act) -> None:
        if tasks[command.assignment.assignment_id] == "task-1" and (command.last or where == "act"):
            self.answer(command, 1.0, failure=pb.Failure(code=pb.FAILURE_CODE_ENVIRONMENT, message="no such file"))
        else:
            SimulatedEnvs.act(self, command)

    def reset(self: Envs, command: pb.Reset) -> None:
        tasks[command.assignment.assignment_id] = command.task.name
        SimulatedEnvs.reset(self, command)

    tasks = dict[str, str]()
    monkeypatch.setattr(Envs, "act", act)
    monkeypatch.setattr(Envs, "reset", reset)
    worked(JOBS["train"], tmp_path)
    quarantines = events(tmp_path / "metrics.jsonl", "task_quarantined")
    assert quarantines and {event["task"] for event in quarantines} == {"task-1"}
    assert all("no such file" in event["why"] for event in quarantines)
    assert len(events(tmp_path / "metrics.jsonl", "attempt_failed")) < 40, "of training and of the evaluation after it"


def test_one_env_worker_whose_set_ups_fail_gets_no_task_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset(self: Envs, command: pb.Reset) -> None:
        if self.name == "env-0":
            self.answer(command, 0.1, failure=pb.Failure(code=pb.FAILURE_CODE_ENVIRONMENT, message="no route"))
        else:
            SimulatedEnvs.reset(self, command)

    monkeypatch.setattr(Envs, "reset", reset)
    worked(JOBS["train"], tmp_path)
    assert len(events(tmp_path / "metrics.jsonl", "attempt_failed")) > 20
    assert not events(tmp_path / "metrics.jsonl", "task_quarantined")


def test_an_evaluation_of_which_every_task_is_wrong_ends_without_a_mean(tmp_path: Path) -> None:
    summary, seconds = worked(JOBS["evaluate"], tmp_path, broken="", code=pb.FAILURE_CODE_TASK)
    assert summary["evaluation"]["episodes"] == 0 and seconds < 120
    assert len(summary["evaluation"]["not_evaluated"]) == EPISODES


@pytest.mark.parametrize("broken", TASKS)
def test_a_collection_does_without_a_task_that_never_works(broken: str, tmp_path: Path) -> None:
    summary, _ = worked(JOBS["collect"], tmp_path, broken=broken)
    for name, tally in summary["collected"]["per_task"].items():
        assert tally["attempts"] == 0 and tally["given_up"] if name == broken else tally["attempts"]
        assert ("the cloud is gone" in tally["why"]) == (name == broken)


def test_a_collection_keeps_as_many_as_it_counts_where_storing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, refused = Counter[str](), 0

    async def fails_half_the_time(store: Store, trajectory: Trajectory, attempt: int = 1) -> None:
        nonlocal refused
        await asyncio.sleep(1.0)
        if refused <= stored.total():
            refused += 1
            raise BlobUnreachable("the store does not answer")
        stored[trajectory.task.name] += 1

    monkeypatch.setattr(Store, "add_trajectory", fails_half_the_time)
    summary, _ = worked(JOBS["collect"], tmp_path)
    tallies = summary["collected"]["per_task"]
    assert Counter({name: tally["kept"] for name, tally in tallies.items()}) == stored
    assert refused >= stored.total() >= 4
    assert all(tally["kept"] == 20 or tally["attempts"] == 60 for tally in tallies.values())
    assert all(tally["attempts"] <= 60 and not tally["given_up"] for tally in tallies.values())
