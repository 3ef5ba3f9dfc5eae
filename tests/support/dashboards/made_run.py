"""A run directory of any size, made in bulk: the rows that a training run leaves behind, without the training.

Nothing was sampled: actions, rewards and tokens are drawn from a seed. Only the shape is that of a real run, and every
text, number and screenshot is one that the real tables hold.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, create_engine, insert

from dart.config.loading import load
from dart.core.action import Action, Click, Drag, Finish, Point, Scroll, TypeText
from dart.core.action_json import action_to_json
from dart.core.fates import TRAINED, dropped
from dart.rundir import RunDirectory
from dart.screenshots.directory import ScreenshotDirectory, file_name
from dart.store import tables as t
from dart.store.database import sqlite_url

BEGAN = 1_790_000_000.0
"""Unix seconds."""
GROUP = 8
GROUPS_PER_UPDATE = 5
PICTURES = 400
ACTIONS: tuple[Action, ...] = (
    Click(Point(0.25, 0.5)),
    Click(Point(0.75, 0.25), "right"),
    Drag((Point(0.1, 0.1), Point(0.5, 0.9))),
    Scroll(Point(0.5, 0.5), 0, 3),
    TypeText("hello"),
)
Rows = dict[Table, list[dict[str, Any]]]
BATCH = 500
"""Groups in one transaction."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the run is. `steps`: of one trajectory, on average. `width` and `height`: of screenshots, in pixels."""

    trajectories: int = 100_000
    steps: int = 20
    tasks: int = 300
    width: int = 320
    height: int = 200
    prompt_tokens: int = 200
    tokens: int = 12
    seed: int = 0


def made_run(parent: Path, shape: Shape, config: Path) -> RunDirectory:
    """Make the run. `config`: the YAML file that it says it was begun with."""
    directory = RunDirectory.make(parent, "made")
    document = load(config)
    directory.config.write_text(config.read_text(encoding="utf-8"), encoding="utf-8")

    async def create() -> None:
        async with await directory.open_to_work(create=True):
            pass

    asyncio.run(create())
    pictures = _pictures(directory, shape)
    engine = create_engine(sqlite_url(directory.database).replace("+aiosqlite", ""))
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA synchronous=OFF")
        row = {
            "id": directory.name, "name": "made", "kind": "training", "state": "interrupted", "started": BEGAN,
            "config_json": json.dumps(document.model_dump(mode="json")), "finished": None,
        }  # fmt: skip
        connection.execute(insert(t.runs), [row])
        names = [{"run_id": directory.name, "suite": "made", "name": _task(number)} for number in range(shape.tasks)]
        connection.execute(insert(t.tasks), names)
    maker = _Maker(directory.name, shape, pictures)
    groups = iter(range(-(-shape.trajectories // GROUP)))
    while batch := [number for _, number in zip(range(BATCH), groups, strict=False)]:
        with engine.begin() as connection:
            maker.write(connection, batch)
    engine.dispose()
    return directory


def _task(number: int) -> str:
    return f"task-{number:04}"


class _Maker:
    def __init__(self, run_id: str, shape: Shape, pictures: Sequence[tuple[str, bytes]]) -> None:
        self._run_id, self._shape, self._pictures = run_id, shape, pictures
        self._random = random.Random(shape.seed)
        self._sequence = 0
        self._made = self._steps = 0
        self._now = BEGAN

    def write(self, connection: Connection, numbers: Sequence[int]) -> None:
        rows: Rows = {
            table: []
            for table in (t.groups, t.trajectories, t.steps, t.step_entropies, t.screenshots, t.versions, t.events)
        }
        for number in numbers:
            self._group(rows, number)
        for table, new in rows.items():
            if new:
                connection.execute(insert(table), new)

    def _group(self, rows: Rows, number: int) -> None:
        group, task = f"g{number:06}", _task(self._random.randrange(self._shape.tasks))
        update = number // GROUPS_PER_UPDATE + 1
        rate = min(0.95, 0.1 + 0.8 * number * GROUP / max(1, self._shape.trajectories))
        wins = [self._random.random() < rate for _ in range(min(GROUP, self._shape.trajectories - self._made))]
        mixed = len(set(wins)) > 1
        reason = f"{sum(wins)} of {len(wins)} succeeded" if mixed else "all succeeded" if wins[0] else "all failed"
        fate = TRAINED if mixed else dropped(reason)
        opened = self._now
        for place, won in enumerate(wins, 1):
            self._trajectory(rows, f"{group}-{place}", group, task, won, fate, update - 1)
        plan = f"N {GROUP}: success {rate:.2f} over the last 16; step limit 30: no success yet"
        rows[t.groups].append({
            "id": group, "run_id": self._run_id, "kind": "training", "suite": "made", "task_name": task,
            "seed": number, "planned": GROUP, "plan": plan, "state": "consumed" if mixed else "dropped",
            "fate": reason, "opened": opened, "closed": self._now, "consumed_by_update": update if mixed else None,
        })  # fmt: skip
        told = {"group": group, "task": f"made/{task}#{number}", "size": len(wins), "plan": plan, "released": mixed}
        self._event(rows, "group", {**told, "cause": "released" if mixed else reason, "reason": reason})
        if number % GROUPS_PER_UPDATE == GROUPS_PER_UPDATE - 1:
            self._update(rows, update, rate)

    def _trajectory(
        self, rows: Rows, name: str, group: str, task: str, won: bool, fate: str, version: int
    ) -> None:  # fmt: skip
        shape, draw = self._shape, self._random
        count = max(1, draw.randrange(shape.steps // 2, shape.steps * 3 // 2 + 1))
        started, self._now = self._now, self._now + 0.5
        used = [self._pictures[draw.randrange(len(self._pictures))] for _ in range(count)]
        rows[t.steps].extend(self._step(name, index, used[: index + 1], index == count - 1) for index in range(count))
        rows[t.screenshots].extend({"sha256": digest, "trajectory_id": name} for digest in {raw for _, raw in used})
        rows[t.trajectories].append({
            "id": name, "run_id": self._run_id, "group_id": group, "suite": "made", "task_name": task, "seed": 1,
            "attempt": 1, "instruction": f"Do what {task} says.", "termination": "environment" if won else "step_limit",
            "reward": float(won), "success": won, "step_limit": 30, "steps": count, "oldest_version": version,
            "newest_version": version, "advantages_json": json.dumps([0.5 if won else -0.5] * count), "fate": fate,
            "pooled_from": "", "evidence_json": json.dumps({"done": won}), "more_json": None, "started": started,
            "finished": self._now,
        })  # fmt: skip
        if fate == TRAINED:
            rows[t.step_entropies].extend(self._entropy(name, index, version + 1) for index in range(count))
        self._made += 1
        self._steps += count

    def _step(self, trajectory: str, index: int, seen: Sequence[tuple[str, bytes]], last: bool) -> dict[str, Any]:
        shape = self._shape
        action = Finish() if last else ACTIONS[index % len(ACTIONS)]
        shown = [[digest, "image/png", shape.width, shape.height] for digest, _ in seen[-3:]]
        return {
            "trajectory_id": trajectory, "index": index, "text": f"Thought: step {index}.\nAction: {action}",
            "action_json": json.dumps(action_to_json(action)), "parse_error": "", "truncated": False,
            "prompt_token_ids": struct.pack("<i", 7) * shape.prompt_tokens,
            "token_ids": struct.pack("<i", 9) * shape.tokens, "logprobs": struct.pack("<f", -0.1) * shape.tokens,
            "mean_logprob": -0.1, "versions_json": json.dumps([[0, 0, shape.tokens]]),
            "images_json": json.dumps(shown), "more_json": None,
        }  # fmt: skip

    def _entropy(self, trajectory: str, index: int, update: int) -> dict[str, Any]:
        of_tokens = [0.1 * (index + place % 3) for place in range(self._shape.tokens)]
        mean = sum(of_tokens) / len(of_tokens)
        return {
            "trajectory_id": trajectory, "step_index": index, "update": update, "entropy": mean, "selected": index > 0,
            "token_entropies": struct.pack(f"<{len(of_tokens)}e", *of_tokens),
        }  # fmt: skip

    def _update(self, rows: Rows, update: int, rate: float) -> None:
        trainer = {"loss": self._random.gauss(0, 0.1), "entropy": 0.1, "kl_reference": 0.01, "clip_fraction": 0.0}
        told = {
            "update": update, "updates": update, "version": update, "trajectories": self._made,
            "env_steps": self._steps, "success_rate": rate, "success_by_task": {}, "fates": {TRAINED: self._made},
            "env_utilisation": 0.9, "rollout_utilisation": 0.8, "trainer": trainer,
        }  # fmt: skip
        self._event(rows, "update", told)
        row = {"run_id": self._run_id, "version": update, "update": update, "created": self._now}
        rows[t.versions].append({**row, "metrics_json": json.dumps(trainer)})
        sync = {"replica": "rollout-0", "version": update, "seconds": 0.2, "pause_seconds": 0.1, "bytes": 12}
        self._event(rows, "sync_started", {"replica": "rollout-0", "version": update, "versions": {}})
        self._event(rows, "sync", {**sync, "versions": {}})

    def _event(self, rows: Rows, kind: str, told: dict[str, Any]) -> None:
        self._sequence += 1
        row = {"run_id": self._run_id, "sequence": self._sequence, "unix_seconds": self._now, "kind": kind}
        rows[t.events].append({**row, "json": json.dumps(told)})


def _pictures(directory: RunDirectory, shape: Shape) -> list[tuple[str, bytes]]:
    """Screenshots in the run's directory: each one's digest in hexadecimal, and as bytes."""
    kept = ScreenshotDirectory(directory.blobs)
    kept.prepare()
    made = []
    for data in drawn(shape):
        digest = hashlib.sha256(data).digest()
        kept.write(file_name(digest), data)
        made.append((digest.hex(), digest))
    return made


def drawn(shape: Shape) -> Iterator[bytes]:
    """PNG files, RGB, with coloured stripes."""
    draw = random.Random(shape.seed)
    for _ in range(min(PICTURES, max(4, shape.trajectories))):
        lines = b"".join(
            b"\x00" + bytes(draw.randrange(256) for _ in range(3)) * shape.width for _ in range(shape.height)
        )
        header = struct.pack(">IIBBBBB", shape.width, shape.height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
        yield b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        )
