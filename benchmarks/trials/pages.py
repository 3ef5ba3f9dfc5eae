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


def arms(found: Results) -> Table:
    """Each arm's success at every endpoint, the base policy first."""
    names = list(dict.fromkeys(name for row in found["arms"] for name in row["endpoints"]))
    head = ("arm", "runs", *names, "environment steps", "updates", "staleness", "stale", "pooled")
    rows = [
        [row["arm"], str(row["runs"]), *(percent(row["endpoints"].get(name)) for name in names),
         f"{row['env_steps']['mean']:,.0f}", f"{row['updates']['mean']:.0f}", f"{row['staleness']['mean']:.1f}",
         f"{row['stale']['mean']:.1%}", f"{row['pooled']['mean']:.0f}"]
        for row in found["arms"]
    ]  # fmt: skip
    if (base := found["base"]) is not None:
        rows.insert(0, ["(base policy)", "", *(percent(base.get(name)) for name in names), *[""] * 5])
    return head, rows + _incomplete(found, len(head)) + _notes(found, len(head))


def comparisons(found: Results) -> Table:
    head = ("endpoint", "compared", "points", "p", "p, Holm", "p, Welch", "would have been found, points", "seeds")
    rows = [
        [one["endpoint"], f"{one['reference']} - {one['arm']}", points(one["difference"]),
         p_value(one["p"]), p_value(one["p_holm"]), p_value(one["p_unpaired"]),
         "" if one["smallest"] is None else f"{100 * one['smallest']:.1f}", str(one["difference"]["n"])]
        for one in found["comparisons"]
    ]  # fmt: skip
    return head, rows + _incomplete(found, len(head))


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


def temperatures(found: Results) -> Table:
    """The base policy's held-out success at several temperatures."""
    at = found.get("temperatures", {})
    levels = list(dict.fromkeys(level for by_level in at.values() for level in by_level))
    rows = [[one, *(f"{by_level[level]:.1%}" for level in levels)] for one, by_level in at.items()]
    return ("base policy at temperature", *levels), rows


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
