"""The table of docs/efficiency.md from the simulated runs: the controls with the same 16 GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.trials.pages import Table

Row = dict[str, Any]
RATIOS = ("env_utilisation", "rollout_utilisation", "trained_actions_per_minute")
"""What schedules are compared by."""
SAME_GPUS = 16
"""The GPUs of 8 replicas and the paper's trainer. Set-ups that divide them in another way are named after them."""
BESIDE = ("honest-sliding", "honest-stride3-lora")
"""The timings with which the same GPUs were divided in several ways."""


def acting(row: Row) -> float:
    """The share of environments' time in which they act or reset. `env_utilisation` has waiting for the model, too."""
    seconds = row["time"]["env"]["seconds"]
    return float((seconds["acting"] + seconds["resetting"]) / sum(seconds.values()))


def over_coupled(row: Row, rows: Sequence[Row]) -> str:
    """Ratios of the figures themselves: the record's `over_coupled` is rounded, and would be rounded again."""
    like = "coupled, with curation" if row["rung"].endswith("with curation") else "coupled"
    base = next((one for one in rows if (one["rung"], one.get("set_up")) == (like, row.get("set_up"))), None)
    return ", ".join(f"{row[name] / base[name]:.1f} ×" for name in RATIOS if base[name]) if base else ""


def same_gpus(rows: Sequence[Row]) -> Table:
    """8 replicas and 8 training GPUs beside other divisions of the same GPUs: two cells for each of `BESIDE`."""
    rungs = {row["rung"] for row in rows if _divides(row)}
    cells: dict[tuple[str, str], list[str]] = {}
    for named in BESIDE:
        halves = f"180 environments, 8 training GPUs, {named}"
        of = [row for row in rows if row["set_up"] == halves and row["rung"] in rungs]
        of += [row for row in rows if _divides(row) and _named(row) == named]
        for row in of:
            division = "8 sample and 8 train" if row["set_up"] == halves else _division(row)
            cells.setdefault((division, row["rung"]), []).extend(
                [f"{row['env_utilisation']:.1%} ({acting(row):.1%})", f"{row['trained_actions_per_minute']:.0f}"]
            )
    head = (f"of {SAME_GPUS} GPUs", "schedule",
            *(f"{short}: {what}" for short in ("window slides", "`history_stride: 3` and `lora`")
              for what in ("environments busy (acting or resetting)", "actions/min trained")))  # fmt: skip
    return head, [[*key, *row] for key, row in cells.items()]


def _divides(row: Row) -> bool:
    return bool(row["set_up"].startswith(f"{SAME_GPUS} GPUs"))


def _division(row: Row) -> str:
    """Of a set-up that `_divides`."""
    return str(row["set_up"].removesuffix(f", {_named(row)}").removeprefix(f"{SAME_GPUS} GPUs, "))


def _named(row: Row) -> str:
    """The name of its timings."""
    return str(row["set_up"].split(", ")[-1])
