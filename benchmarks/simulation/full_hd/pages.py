"""The tables of docs/efficiency.md from the simulated runs: all of them, those with full-HD timings, and the controls
with the same 16 GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.simulation.full_hd import in_words
from benchmarks.trials.pages import Table

Row = dict[str, Any]
RATIOS = ("env_utilisation", "rollout_utilisation", "trained_actions_per_minute")
"""What schedules are compared by."""
SAME_GPUS = 16
"""The GPUs of 8 replicas and the paper's trainer. Set-ups that divide them in another way are named after them."""


def ladder(rows: Sequence[Row]) -> Table:
    """All runs but those of `same_gpus`."""
    made = [
        [in_words(row["set_up"]), row["rung"], f"{row['env_utilisation']:.1%}", f"{acting(row):.1%}",
         f"{row['rollout_utilisation']:.1%}", f"{row['trainer_utilisation']:.1%}",
         f"{row['trained_actions_per_minute']:.0f}", f"{row['staleness']['mean']:.1f}", over_coupled(row, rows)]
        for row in rows
        if not _divides(row)
    ]  # fmt: skip
    head = ("set-up", "schedule", "environments", "acting or resetting", "replicas", "trainer", "actions/min trained",
            "versions behind, mean", "over coupled")  # fmt: skip
    return head, made


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
    """8 replicas and 8 training GPUs beside other divisions of the same GPUs, by timings."""
    others = [row for row in rows if _divides(row)]
    rungs = {row["rung"] for row in others}
    made = []
    for named in dict.fromkeys(map(_named, others)):
        halves = [row for row in rows if row["set_up"] == f"180 environments, 8 training GPUs, {named}"]
        paper = next(row for row in halves if row["rung"] == "decoupled")
        shown = [("8 sample and 8 train", row) for row in halves if row["rung"] in rungs]
        shown += [(_division(row), row) for row in others if _named(row) == named]
        for division, row in shown:
            made.append(
                [in_words(named), division, row["rung"], f"{row['env_utilisation']:.1%}", f"{acting(row):.1%}",
                 f"{row['trained_actions_per_minute']:.0f}", f"{row['staleness']['mean']:.1f}",
                 *(f"{paper[name] / row[name]:.2f} ×" for name in ("env_utilisation", "trained_actions_per_minute"))]
            )  # fmt: skip
    head = ("timings", f"of {SAME_GPUS} GPUs", "schedule", "environments", "acting or resetting", "actions/min trained",
            "versions behind, mean", "8 and 8, decoupled, over this: environments", "actions")  # fmt: skip
    return head, made


def decoupled(rows: Sequence[Row]) -> Table:
    """What prompts and training cost the decoupled schedule, with the paper's trainer and with a larger one."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        if row["rung"] == "decoupled" and " training GPUs, honest" in row["set_up"]:
            cells.setdefault(in_words(_named(row)), []).extend(
                [f"{row['env_utilisation']:.1%}", f"{acting(row):.1%}", f"{row['trained_actions_per_minute']:.0f}"]
            )
    columns = ("environments busy", "acting or resetting", "actions/min trained")
    head = ("timings", *(f"{gpus} GPUs train: {name}" for gpus in (8, 18) for name in columns))
    return head, [[name, *row] for name, row in cells.items()]


def _divides(row: Row) -> bool:
    return bool(row["set_up"].startswith(f"{SAME_GPUS} GPUs"))


def _division(row: Row) -> str:
    """Of a set-up that `_divides`."""
    return str(row["set_up"].removesuffix(f", {_named(row)}").removeprefix(f"{SAME_GPUS} GPUs, "))


def _named(row: Row) -> str:
    """The name of its timings."""
    return str(row["set_up"].split(", ")[-1])
