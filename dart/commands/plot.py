"""Pictures as PNG: the learning curve of a run, from its metrics.jsonl, and an evaluation, from its evaluation.json."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import click

from dart.core.evaluation.documents import Document, Interval, Side
from dart.core.progress import take_up
from dart.rundir import RunDirectory
from dart.store.lines import read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Update(TypedDict):
    """The fields of an `update` event that are drawn."""

    update: int
    train_seconds: float
    success_rate: float | None
    """None where nothing was sampled."""
    success_by_task: dict[str, float]
    env_utilisation: float
    rollout_utilisation: float


def learning_curve(directory: RunDirectory) -> Path | None:
    """Draw success against training time and environment steps; None without matplotlib, updates or disk space."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return None
    updates, evaluations = read_metrics(directory)
    if not updates:
        return None
    figure, (success, tasks, speed) = plt.subplots(1, 3, figsize=(15, 4.2), constrained_layout=True)
    minutes = [update["train_seconds"] / 60 for update in updates]
    rates = [math.nan if (rate := update["success_rate"]) is None else rate for update in updates]
    success.plot(minutes, rates, color="tab:blue", label="training, recent")
    for number, (decoding, results) in enumerate(evaluations.items(), 1):
        _held_out(success, decoding, f"C{number}", {"before": 0.0, "after": minutes[-1]}, results)
    _axes(success, "minutes of training", "success rate", "Success")
    success.set_ylim(0, 1.02)
    for name in updates[-1]["success_by_task"]:
        rates = [update["success_by_task"].get(name, math.nan) for update in updates]
        tasks.plot(minutes, rates, label=_plain(name))
    _axes(tasks, "minutes of training", "recent success rate", "By task")
    tasks.set_ylim(0, 1.02)
    speed.plot(minutes, [update["env_utilisation"] for update in updates], label="environment utilisation")
    speed.plot(minutes, [update["rollout_utilisation"] for update in updates], label="roll-out utilisation")
    speed.set_ylim(0, 1.02)
    _axes(speed, "minutes of training", "share of time", "Utilisation")
    picture = _saved(figure, directory.learning_curve)
    plt.close(figure)
    return picture


def _saved(figure: Figure, path: Path) -> Path | None:
    """Write the picture; if that fails, which it does on a full disk, say so: what it shows has been stored before."""
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        click.echo(f"{path} could not be written ({error}); the numbers that it would show are stored", err=True)
        return None
    return path


def _held_out(axes: Axes, decoding: str, colour: str, at: Mapping[str, float], results: Mapping[str, Interval]) -> None:
    """Held-out success before and after as one line with 95 % intervals. `at`: where each label is drawn."""
    found = [(at[label], results[label]) for label in at if label in results]
    if not found:
        return
    means = [rate["mean"] for _, rate in found]
    bars = [[rate["mean"] - rate["low"] for _, rate in found], [rate["high"] - rate["mean"] for _, rate in found]]
    label = f"held out, {decoding}: " + " → ".join(f"{mean:.0%}" for mean in means)
    at_minutes = [minutes for minutes, _ in found]
    axes.errorbar(at_minutes, means, yerr=bars, fmt="o:", capsize=4, color=colour, label=label, clip_on=False)


def read_metrics(directory: RunDirectory) -> tuple[list[Update], dict[str, dict[str, Interval]]]:
    """The updates of the run's policy in order, and its evaluations by decoding and label."""
    kinds = tuple(f'{{"event": "{kind}"' for kind in ("update", "evaluation"))
    wanted = (line for line in read_lines(directory.metrics) if line.startswith(kinds))
    events = [event for line in wanted if (event := _event(line)) is not None]
    updates: dict[int, Update] = {}
    evaluations: dict[str, dict[str, Interval]] = {}
    for event in events:
        if event["event"] == "evaluation":
            results = evaluations.setdefault(str(event.get("decoding", "sampled")), {})
            results[str(event["label"])] = cast("Interval", event)
        else:
            update = cast("Update", event)
            take_up(updates, update["update"], update)
    return list(updates.values()), evaluations


def _event(line: str) -> dict[str, object] | None:
    """The event on the line; None for a line that was cut off."""
    try:
        event: dict[str, object] = json.loads(line)
    except ValueError:
        return None
    return event


def evaluation_picture(directory: Path, document: Document) -> Path | None:
    """Draw success per task with its interval, and pass@k if there are several samples.

    None without matplotlib or room on the disk.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return None
    sides: list[Side] = [document, document["against"]] if "against" in document else [document]
    names = list(dict.fromkeys(name for side in sides for name in side["success"]["per_task"]))
    widths = [1.5 + 0.9 * (1 + len(names))]
    if len(document["pass_at_k"]) > 1:
        widths.append(4.5)
    figure, ((success, *rest),) = plt.subplots(
        1, len(widths), figsize=(sum(widths), 4.8), width_ratios=widths, squeeze=False, constrained_layout=True
    )
    _by_task(success, sides, [*names, "all"])
    for curves in rest:
        _pass_curves(curves, sides)
    picture = _saved(figure, directory / "evaluation.png")
    plt.close(figure)
    return picture


def _by_task(axes: Axes, sides: Sequence[Side], names: Sequence[str]) -> None:
    for number, side in enumerate(sides):
        by_name = {**side["success"]["per_task"], "all": side["success"]}  # without tasks that could not be evaluated
        rates = [by_name[name] for name in names if name in by_name]
        shift = 0.2 * (number - (len(sides) - 1) / 2)
        at = [index + shift for index, name in enumerate(names) if name in by_name]
        means = [rate["mean"] for rate in rates]
        bars = [[rate["mean"] - rate["low"] for rate in rates], [rate["high"] - rate["mean"] for rate in rates]]
        label = f"{_label(side)}: {means[-1]:.0%}"
        axes.errorbar(at, means, yerr=bars, fmt="o", capsize=4, label=label, clip_on=False)
    axes.axvline(len(names) - 1.5, color="black", alpha=0.3, linewidth=1)
    axes.set_xticks(range(len(names)), [_plain(name) for name in names], rotation=30, ha="right")
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(0, 1.02)
    _axes(axes, "", "success rate, 95 % interval", "Success by task")


def _pass_curves(axes: Axes, sides: Sequence[Side]) -> None:
    for side in sides:
        rates = list(side["pass_at_k"].values())
        ks = range(1, len(rates) + 1)
        (line,) = axes.plot(ks, [rate["mean"] for rate in rates], "o-", label=_label(side))
        low, high = [rate["low"] for rate in rates], [rate["high"] for rate in rates]
        axes.fill_between(ks, low, high, alpha=0.2, color=line.get_color())
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(0, 1.02)
    _axes(axes, "k", "success in at least one of k samples", "pass@k")


def _label(side: Side) -> str:
    """A checkpoint in a legend: its run, its version, and how it was sampled."""
    parts = [part for part in Path(side["checkpoint"]).parts if part not in ("checkpoints", "/")]
    return _plain(f"{'/'.join(parts[-2:])}, temperature {side['protocol']['temperature']:g}")


def _plain(text: str) -> str:
    """Dollar signs as such: matplotlib would set what stands between two of them as mathematics, or fail to."""
    return text.replace("$", r"\$")


def _axes(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
