"""Fabricated results of experiments: evaluations, records and run directories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from store_samples import trajectory

from dart.core.types import Task
from dart.rundir import RunDirectory
from dart.store.records import Event, GroupKind

LADDER = (
    *(f"ladder-easy-{n:02d}" for n in range(1, 16)),
    *(f"ladder-medium-{n:02d}" for n in range(1, 4)),
    *(f"ladder-hard-{n:02d}" for n in range(1, 4)),
)


def rate(mean: float, episodes: int = 20) -> dict[str, Any]:
    return {"mean": mean, "low": mean, "high": mean, "episodes": episodes}


def after(levels: Mapping[str, float], greedy: float = 0.0) -> dict[str, Any]:
    """Both evaluations of one policy. `levels`: sampled success by level; greedily it is `greedy` higher."""
    by_task = {name: levels[name.split("-")[1]] for name in LADDER}
    return {
        decoding: {
            **rate(sum(by_task.values()) / len(by_task) + more, 420),
            "per_task": {name: rate(value + more) for name, value in by_task.items()},
        }
        for decoding, more in (("sampled", 0.0), ("greedy", greedy))
    }


def record(arm: str, seed: int, levels: Mapping[str, float], marks: Mapping[str, str], **more: Any) -> dict[str, Any]:
    return {
        "arm": arm, "seed": seed, "overrides": [], **marks, "after": after(levels), "tasks": ["a", "b"],
        "episodes": [[float(n), n % 2, 10, int(n > 40), n // 10] for n in range(80)],
        "curve": [[160, 15.0, 1, 0.0], [800, 79.0, 7, 1.0]],
        "env_steps": 800, "trajectories": 80, "updates": 8, "staleness": {"mean": 1.0, "max": 2, "trajectories": 80},
        "dropped": {}, "pooled": 3, "train_seconds": 79.0, "pieces": [{"commit": "c", "changed": []}], "starts": 1,
        **more,
    }  # fmt: skip


async def fabricate(
    folder: Path, episodes: Sequence[tuple[str, bool, float]], summary: Mapping[str, Any]
) -> RunDirectory:
    """A run's directory with training roll-outs: (task, success, when it finished)."""
    run = RunDirectory.make(folder, "made-up")
    async with await run.open_to_work(create=True) as database:
        await database.start_run(run.name, "made-up", {}, started=0.0)
        for number, (name, success, finished) in enumerate(episodes):
            task, group = Task("ladder", name, number), f"g{number}"
            await database.open_group(group, task, 8, 0.0)
            one = replace(trajectory(f"{group}-1", group, task, finished), success=success, reward=float(success))
            await database.add_trajectory(one)
        await database.open_group("eval-x", Task("ladder", "a", 7), 1, 0.0, kind=GroupKind.EVALUATION)
        await database.add_trajectory(trajectory("eval-x-1", "eval-x", Task("ladder", "a", 7), 50.0))
        await database.append_events(
            [
                Event(1, 100.0, "phase", json.dumps({"phase": "training"})),
                Event(2, 160.0, "update", json.dumps({"train_seconds": 60.0, "update": 1})),
                Event(3, 500.0, "phase", json.dumps({"phase": "training"})),
            ]
        )
    run.summary.write_text(json.dumps({"config": {"environment": {"tasks": {"names": ["a", "b"]}}}, **summary}))
    return run
