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
    return ("task", "script", "reward"), [(f"`{one.task}`", one.how, _earned(one)) for one in found.attempts]


def _earned(one: Outcome) -> str:
    """Its rewards, and how often a full 1 where that is not said by them."""
    if not one.rewards:
        return "no verdict"
    episodes = len(one.rewards) + one.without_verdict + one.failed
    some = f" (1 in {one.full} of {episodes})" if 0 < one.full < episodes else ""
    return _range(one.rewards) + some


def tasks(found: Results) -> Table:
    """Names by what a page shows at the start beside things to click on, the most first."""
    of: dict[str, list[str]] = {}
    for row in found.rows:
        of.setdefault(" and ".join(row.actions) or "nothing else", []).append(f"`{row.task}`")
    return ("beside clicks", "tasks"), [
        (f"{what} ({len(names)})", ", ".join(names)) for what, names in sorted(of.items(), key=_most_first)
    ]


def _most_first(group: tuple[str, list[str]]) -> int:
    return -len(group[1])


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = (f"{end:g}" for end in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"


TABLES: dict[str, Callable[[Results], Table]] = {"cautions": cautions, "attempts": attempts, "tasks": tasks}
