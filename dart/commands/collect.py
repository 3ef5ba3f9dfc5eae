"""`dart collect`: successes for the experience pool, and as a data set (docs/collect.md).

A run directory as of any run, without a trainer: run.db holds the successes, dataset/train.parquet their steps.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dart.agent.vocabulary import vocabulary_digest
from dart.commands.train import check_before, new_directory, open_database, run_in_loop
from dart.config import BUILTIN_SUITE, Config, load, parse
from dart.coordinator.job import Collect, Teacher
from dart.coordinator.sampling.endpoint import chosen, probe
from dart.coordinator.summary import write_summary
from dart.errors import UserError
from dart.store.dataset import check_writable, write_dataset

DATASET = Path("dataset") / "train.parquet"
ATTEMPTS_PER_SUCCESS = 10
"""Of a task, where --most-attempts does not say."""


def collect(
    config_path: Path,
    overrides: Sequence[str],
    *,
    teacher: Teacher,
    checkpoint: str | None,
    endpoint: str | None,
    endpoint_model: str | None,
    endpoint_key: str | None,
    endpoint_system: Path | None,
    per_task: int,
    most_attempts: int | None,
    samples: int | None,
    seeds: str | None,
    temperature: float | None,
    external_workers: bool,
    quiet: bool,
) -> None:
    """Collect, write the data set and print what came of it. Raises UserError for anything wrong, before it starts."""
    given = {
        "--checkpoint": (checkpoint, ("policy",)),
        "--endpoint": (endpoint, ("endpoint",)),
        "--endpoint-model": (endpoint_model, ("endpoint",)),
        "--endpoint-key": (endpoint_key, ("endpoint",)),
        "--endpoint-system": (endpoint_system, ("endpoint",)),
        "--samples": (samples, ("endpoint", "policy")),
        "--temperature": (temperature, ("endpoint", "policy")),
    }
    for option, (value, teachers) in given.items():
        if value is not None and teacher not in teachers:
            raise UserError(
                f"{option} {value} says nothing to --from {teacher}: leave it out, or use --from {teachers[-1]}"
            )
    if temperature is not None and not math.isfinite(temperature):
        raise UserError(f"--temperature {temperature} is no number to sample with: use 0 for greedy, 1 as in training")
    config = load(config_path, overrides)
    if checkpoint is not None:
        config = parse(
            config.model_dump() | {"model": config.model.model_dump() | {"path": checkpoint}}, "--checkpoint"
        )
    address = None
    if teacher == "endpoint":
        address = chosen("--from endpoint", endpoint, endpoint_model, endpoint_key, endpoint_system)
    plan = Collect(
        teacher=teacher,
        seeds=_seeds(seeds, config) if seeds else config.environment.tasks.train_seeds,
        per_task=per_task,
        most_attempts=most_attempts or ATTEMPTS_PER_SUCCESS * per_task,
        samples=samples or 1,
        temperature=config.rollout.temperature if temperature is None else temperature,
        endpoint=address,
    )
    _check_reachable(plan)
    check_writable()
    if not external_workers:
        check_before(config, plan)
    elif vocabulary_digest(config.model.folder) is None:
        raise UserError(
            f"model.path {config.model.path}: this machine needs the model's tokenizer.json too, because what is "
            "collected is kept with its vocabulary: copy the folder here"
        )
    if teacher == "oracle" and config.environment.kind == BUILTIN_SUITE:
        _check_oracle(config)
    if plan.endpoint:
        probe(plan.endpoint)
    directory = new_directory(config, f"{config.run.name}-collect")
    summary = run_in_loop(config, directory, plan, quiet=quiet, local=not external_workers)
    if summary is None:
        sys.exit(130)
    write_summary(directory, summary)
    rows = asyncio.run(_write(directory, _source(plan, config)))
    report(summary["collected"], directory, rows)
    if rows:
        click.echo(f"train from it: dart train {config_path} --set 'curation.pool.sources=[{directory}]'")


# ---- what to collect ----


def _seeds(seeds: str, config: Config) -> tuple[int, int]:
    first, _, last = seeds.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UserError(f"--seeds {seeds!r} is not FIRST:LAST with FIRST below LAST: 0:100 is 100, from 0 to 99")
    start, end = config.environment.tasks.eval_seeds
    if int(first) < end and start < int(last):
        raise UserError(
            f"--seeds {seeds}: environment.tasks.eval_seeds is [{start}, {end}), and what is collected is trained on: "
            "choose seeds outside of it"
        )
    return int(first), int(last)


def _check_reachable(plan: Collect) -> None:
    """The wanted number can be had."""
    attempts = (plan.seeds[1] - plan.seeds[0]) * plan.samples
    if plan.per_task > plan.most_attempts:
        raise UserError(
            f"--most-attempts {plan.most_attempts} is less than --per-task {plan.per_task}: raise it, or leave it out"
        )
    if plan.per_task > attempts:
        raise UserError(
            f"--per-task {plan.per_task} successes need as many attempts, and seeds {plan.seeds[0]}:{plan.seeds[1]} "
            f"with {plan.samples} samples each are {attempts}: widen --seeds or lower --per-task"
        )


def _check_oracle(config: Config) -> None:
    known = import_module("dart.workers.env.oracle").TASKS
    if unknown := [name for name in config.environment.tasks.names if name not in known]:
        raise UserError(
            f"environment.tasks.names: the oracle does not know {', '.join(unknown)}: it knows {', '.join(known)}"
        )


# ---- what came of it ----


def _source(plan: Collect, config: Config) -> str:
    match plan.teacher:
        case "oracle":
            return "oracle"
        case "endpoint":
            return f"endpoint {plan.endpoint.model if plan.endpoint else ''}"
        case _:
            return f"policy {config.model.path}"


async def _write(directory: Path, source: str) -> int:
    async with await open_database(directory, create=False) as database:
        return await write_dataset(database, directory / DATASET, source)


def report(collected: dict[str, Any], directory: Path, rows: int) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    for column in ("kept", "wanted", "attempts", "failures"):
        table.add_column(column, justify="right")
    for name, task in collected["per_task"].items():
        counts = (task["kept"], collected["wanted"], task["attempts"], task["failures"])
        table.add_row(name, *(str(count) for count in counts))
    Console().print(table)
    click.echo(f"{rows} steps in {directory / DATASET}")
    if not rows:
        click.echo("no attempt succeeded: try --most-attempts, another teacher, or easier tasks")
