"""Why nothing is learnt, told by the real coordinator with simulated workers, in virtual time; and nothing told of a
run that learns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from run_processes.told import recorded

from benchmarks.simulation import cluster, virtual_time, workers
from benchmarks.simulation.cluster import COUPLED, DECOUPLED, Schedule, SetUp, simulate
from benchmarks.simulation.timings import EnvTimes, Lengths, ReplicaTimes, SyncTimes, Timings, TrainerTimes
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica, SimulatedTrainer
from dart.coordinator.service.watching import Watch
from dart.core.learning.recent import ENOUGH
from dart.core.progress import Progress
from dart.core.types import Trajectory
from dart.errors import UserError
from dart.v1 import session_pb2 as pb

SET_UP = SetUp("small", environments=24, replicas=2, trajectories_per_update=32, tasks=12)
DESKTOPS = Timings(failures_per_step=0.0)
PAGES = Timings(
    EnvTimes((0.1, 0.3), (0.1, 0.3), (0.1, 0.5), (0.1, 0.2)),
    Lengths(median=4.0, most=12),
    ReplicaTimes(prefill_seconds=0.005),
    TrainerTimes(0.02, 1.0),
    SyncTimes(0.1, 1.0, 0.1),
    failures_per_step=0.0,
)
"""Of web pages and a small model, some 500 trajectories a minute."""
IN_TIME = 60.0
"""Seconds after the first `ENOUGH` trajectories."""


@dataclass
class Seen:
    """What a run told. `at`: when each cause was first told, in seconds after its 50th trajectory."""

    at: dict[str, float]
    first: dict[str, Mapping[str, Any]]
    moving: list[str]
    serving: set[bool]
    summary: Mapping[str, Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    """Simulates a run. rate: the success rate of each task by its number, and of how many; trainer: its class."""

    def simulated(
        set_up: SetUp = SET_UP,
        hours: float = 0.05,
        seed: int = 0,
        schedule: Schedule = DECOUPLED,
        timings: Timings = PAGES,
        rate: Callable[[int, int], float] | None = None,
        replica: type[SimulatedReplica] = SimulatedReplica,
        envs: type[SimulatedEnvs] = SimulatedEnvs,
        trainer: type[SimulatedTrainer] = SimulatedTrainer,
    ) -> Seen:
        if rate is not None:
            monkeypatch.setattr(workers, "success_rate", rate)
        monkeypatch.setattr(cluster, "SimulatedEnvs", envs)
        monkeypatch.setattr(cluster, "SimulatedTrainer", trainer)
        told, finished, found, serving = recorded(monkeypatch), list[float](), dict[str, float](), {True}
        counted, looked = Progress.trajectory_finished, Watch.look

        def count(progress: Progress, trajectory: Trajectory) -> None:
            counted(progress, trajectory)
            finished.append(asyncio.get_running_loop().time())

        async def look(watch: Watch) -> None:
            await looked(watch)
            serving.add(watch._serves)
            for stall in watch.stalls:
                if stall.kind == "learning":
                    found.setdefault(stall.culprit, asyncio.get_running_loop().time())

        monkeypatch.setattr(Progress, "trajectory_finished", count)
        monkeypatch.setattr(Watch, "look", look)
        summary = simulate(set_up, schedule, timings, hours, seed, make_replica=replica)
        since = finished[ENOUGH - 1] if len(finished) >= ENOUGH else 0.0
        learning = [event for event in told if event.get("kind") == "learning"]
        first = {str(one["culprit"]): one for one in reversed(learning) if one["event"] == "stalled"}
        moving = [str(one["culprit"]) for one in learning if one["event"] == "moving"]
        return Seen({cause: at - since for cause, at in found.items()}, first, moving, serving, summary)

    return simulated


Run = Callable[..., Seen]

# ---- a run that learns ----


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean", [0.025, 0.1, 0.4, 0.9])
def test_a_run_on_pages_that_learns_is_told_nothing(run: Run, mean: float, seed: int) -> None:
    seen = run(seed=seed, rate=lambda number, of: min(0.99, mean * (0.5 + number / of)))
    assert not seen.first and seen.serving == {True} and seen.summary["updates"]


@pytest.mark.parametrize("mean", [0.2, 0.4, 0.9])
def test_a_run_on_desktops_that_learns_is_told_nothing(run: Run, mean: float) -> None:
    seen = run(hours=0.5, timings=DESKTOPS, rate=lambda number, of: min(0.99, mean * (0.5 + number / of)))
    assert not seen.first and seen.serving == {True} and seen.summary["updates"]


def test_a_hard_run_on_desktops_is_told_no_more_than_that_it_is_early(run: Run) -> None:
    hard = replace(SET_UP, curation=True)
    seen = run(hard, hours=1.0, seed=3, timings=DESKTOPS, rate=lambda *_: 0.01)
    assert seen.serving == {True} and seen.first["all fail"]["deliberate"]
    assert seen.summary["updates"] and seen.moving == ["all fail"]


@pytest.mark.parametrize("curation", [True, False])
@pytest.mark.parametrize("schedule", [DECOUPLED, COUPLED])
def test_a_run_of_any_schedule_that_learns_is_told_nothing(run: Run, schedule: Schedule, curation: bool) -> None:
    seen = run(
        replace(SET_UP, tasks=40, curation=curation), schedule=schedule, timings=replace(PAGES, failures_per_step=0.001)
    )
    assert not seen.first and seen.summary["updates"]


# ---- one that does not ----


class Talks(SimulatedReplica):
    """Chats in place of acting, in all its turns but every `seldom`-th."""

    seldom = 500
    turns = 0

    def send(self, message: pb.SessionRequest, command: Any, seconds: float) -> None:
        if message.HasField("generated"):
            type(self).turns += 1
            if self.turns % self.seldom:
                message.generated.text = "Sure! I would click the button\nin the middle."
        super().send(message, command, seconds)


def test_a_policy_whose_text_is_no_action_is_named(run: Run) -> None:
    seen = run(replica=Talks)
    assert seen.at["unparsable"] <= IN_TIME and list(seen.first) == ["unparsable"]
    told = seen.first["unparsable"]
    assert told["waits"] == "nothing is learnt"
    assert "trajectories ended with a text that is no action (" in str(told["waits_for"])
    assert str(told["failure"]).startswith("“Sure! I would click the button in the middle.”: ")
    assert "the prompt or the grammar does not fit the model" in str(told["advice"])


@pytest.mark.parametrize(
    ("rate", "cause", "words"),
    [
        (0.0, "all fail", "trajectories has a reward, so no group has an advantage; their ends: environment"),
        (1.0, "all succeed", "every roll-out of the last"),
    ],
)
def test_tasks_that_teach_nothing_are_named(run: Run, rate: float, cause: str, words: str) -> None:
    seen = run(rate=lambda *_: rate)
    assert list(seen.first) == [cause] and seen.at[cause] <= IN_TIME
    assert words in str(seen.first[cause]["waits_for"])


class Indifferent(SimulatedEnvs):
    """Judges every episode alike."""

    def send(self, message: pb.SessionRequest, command: Any, seconds: float) -> None:
        if message.observed.done:
            message.observed.reward = 0.5
        super().send(message, command, seconds)


def test_a_verdict_that_is_always_the_same_is_named(run: Run) -> None:
    seen = run(envs=Indifferent)
    assert list(seen.first) == ["equal rewards"] and seen.at["equal rewards"] <= IN_TIME
    assert "had reward 0.5" in str(seen.first["equal rewards"]["waits_for"])


class Broken(SimulatedEnvs):
    """Cannot begin any episode, or most of them."""

    share = 1.0

    def reset(self, command: pb.Reset) -> None:
        if self._chance.random() < self.share:
            why = "DependencyNotInstalled: pygame is not installed, run pip install gymnasium[classic-control]"
            self.answer(command, 1.0, failure=pb.Failure(code=pb.FAILURE_CODE_ENVIRONMENT, message=why))
        else:
            super().reset(command)


class Unreliable(Broken):
    share = 0.8


def test_environments_that_all_fail_are_named_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told = recorded(monkeypatch)
    with pytest.raises(UserError, match="attempts in a row failed"):
        run(envs=Broken)
    first = next(event for event in told if event.get("kind") == "learning")
    assert first["unix_seconds"] < virtual_time.START + 10
    assert first["waits"] == "nothing is sampled" and "attempts so far have failed" in first["waits_for"]
    assert "pygame is not installed" in first["failure"]


def test_environments_most_of_whose_attempts_fail_are_named(run: Run) -> None:
    seen = run(envs=Unreliable)
    assert seen.at["attempts fail"] <= IN_TIME
    assert "pygame is not installed" in str(seen.first["attempts fail"]["failure"])


# ---- updates ----


class Told(SimulatedTrainer):
    """Tells these metrics of every update."""

    metrics: Mapping[str, float] = {}

    def answer(self, command: Any, seconds: float, **reply: Any) -> None:
        if "trained" in reply:
            reply["trained"].metrics.update(self.metrics)
        super().answer(command, seconds, **reply)


HEALTHY = {
    "entropy": 0.09, "kl_old": 0.0, "kl_reference": 0.02, "gradient_norm": 0.3, "learning_rate": 6e-5, "steps_taken": 1,
    "importance_weight": 0.99, "importance_truncated": 0.26, "logprob_difference": 0.003,
}  # fmt: skip
ILL = {
    "entropy": {"entropy": 0.0005},
    "kl": {"kl_reference": 6.0},
    "gradient zero": {"gradient_norm": 0.0},
    "gradient cut": {"gradient_norm": 5000.0},
    "importance": {"importance_truncated": 0.97, "logprob_difference": 2.1},
}


@pytest.mark.parametrize("cause", ILL)
def test_updates_that_teach_nothing_are_named(run: Run, cause: str) -> None:
    seen = run(trainer=type("Ill", (Told,), {"metrics": HEALTHY | ILL[cause]}))
    assert list(seen.first) == [cause] and seen.serving == {True}


def test_updates_that_teach_something_are_not(run: Run) -> None:
    assert not run(trainer=type("Well", (Told,), {"metrics": HEALTHY})).first


class Deaf(SimulatedReplica):
    def load_weights(self, command: pb.LoadWeights) -> None:
        why = "ConnectionRefusedError: 10.0.0.5:41234"
        self.answer(command, 1.0, failure=pb.Failure(code=pb.FAILURE_CODE_TRANSFER, message=why))


def test_replicas_that_never_get_weights_are_named(run: Run) -> None:
    seen = run(replica=Deaf, hours=0.03)  # before the run ends for it
    assert "weights" in seen.first and "10.0.0.5:41234" in str(seen.first["weights"]["failure"])
