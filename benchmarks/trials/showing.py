"""Findings for people: tables in the terminal, and pictures in which every run is a line of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.trials import pages
from benchmarks.trials.findings import ArmRow, Finding, Runs, successes
from benchmarks.trials.inference import Estimate, estimate
from benchmarks.trials.pages import p_value, percent, points
from benchmarks.trials.protocol import Protocol
from benchmarks.trials.records import Point
from benchmarks.trials.sources import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 240
"""Columns of a table that is no terminal's."""


def told(found: Estimate) -> pages.Estimate:
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}


def console() -> Console:
    """A terminal of its own width; in a file or a pipe, wide enough for what the tables hold."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def show_arms(rows: Sequence[ArmRow], title: str) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row.endpoints))
    table = Table("arm", "runs", *names, "environment steps", "updates", "staleness", "stale", "pooled", title=title)
    for row in rows:
        endpoints = {name: told(found) for name, found in row.endpoints.items()}
        table.add_row(
            row.arm, str(row.runs), *(percent(endpoints.get(name)) for name in names),
            f"{row.env_steps.mean:.0f}", f"{row.updates.mean:.0f}", f"{row.staleness.mean:.1f}",
            f"{row.stale.mean:.1%}", f"{row.pooled.mean:.0f}",
        )  # fmt: skip
    console().print(table)


def show_findings(found: Sequence[Finding]) -> None:
    table = Table("endpoint", "compared", "points", "p", "p, Holm", "p, Welch", "would have been found", "n")
    for one in found:
        smallest = "" if one.smallest is None else f"{100 * one.smallest:.1f}"
        table.add_row(
            one.endpoint, f"{one.reference} - {one.arm}", points(told(one.difference)),
            p_value(one.p), p_value(one.p_holm), p_value(one.p_unpaired), smallest, str(one.difference.n),
        )  # fmt: skip
    console().print(table)


def say_if_incomplete(missing: Sequence[tuple[str, int]], total: int) -> None:
    if missing:
        names = shortened([f"{arm}-{seed}" for arm, seed in missing])
        print(f"INCOMPLETE: {len(missing)} of {total} runs are missing, so nothing is concluded yet: {names}")


def show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"NOTE: {note}")


def draw(path: Path, runs: Runs, protocol: Protocol, by: Callable[[Point], float], label: str) -> Path:
    """Success in training, a thin line for each run and a thick one for the mean; and each run's primary endpoints."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = 1 + len(protocol.primary)
    figure, axes = plt.subplots(1, width, figsize=(6 + 3.2 * len(protocol.primary), 4.8), squeeze=False)
    colours = {arm: f"C{number}" for number, arm in enumerate(runs)}
    lines(axes[0][0], runs, colours, by)
    axes[0][0].set(xlabel=label, ylabel="success in training, mean over tasks")
    axes[0][0].legend(fontsize=8)
    for axis, endpoint in zip(axes[0][1:], protocol.primary, strict=True):
        found = {arm: list(successes(made, endpoint, protocol).values()) for arm, made in runs.items()}
        _dots(axis, {arm: values for arm, values in found.items() if values}, colours)
        axis.set_title(f"held out: {endpoint.name}", fontsize=9)
    figure.suptitle(
        f"{protocol.name}: {len(protocol.seeds)} seeds planned; each run is a thin line or a dot", fontsize=10
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def lines(axis: Axes, runs: Runs, colours: Mapping[str, str], by: Callable[[Point], float]) -> None:
    """Every run as a thin line, and each arm's mean as a thick one, as far as all of its runs go."""
    import numpy as np

    for arm, made in runs.items():
        curves = [found for run in made.values() if (found := run["curve"])]
        for found in curves:
            axis.plot([by(one) for one in found], [one.success for one in found], color=colours[arm], lw=0.6, alpha=0.6)
        if not curves:
            continue
        first, last = max(by(found[0]) for found in curves), min(by(found[-1]) for found in curves)
        grid = np.linspace(first, last, 100)
        each = [np.interp(grid, [by(one) for one in found], [one.success for one in found]) for found in curves]
        axis.plot(grid, np.mean(each, axis=0), color=colours[arm], lw=2.2, label=f"{arm} ({len(curves)})")
    axis.grid(alpha=0.3)


def _dots(axis: Axes, found: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> None:
    for place, (arm, values) in enumerate(found.items()):
        axis.plot([place] * len(values), values, "o", color=colours[arm], ms=4, alpha=0.6)
        mean, half = fmean(values), estimate(values).half_width
        axis.errorbar([place + 0.2], [mean], yerr=[half or 0.0], fmt="s", color=colours[arm], capsize=3)
    axis.set_xticks(range(len(found)), list(found), rotation=40, ha="right", fontsize=8)
    axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.3)
