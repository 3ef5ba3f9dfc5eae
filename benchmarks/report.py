"""The tables in README.md and docs/, from the JSON that the benchmarks wrote: `python -m benchmarks.report`.

A table is between `<!-- NAME -->` and `<!-- /NAME -->`; do not edit it by hand. A test fails if a page differs from
the results. A table that has no results yet is left as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.efficiency import LADDER, file_name
from benchmarks.simulation import full_hd
from benchmarks.simulation.full_hd import pages as full_hd_pages
from benchmarks.trials import pages

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "efficiency.md",
    ROOT / "docs" / "learning.md",
    ROOT / "docs" / "robustness.md",
)
PAPER = {  # DART, arXiv 2509.23866: coupled, decoupled
    "env_utilisation": (0.122, 0.677),
    "rollout_utilisation": (0.296, 0.467),
    "trained_actions_per_minute": (22.6, 43.6),
}


def results(name: str) -> Any:
    """The results in results/NAME.json, or None if there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else None


SHOWN = [f"180 environments, {gpus} training GPUs, {timings}" for timings in full_hd_pages.BESIDE for gpus in (8, 18)]
"""The simulated set-ups that the headline shows."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def headline(short: bool = False) -> str | None:
    """Coupled against decoupled: in the paper, in simulated time, and with every part real. `short`: for the README."""
    rows = [_compared("the paper", *({name: PAPER[name][side] for name in PAPER} for side in (0, 1)))]
    if (found := results("efficiency")) is not None:
        rows += [
            _compared(f"simulated, {full_hd.in_words(set_up)}", *pair)
            for set_up, pair in _pairs(found["runs"], "set_up")
            if set_up in SHOWN
        ]
    if (found := results("efficiency_real")) is not None:
        rows += [
            _compared("real, on two cores", *pair)
            for _, pair in _pairs([row | {"set_up": ""} for row in found["runs"]], "set_up")
        ]
    if short:
        shown = full_hd.in_words("180 environments, 8 training GPUs, honest-sliding")
        rows = [row for row in rows if row[0] in ("the paper", f"simulated, {shown}", "real, on two cores")]
    return table(("", "environments busy", "replicas busy", "actions trained on per minute"), rows)


def _pairs(rows: Sequence[dict[str, Any]], by: str) -> Iterator[tuple[str, tuple[dict[str, Any], dict[str, Any]]]]:
    """(set-up, (its coupled row, its decoupled row))."""
    for name in dict.fromkeys(row[by] for row in rows):
        of = {row["rung"]: row for row in rows if row[by] == name}
        if {"coupled", "decoupled"} <= set(of):
            yield name, (of["coupled"], of["decoupled"])


def _compared(name: str, coupled: dict[str, float], decoupled: dict[str, float]) -> list[str]:
    cells = [name]
    for field in PAPER:
        one, other = coupled[field], decoupled[field]
        written = (f"{one:.0f}", f"{other:.0f}") if other > 1 else (f"{one:.1%}", f"{other:.1%}")
        cells.append(f"{written[0]} → {written[1]} ({other / one:.1f} ×)")
    return cells


def same_gpus() -> str | None:
    """Other divisions of the same GPUs, in simulated time."""
    return None if (found := results("efficiency")) is None else table(*full_hd_pages.same_gpus(found["runs"]))


def real() -> str | None:
    if (found := results("efficiency_real")) is None:
        return None
    spoken = {file_name(rung): rung for rung in LADDER}
    rows = [
        [spoken[row["rung"]], str(row["runs"]), *(with_interval(row, name) for name in PAPER),
         full_hd_pages.over_coupled(row, found["runs"])]
        for row in found["runs"]
    ]  # fmt: skip
    rows += [[f"note: {one}", *[""] * 5] for one in found.get("notes", [])]
    head = ("schedule", "runs", "environments busy", "replicas busy", "actions/min trained", "over coupled")
    return table(head, rows)


def with_interval(row: dict[str, Any], name: str) -> str:
    """A mean over runs, and half of its interval if there were several."""
    said = "{:.0f}" if row[name] > 1 else "{:.1%}"
    half = row.get("half_width", {}).get(name)
    return said.format(row[name]) + ("" if half is None else f" ± {said.format(half)}")


def targets() -> str | None:
    """The coordinator's own costs against their targets."""
    rows = []
    if path := results("step_path"):
        for name, what, least in (("no_pixels", "without pixels", "1/3"), ("pixels_200kb", "with 200 KB", "1/2")):
            row = path[name]
            rows.append(
                [f"step path over raw gRPC, {what}", f"≥ {least}",
                 f"{row['ratio_to_raw']:.2f} ({row['steps_per_second']:,} steps/s)"]
            )  # fmt: skip
    if found := results("decisions"):
        last = found["sizes"][-1]
        for name, what in (("begin", "which rollout begins"), ("finish", "what becomes of a trajectory"),
                           ("route", "which replica takes a request")):  # fmt: skip
            rows.append(
                [f"deciding {what}, at {last['environments']:,} environments", "≤ 50 µs",
                 f"median {last[name]['p50']:.1f} µs, mean {last[name]['mean']:.1f} µs"]
            )  # fmt: skip
    if found := results("sessions"):
        rows += [
            [f"{found['sessions']:,} open environments", "< 2 GB",
             f"{found['coordinator_mb']:,} MB, {found['steps_per_second']:,.0f} steps/s"],
            ["delay of a step there, p99", "≤ 100 ms",
             f"{found['step_delay_ms']['p99']:.0f} ms (p50 {found['step_delay_ms']['p50']:.1f} ms)"],
        ]  # fmt: skip
    return table(("what", "target", "measured"), rows) if rows else None


def _written(name: str) -> Any:
    """The whole of results/NAME.json, or None if there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def storm() -> str | None:
    """Real faults, and the seconds until the next update was stored."""
    if (found := _written("storm")) is None:
        return None
    recoveries = found["seconds_to_the_next_update"]
    rows = [
        (
            fault,
            str(number),
            *(_seconds(recoveries[fault], "n", "p50", "max") if fault in recoveries else ("0", "", "")),
        )
        for fault, number in found["faults"].items()
    ]
    return table(("fault", "faults", "followed by an update", "seconds until then, p50", "longest"), rows)


def soak() -> str | None:
    """What grows while a training run goes on for hours."""
    if (found := _written("soak")) is None:
        return None
    rows = [
        (name, f"{one['first']:,.1f}", f"{one['last']:,.1f}",
         f"{one['slope_per_hour']:+,.2f} ({one['low']:+,.2f} to {one['high']:+,.2f})")
        for name, one in found["series"].items()
    ]  # fmt: skip
    return table(("", "after the first quarter", "at the end", "slope per hour, 95 % interval"), rows)


def faults() -> str | None:
    """Simulated faults by class: how many in all, and how soon the next update came where they were minutes apart."""
    dense, apart = _written("chaos"), _written("chaos_apart")
    if dense is None or apart is None:
        return None
    rows = [
        (
            fault,
            f"{row['faults']:,}",
            *_seconds(apart["by_class"].get(fault, {}), "recovered", "p50_seconds", "p99_seconds"),
        )
        for fault, row in dense["by_class"].items()
    ]
    return table(
        ("fault", "faults 20 s apart", "faults 4 min apart, n", "seconds to the next update, p50", "p99"), rows
    )


def fuzzed() -> str | None:
    """How many of each message were mutated."""
    if (found := results("fuzz")) is None:
        return None
    rows = [
        (role, ", ".join(f"{kind} {number:,}" for kind, number in kinds.items()))
        for role, kinds in found["mutations_by_message"].items()
    ]
    return table(("from a worker of role", "mutated messages"), rows)


def _seconds(row: dict[str, float], *names: str) -> tuple[str, ...]:
    """Whole numbers of a row; empty where it lacks one."""
    return tuple(f"{row[name]:,.0f}" if name in row else "" for name in names)


def learning(name: str, rows: Callable[[pages.Results], pages.Table]) -> str | None:
    """An experiment on the ladder (docs/learning.md)."""
    return None if (found := pages.read(name)) is None else table(*rows(found))


TABLES: dict[str, Callable[[], str | None]] = {
    "headline": headline,
    "headline_short": partial(headline, short=True),
    "same_gpus": same_gpus,
    "real": real,
    "targets": targets,
    "storm": storm,
    "soak": soak,
    "faults": faults,
    "fuzzed": fuzzed,
    "learning_pieces": partial(learning, "ablation", partial(pages.below, reference="full")),
    "learning_own": partial(learning, "controls", partial(pages.below, reference="own-pool")),
    "learning_wallclock_batches": partial(learning, "wallclock_batches", pages.times),
}


def rendered(page: str) -> str:
    """The page with its tables made from the current results. Raises KeyError for an unknown table."""

    def fill(found: re.Match[str]) -> str:
        made = TABLES[found[1]]()
        return found[0] if made is None else f"<!-- {found[1]} -->\n{made}\n<!-- /{found[1]} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", fill, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    options = parser.parse_args()
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if (made := rendered(page)) == page:
            continue
        if options.check:
            sys.exit(f"{path} does not match benchmarks/results: run python -m benchmarks.report")
        path.write_text(made, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
