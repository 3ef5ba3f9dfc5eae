"""Tables of experiments for the docs, from results/learning/NAME.json. None where there are no results yet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

RESULTS = Path(__file__).parents[1] / "results" / "learning"
Table = tuple[Sequence[str], list[list[str]]]
"""Head and rows."""


class Estimate(TypedDict):
    mean: float
    low: float | None
    high: float | None
    n: int


class Arm(TypedDict):
    arm: str
    runs: int
    endpoints: Mapping[str, Estimate]
    env_steps: Estimate
    updates: Estimate
    staleness: Estimate
    pooled: Estimate


class Comparison(TypedDict):
    endpoint: str
    primary: bool
    arm: str
    difference: Estimate
    p: float | None
    p_holm: float | None
    smallest: float | None


class Results(TypedDict):
    complete: bool
    missing: list[str]
    base: Mapping[str, Estimate] | None
    arms: list[Arm]
    comparisons: list[Comparison]


def read(name: str) -> Results | None:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    found: Results = json.loads(path.read_text(encoding="utf-8"))["results"]
    return found


def arms(found: Results) -> Table:
    """Each arm's success at every endpoint, the base policy first."""
    names = list(dict.fromkeys(name for row in found["arms"] for name in row["endpoints"]))
    head = ("arm", "runs", *names, "environment steps", "updates", "staleness", "pooled")
    rows = [
        [row["arm"], str(row["runs"]), *(percent(row["endpoints"].get(name)) for name in names),
         f"{row['env_steps']['mean']:,.0f}", f"{row['updates']['mean']:.0f}", f"{row['staleness']['mean']:.1f}",
         f"{row['pooled']['mean']:.0f}"]
        for row in found["arms"]
    ]  # fmt: skip
    if (base := found["base"]) is not None:
        rows.insert(0, ["(base policy)", "", *(percent(base.get(name)) for name in names), "", "", "", ""])
    return head, rows + _incomplete(found, len(head))


def comparisons(found: Results) -> Table:
    head = ("endpoint", "the reference minus", "points", "p", "p, Holm", "would have been found, points", "seeds")
    rows = [
        [one["endpoint"], one["arm"], points(one["difference"]), p_value(one["p"]), p_value(one["p_holm"]),
         "" if one["smallest"] is None else f"{100 * one['smallest']:.1f}", str(one["difference"]["n"])]
        for one in found["comparisons"]
    ]  # fmt: skip
    return head, rows + _incomplete(found, len(head))


def _incomplete(found: Results, width: int) -> list[list[str]]:
    if found["complete"]:
        return []
    return [[f"**incomplete: {len(found['missing'])} runs are missing**", *[""] * (width - 1)]]


def percent(found: Estimate | None) -> str:
    if found is None:
        return ""
    if found["low"] is None or found["high"] is None:
        return f"{found['mean']:.1%}"
    return f"{found['mean']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def points(found: Estimate) -> str:
    if found["low"] is None or found["high"] is None:
        return f"{100 * found['mean']:+.1f}"
    return f"{100 * found['mean']:+.1f} ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"


def p_value(p: float | None) -> str:
    if p is None:
        return ""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"
