"""`dart collect`: gathers successes for the experience pool and as a data set (docs/collect.md).

It makes an ordinary run directory, without a trainer: run.db holds the successes, dataset/train.parquet their steps.
"""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dart.agent.vocabulary import vocabulary_digest
from dart.commands.endpoint import EndpointOptions
from dart.commands.running import JobRun, check_before, run_in_loop, seed_range
from dart.config import Config, load, parse
from dart.coordinator.sampling.endpoint import probe
from dart.coordinator.summary import write_json
from dart.errors import INTERRUPTED, UserError
from dart.job import Collect, Teacher
from dart.rundir import RunDirectory
from dart.store.dataset import check_writable, write_dataset
from dart.worlds.plugs import find, known_here

ATTEMPTS_PER_SUCCESS = 10
"""Attempts at a task per wanted success, when --most-attempts is not given."""


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """The command line of `dart collect`. None means not given."""

    config: Path
    teacher: Teacher
    overrides: tuple[str, ...] = ()
    checkpoint: str | None = None
    endpoint: EndpointOptions = field(default_factory=EndpointOptions)
    per_task: int = 8
    most_attempts: int | None = None
    samples: int | None = None
    seeds: str | None = None
    temperature: float | None = None
    external_workers: bool = False
    quiet: bool = False


def collect(options: CollectOptions) -> None:
    """Collect, write the data set and print the outcome. Raises UserError for anything wrong, before it starts."""
    _check_options(options)
    config = load(options.config, options.overrides)
    if options.checkpoint is not None:
        model = config.model.model_dump() | {"path": options.checkpoint}
        config = parse(config.model_dump() | {"model": model}, "--checkpoint")
    plan = _plan(options, config)
    if set(config.environment.tasks.training) - set(config.environment.tasks.single_instance):
        _check_reachable(plan)
    check_writable()
    _check_machine(options, config, plan)
    if plan.endpoint:
        probe(plan.endpoint)
    directory = RunDirectory.make(config.run.directory, f"{config.run.name}-collect")
    summary = run_in_loop(JobRun(config, directory, plan, options.quiet, local=not options.external_workers))
    if summary is not None:
        write_json(directory.summary, summary)
    rows = asyncio.run(_write(directory, _source(plan, config)))
    if summary is None:
        click.echo(f"{rows} steps in {directory.dataset}")
        sys.exit(INTERRUPTED)
    report(summary["collected"], directory, rows)
    if rows:
        click.echo(f"train from it: dart train {options.config} --set 'curation.pool.sources=[{directory.path}]'")


def _check_options(options: CollectOptions) -> None:
    """Raises UserError for an option that does not apply to the chosen teacher."""
    said: dict[str, tuple[object, tuple[str, ...]]] = {
        "--checkpoint": (options.checkpoint, ("policy",)),
        **{name: (value, ("endpoint",)) for name, value in options.endpoint.given.items()},
        "--samples": (options.samples, ("endpoint", "policy")),
        "--temperature": (options.temperature, ("endpoint", "policy")),
    }
    for option, (value, teachers) in said.items():
        if value is not None and options.teacher not in teachers:
            raise UserError(
                f"{option} {value} does not apply to --from {options.teacher}: omit it, or use --from {teachers[-1]}"
            )
    if options.temperature is not None and not math.isfinite(options.temperature):
        raise UserError(
            f"--temperature {options.temperature} is not a finite number: use 0 for greedy, 1 as in training"
        )


def _plan(options: CollectOptions, config: Config) -> Collect:
    return Collect(
        teacher=options.teacher,
        seeds=_seeds(options.seeds, config) if options.seeds else config.environment.tasks.train_seeds,
        per_task=options.per_task,
        most_attempts=options.most_attempts or ATTEMPTS_PER_SUCCESS * options.per_task,
        samples=options.samples or 1,
        temperature=config.rollout.temperature if options.temperature is None else options.temperature,
        endpoint=options.endpoint.address("--from endpoint") if options.teacher == "endpoint" else None,
    )


def _check_machine(options: CollectOptions, config: Config, plan: Collect) -> None:
    """Raises UserError when this machine lacks something that is needed."""
    path_of = "--checkpoint" if options.checkpoint else "model.path"
    if not options.external_workers:
        check_before(config, plan, path_of)
    elif vocabulary_digest(config.model.folder) is None:
        raise UserError(
            f"{path_of} {config.model.path}: this machine also needs the model's tokenizer.json, because the "
            "vocabulary is stored with what is collected: copy the folder here"
        )
    if options.teacher == "oracle" and known_here(config.environment.kind):
        _check_oracle(config)


# ---- what to collect ----


def _seeds(seeds: str, config: Config) -> tuple[int, int]:
    if (given := seed_range(seeds)) is None:
        raise UserError(
            f"--seeds {seeds[:60]!r} is not FIRST:LAST with FIRST below LAST, up to 2^63: 0:100 is 100, from 0 to 99"
        )
    first, last = given
    start, end = config.environment.tasks.eval_seeds
    if first < end and start < last:
        raise UserError(
            f"--seeds {seeds}: these overlap environment.tasks.eval_seeds [{start}, {end}), and what is collected is "
            "trained on: choose seeds outside that range"
        )
    return given


def _check_reachable(plan: Collect) -> None:
    """Raises UserError when the plan cannot yield the wanted number of successes."""
    attempts = (plan.seeds[1] - plan.seeds[0]) * plan.samples
    if plan.per_task > plan.most_attempts:
        raise UserError(
            f"--most-attempts {plan.most_attempts} is less than --per-task {plan.per_task}: raise it, or omit it"
        )
    if plan.per_task > attempts:
        raise UserError(
            f"--per-task {plan.per_task} successes need at least as many attempts, and seeds {plan.seeds[0]}:"
            f"{plan.seeds[1]} with {plan.samples} samples each allow {attempts}: widen --seeds or lower --per-task"
        )


def _check_oracle(config: Config) -> None:
    kind = config.environment.kind
    known = find(kind).oracle_tasks()
    if not known:
        raise UserError(f"environment.kind {kind} has no oracle: use --from policy or --from endpoint")
    if unknown := [name for name in config.environment.tasks.training if name not in known]:
        raise UserError(
            f"environment.tasks: the oracle does not know {', '.join(unknown)}; it knows {', '.join(known)}"
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


async def _write(directory: RunDirectory, source: str) -> int:
    async with await directory.open() as database:
        return await write_dataset(database, directory.dataset, source)


def report(collected: dict[str, Any], directory: RunDirectory, rows: int) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    for column in ("kept", "wanted", "attempts", "failures"):
        table.add_column(column, justify="right")
    for name, task in collected["per_task"].items():
        counts = (task["kept"], collected["wanted"], task["attempts"], task["failures"])
        table.add_row(name, *(str(count) for count in counts))
    Console().print(table)
    for name, task in collected["per_task"].items():
        if task["given_up"]:
            click.echo(f"{name}: {task['given_up']} attempts could not be made, the last because: {task['why']}")
    click.echo(f"{rows} steps in {directory.dataset}")
    if not rows:
        click.echo("no attempt succeeded: try --most-attempts, another teacher, or easier tasks")
