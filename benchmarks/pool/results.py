"""The runs of `benchmarks.pool`, read back and summarised over seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.trials.inference import compare, estimate

RESULT = Path(__file__).parents[1] / "results" / "pool.json"
NAIVE = "boots in Reset"
FIGURES = ("trained_actions_per_minute", "trajectories_per_hour", "staleness")


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
