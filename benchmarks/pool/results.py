"""The runs of `benchmarks.pool`, read back, summarised over seeds, and as the table of docs/efficiency.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.simulation.desktops import USEFUL, Cause
from benchmarks.trials.inference import Estimate, compare, estimate

RESULT = Path(__file__).parents[1] / "results" / "pool.json"
NAIVE = "boots in Reset"
LOST = (
    Cause.BOOTING, Cause.RENEWING, Cause.HUNG, Cause.NOT_SET_UP, Cause.DISCARDED, "waiting for the trainer",
    "idle for another reason",
)  # fmt: skip
LEAST_SHOWN = 0.0005
"""Shares below this in every arm have no row."""
FIGURES = {
    "trained_actions_per_minute": "actions trained on per minute",
    "trajectories_per_hour": "trajectories per hour",
    "staleness": "staleness, in versions",
}


def runs() -> list[dict[str, Any]]:
    if not RESULT.exists():
        return []
    found: list[dict[str, Any]] = json.loads(RESULT.read_text(encoding="utf-8"))["results"]["runs"]
    return found


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each trainer and arm: the mean of every figure over seeds, and its difference from `NAIVE`, paired by
    seed."""
    told: list[dict[str, Any]] = []
    for trainer, arm in dict.fromkeys((row["training_gpus"], row["arm"]) for row in rows):
        figures = {}
        for name in _names(rows):
            of, naive = (_figure(rows, trainer, one, name) for one in (arm, NAIVE))
            figures[name] = {"mean": asdict(estimate(list(of.values()))), "over_naive": _over(of, naive)}
        told.append({"training_gpus": trainer, "arm": arm, "figures": figures})
    return told


def _names(rows: Sequence[dict[str, Any]]) -> list[str]:
    return ["useful", *(rows[0]["shares"] if rows else ()), *FIGURES]


def _figure(rows: Sequence[dict[str, Any]], trainer: int, arm: str, name: str) -> dict[int, float]:
    """The figure by seed."""
    return {
        row["seed"]: row["shares"][name] if name in row["shares"] else row[name]
        for row in rows
        if row["training_gpus"] == trainer and row["arm"] == arm
    }


def _over(one: dict[int, float], naive: dict[int, float]) -> dict[str, Any] | None:
    found = compare(one, naive)
    return asdict(found.difference) | {"p": found.p} if found else None


def table(rows: Sequence[dict[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    """The head and the rows of the table in docs/efficiency.md: a column for each trainer and arm."""
    columns = [(one["training_gpus"], one["arm"], one["figures"]) for one in summaries(rows)]
    head = ["VMs' time, and what came of it", *(f"{arm}; {trainer} training GPUs" for trainer, arm, _ in columns)]
    shares = [
        ("**useful**: in an episode with a verdict", "useful"),
        *((f"useful: {cause}", str(cause)) for cause in USEFUL),
        *((f"lost: {cause}", str(cause)) for cause in LOST),
    ]
    made = [
        [title, *(_share(figures[name]["mean"]) for _, _, figures in columns)]
        for title, name in shares
        if any(figures[name]["mean"]["mean"] >= LEAST_SHOWN for _, _, figures in columns)
    ]
    made.insert(0, ["runs", *(_runs(rows, trainer, arm) for trainer, arm, _ in columns)])
    for name, title in FIGURES.items():
        made.append([title, *(_number(figures[name]["mean"]) for _, _, figures in columns)])
    made.append(["actions trained on, over the first arm",
                 *("" if arm == NAIVE else _number(figures["trained_actions_per_minute"]["over_naive"], signed=True)
                   for _, arm, figures in columns)])  # fmt: skip
    return head, made


def _runs(rows: Sequence[dict[str, Any]], trainer: int, arm: str) -> str:
    of = [row for row in rows if (row["training_gpus"], row["arm"]) == (trainer, arm)]
    return f"{len(of)} of {of[0]['hours']:g} h on {of[0]['vms']} VMs"


def _share(value: dict[str, Any]) -> str:
    half = Estimate(**value).half_width
    return f"{value['mean']:.1%}" + ("" if half is None else f" ± {100 * half:.1f}")


def _number(value: dict[str, Any], *, signed: bool = False) -> str:
    half = None if value["high"] is None else value["high"] - value["mean"]
    places = 2 if abs(value["mean"]) < 20 else 0
    told = f"{value['mean']:+,.{places}f}" if signed else f"{value['mean']:,.{places}f}"
    return told + ("" if half is None else f" ± {half:,.{places}f}")
