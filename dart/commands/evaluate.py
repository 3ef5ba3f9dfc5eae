"""`dart eval`: a checkpoint's success rate on held-out seeds."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from dart.commands.train import check_before, new_directory, percent, run_in_loop
from dart.config import Config, load
from dart.coordinator.summary import write_summary


def evaluate(
    config_path: Path, overrides: Sequence[str], checkpoint: Path | None, episodes: int | None, *, quiet: bool
) -> None:
    """Evaluate and print; eval.json in the run directory holds the numbers. Raises UserError."""
    config = load(config_path, overrides)
    changes: dict[str, object] = {}
    if checkpoint is not None:
        changes["model"] = config.model.model_copy(update={"path": str(checkpoint)})
    if episodes is not None or not config.evaluation.episodes:
        changes["evaluation"] = config.evaluation.model_copy(update={"episodes": episodes or 200})
    config = Config.model_validate(config.model_copy(update=changes).model_dump())
    check_before(config, True)
    directory = new_directory(config, f"{config.run.name}-eval")
    summary = run_in_loop(config, directory, training=False, resume=False, quiet=quiet, local=True)
    if summary is None:
        sys.exit(130)
    write_summary(directory, summary)
    result = summary["evaluation"]
    click.echo(f"success {percent(result)} of {config.model.path}")
    for task, rate in result["per_task"].items():
        click.echo(f"  {task:24s} {percent(rate)}")
    click.echo(f"terminations {json.dumps(result['terminations'])}, {result['steps']:.2f} steps per episode")
    click.echo(f"numbers in {directory / 'summary.json'}")
