"""Findings for people: tables in the terminal, and pictures in which every run is a line of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import rich.table
from rich.console import Console

from benchmarks.trials.findings import Runs, successes
from benchmarks.trials.inference import estimate
from benchmarks.trials.pages import Table
from benchmarks.trials.protocol import Protocol
from benchmarks.trials.records import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 240
"""Columns of a table that is no terminal's."""


def show(table: Table) -> None:
    """Print one of the pages' tables. A terminal has its own width; a file or a pipe gets what the table holds."""
    console, (head, rows) = Console(), table
    if not console.is_terminal:
        console = Console(width=WIDTH)
    shown = rich.table.Table(*head)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


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
