"""Tables of experiments for the docs, from results/learning/NAME.json. None where there are no results yet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "learning"
Results = Mapping[str, Any]
"""What results/learning/NAME.json has, as `findings.as_json` and the experiments make it."""
Table = tuple[Sequence[str], list[list[str]]]
"""Head and rows."""


def read(name: str) -> Results | None:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    found: Results = json.loads(path.read_text(encoding="utf-8"))["results"]
    return found


def below(found: Results, reference: str, levels: str = "medium and hard") -> Table:
    """Arms on some levels, best first, and by how much `reference` is above them: the generated tables.

    Only arms that are compared with it; p with the correction, where there is one.
    """
    compared = [
        one for one in found["comparisons"] if one["reference"] == reference and one["endpoint"].startswith(levels)
    ]
    endpoints = list(dict.fromkeys(one["endpoint"] for one in compared))
    named = {reference, *(one["arm"] for one in compared)} if compared else set()
    head = ("held-out success", *(column for name in endpoints for column in (name, f"below {reference} by")))
    rows = []
    for row in [row for row in found["arms"] if row["arm"] in named]:
        cells = [f"{row['arm']}, {row['runs']} runs"]
        for name in endpoints:
            of_arm = [one for one in compared if (one["endpoint"], one["arm"]) == (name, row["arm"])]
            cells += [percent(row["endpoints"][name]), "; ".join(map(_below, of_arm))]
        rows.append((row["endpoints"][endpoints[0]]["mean"], cells))
    made = [cells for _, cells in sorted(rows, reverse=True)]
    return head, made + (_incomplete(found, len(head)) if made else [])


def _below(one: Mapping[str, Any]) -> str:
    difference = one["difference"]
    low, high = difference["low"], difference["high"]
    interval = "" if low is None or high is None else f" ({100 * low:.0f} to {100 * high:.0f})"
    p = one["p"] if one["p_holm"] is None else one["p_holm"]
    return f"{100 * difference['mean']:.0f} points{interval}, p = {p_value(p)}".replace("= <", "<")


def times(found: Results) -> Table:
    """Minutes and updates to each target by arm and seed, then the ratios."""
    head = ("target", "arm", "minutes of training, by seed", "updates", "times as long as")
    rows, updates = [], found.get("updates", {})
    for target, arms_of in found.get("seconds", {}).items():
        for arm, by_seed in arms_of.items():
            said = ["never" if seconds is None else f"{seconds / 60:.1f}" for seconds in by_seed.values()]
            made = ["" if count is None else f"{count:.0f}" for count in updates[target][arm].values()]
            slower = [one for one in found.get("ratios", []) if one["target"] == target and one["slower"] == arm]
            rows.append([target, arm, ", ".join(said), ", ".join(made), "; ".join(_ratio(one) for one in slower)])
    return head, rows + _incomplete(found, len(head)) + _notes(found, len(head))


def _ratio(one: Mapping[str, Any]) -> str:
    if one["ratio"] is None:
        return f"{one['faster']}: not known, it did not always get there"
    interval = "" if one["low"] is None or one["high"] is None else f" ({one['low']:.1f} to {one['high']:.1f})"
    return f"{one['faster']}: {'at least ' if one['at_least'] else ''}{one['ratio']:.1f}{interval}"


def _incomplete(found: Results, width: int) -> list[list[str]]:
    if found["complete"]:
        return []
    return [[f"**incomplete: {len(found['missing'])} runs are missing**", *[""] * (width - 1)]]


def _notes(found: Results, width: int) -> list[list[str]]:
    return [[f"note: {one}", *[""] * (width - 1)] for one in found.get("notes", [])]


def percent(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    if found["low"] is None or found["high"] is None:
        return f"{found['mean']:.1%}"
    return f"{found['mean']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def points(found: Mapping[str, Any]) -> str:
    if found["low"] is None or found["high"] is None:
        return f"{100 * found['mean']:+.1f}"
    return f"{100 * found['mean']:+.1f} ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"


def p_value(p: float | None) -> str:
    if p is None:
        return ""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"
