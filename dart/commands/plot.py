"""The learning curve of a run as a PNG, from its metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def learning_curve(directory: Path) -> Path | None:
    """Draw success against training time and environment steps; None without matplotlib or without updates."""
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
    success.plot(minutes, [update["success_rate"] for update in updates], color="tab:blue", label="training, recent")
    for label, at in (("before", 0.0), ("after", minutes[-1])):
        if rate := evaluations.get(label):
            bar = [[rate["mean"] - rate["low"]], [rate["high"] - rate["mean"]]]
            success.errorbar(
                [at], [rate["mean"]], yerr=bar, fmt="o", capsize=4, label=f"held out, {label}: {rate['mean']:.0%}"
            )
    _axes(success, "minutes of training", "success rate", "Success")
    success.set_ylim(0, 1.02)
    for name in updates[-1]["success_by_task"]:
        tasks.plot(minutes, [update["success_by_task"].get(name, float("nan")) for update in updates], label=name)
    _axes(tasks, "minutes of training", "recent success rate", "By task")
    tasks.set_ylim(0, 1.02)
    speed.plot(minutes, [update["env_utilisation"] for update in updates], label="environment utilisation")
    speed.plot(minutes, [update["rollout_utilisation"] for update in updates], label="roll-out utilisation")
    speed.set_ylim(0, 1.02)
    _axes(speed, "minutes of training", "share of time", "Utilisation")
    path = directory / "learning_curve.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def read_metrics(directory: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The run's updates in order, and its evaluations by label."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return (
        [event for event in events if event["event"] == "update"],
        {event["label"]: event for event in events if event["event"] == "evaluation"},
    )


def _axes(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
