"""Worlds on a time scale of their own: boots of a quarter of an hour, evaluators that take ten minutes, one environment
that hangs. The real coordinator and the real env worker's role in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hosted_envs import HostedEnvs
from run_processes.told import events

from benchmarks.simulation import virtual_time
from benchmarks.simulation.store import NoDatabase
from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import SimulatedReplica
from dart import config
from dart.coordinator.run import Run
from dart.coordinator.start import Start
from dart.job import Evaluate
from dart.rundir import RunDirectory
from dart.workers.env.places import STRIKES
from dart.worlds import Action, Env, Image, Observation, Task, Timeouts, Verdict, World, WorldOptions

PICTURE = Image.of(b"a screenshot", "image/png", 1920, 1080)
BOOT_SECONDS, JUDGE_SECONDS = 900.0, 700.0
"""Longer than `watchdog.start_seconds` and `watchdog.sampling_seconds`, and the second than
`server.reply_timeout_seconds`."""


class Slow(World):
    timeouts = Timeouts(lease=1200, reset=60, act=30, judge=900)
    made = 0
    hangs: int | None = None
    """The number of the machine whose first action never ends."""

    async def lease(self) -> Env:
        await asyncio.sleep(BOOT_SECONDS)
        machine = Machine(WorldOptions(), (1920, 1080))
        machine.hangs = Slow.made == self.hangs
        Slow.made += 1
        return machine


class Machine(Env):
    hangs = False

    async def reset(self, task: Task) -> Observation:
        return Observation(PICTURE, f"do {task.name}")

    async def act(self, action: Action) -> Observation:
        if self.hangs:
            await asyncio.Event().wait()
        return Observation(PICTURE)

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        await asyncio.sleep(JUDGE_SECONDS)
        return Verdict(1.0)


class Store(NoDatabase):
    async def group(self, group_id: str) -> None:
        """No earlier process has evaluated anything."""


def evaluated(directory: Path, slots: int, episodes: int) -> list[dict[str, object]]:
    """The events of an evaluation on one worker with so many slots."""
    settings = config.parse(
        {
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"kind": f"{__name__}:Slow", "tasks": {"names": ["a", "b"]}, "slots": slots},
            "curation": {"step_limit": 2},
            "evaluation": {"episodes": episodes, "decodings": ["sampled"]},
            "stop": {"updates": 1},
            "server": {"lost_after_seconds": 1e9},
        }
    )

    async def work() -> None:
        run = Run(settings, RunDirectory(directory), Store(), Evaluate(), Start())  # type: ignore[arg-type]
        SimulatedReplica(run.fleet, "rollout-0", Timings(), 0)
        worker = await HostedEnvs.start(run.fleet, "env-0", settings.environment)
        await run.work()
        run.journal.close()
        await worker.close()

    virtual_time.run(work())
    return events(directory / "metrics.jsonl")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "made", 0)


def test_neither_a_slow_boot_nor_a_slow_evaluator_is_a_stall_or_a_hung_worker(tmp_path: Path) -> None:
    events = evaluated(tmp_path, slots=1, episodes=4)
    (result,) = [event for event in events if event["event"] == "evaluation"]
    assert (result["episodes"], result["infrastructure_attempts"]) == (4, 0)
    kinds = {event["event"] for event in events}
    assert "stalled" not in kinds
    told = [event for event in events if event["event"] == "worker" and event["worker"] == "env-0"]
    assert [(event["role"], event["state"]) for event in told] == [
        ("env", "ready"), ("env", "lost")
    ], "lost with the Bye at the end alone"  # fmt: skip


def test_one_environment_that_hangs_is_replaced_before_the_others_end_their_first_episode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Slow, "hangs", 1)
    events = evaluated(tmp_path, slots=3, episodes=8)
    (result,) = [event for event in events if event["event"] == "evaluation"]
    assert (result["episodes"], result["infrastructure_attempts"]) == (8, STRIKES)
    assert Slow.made == 4
    assert len([event for event in events if event["event"] == "worker" and event["worker"] == "env-0"]) == 2
