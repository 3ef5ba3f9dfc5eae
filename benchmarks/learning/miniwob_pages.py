"""The tables of docs/miniwob.md, from results/miniwob_tasks.json and from the cautions that `dart doctor` gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel

from benchmarks.learning.miniwob_attempts import Outcome
from dart.workers.env.miniwob import CAUTIONS

RESULT = Path(__file__).parent.parent / "results" / "miniwob_tasks.json"
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Heads and rows."""


class Row(BaseModel):
    """What was seen of one task."""

    task: str
    starts: bool = False
    problem: str = ""
    instruction_characters: tuple[int, int] = (0, 0)
    """The least and the most."""
    start_ms: float = 0.0
    """Median."""
    own_limit_seconds: float = 0.0
    """After which MiniWoB's own harness ends the episode; dart does not."""
    changes_alone: bool = False
    ends_alone_seconds: float | None = None
    """None: not within the time given."""
    actions: list[str] = []
    """Beyond clicks, as far as the page's controls and scripts show."""
    ended_by_random_steps: int = 0
    episodes: int = 0
    rewards: list[float] = []
    """MiniWoB's own, -1 to 1, of the random episodes that ended by themselves, sorted."""


class Results(BaseModel):
    rows: list[Row]
    attempts: list[Outcome]


def read(path: Path = RESULT) -> Results | None:
    """None if the tasks have not been examined yet."""
    if not path.exists():
        return None
    return Results.model_validate(json.loads(path.read_text(encoding="utf-8"))["results"])


def cautions(found: Results) -> Table:
    return ("tasks", "what is unusual"), [
        (", ".join(f"`{task}`" for task in caution.tasks), caution.why) for caution in CAUTIONS
    ]


def attempts(found: Results) -> Table:
    rows = [
        (f"`{one.task}`", one.how, str(len(one.rewards) + one.without_verdict + one.failed), _range(one.rewards),
         str(one.full), str(one.without_verdict + one.failed))
        for one in found.attempts
    ]  # fmt: skip
    return ("task", "script", "episodes", "reward", "of exactly 1", "without a verdict"), rows


def tasks(found: Results) -> Table:
    rows = [
        (f"`{row.task}`", "yes" if row.starts else row.problem or "no", _span(row.instruction_characters),
         f"{row.start_ms:.0f}", f"{row.own_limit_seconds:g}",
         f"after {row.ends_alone_seconds:g} s" if row.ends_alone_seconds is not None else "",
         "yes" if row.changes_alone else "", ", ".join(row.actions),
         f"{row.ended_by_random_steps} of {row.episodes}", _range(row.rewards))
        for row in found.rows
    ]  # fmt: skip
    head = ("task", "starts", "characters of instruction", "ms to start", "own limit, s", "ends by itself",
            "moves by itself", "beside clicks", "ended by random actions", "reward then")  # fmt: skip
    return head, rows


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = (f"{end:g}" for end in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"


TABLES: dict[str, Callable[[Results], Table]] = {"cautions": cautions, "attempts": attempts, "tasks": tasks}
