"""Successes in other run directories: `curation.pool.sources` copies them into this run, `sft.sources` imitates them.

A copy is like a trajectory of an oracle: it has no log-probabilities and version 0, because the versions of another run
mean nothing in this one. Successes with another prompt, grammar or vocabulary are refused.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from dart.agent.templates import digest_of
from dart.agent.vocabulary import vocabulary_digest
from dart.config import Agent, Config
from dart.core.curation.pool import unscored
from dart.core.types import Trajectory, without_bytes
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store.blobs import BlobError
from dart.store.database import Database, Reader
from dart.store.records import Success

POOL = "curation.pool.sources"
SFT = "sft.sources"


async def check_sources(config: Config, field: str) -> None:
    """Check that every folder of that field exists and fits this run. Raises UserError."""
    for directory in _folders(config) if field == POOL else config.sft.sources:
        async with await open_source(directory, field) as source:
            first, *_ = await fitting_successes(source, directory, config, field, per_task=None)
            try:
                await source.trajectory(first.trajectory_id, with_images=True)
            except BlobError as error:
                raise UserError(
                    f"{field}: {directory} lacks screenshots ({error}): copy its blobs folder too"
                ) from None


async def copy_sources(config: Config, database: Database) -> int:
    """Copy as many of each source's successes as the pool can hold, all or none. Returns their number.

    Raises UserError.
    """
    copies: list[Trajectory] = []
    for number, directory in enumerate(_folders(config), 1):
        async with await open_source(directory, POOL) as source:
            for success in await fitting_successes(source, directory, config, POOL, config.curation.pool.per_task):
                stored = await source.trajectory(success.trajectory_id, with_images=True)
                assert stored is not None, f"{success.trajectory_id} is not in {directory}"
                steps = stored.trajectory.steps
                await database.blobs.put_many_async(image for step in steps for image in step.images)
                copies.append(_copy(stored.trajectory, f"collected-{number}-"))
    await database.add_collected(copies, time.time())
    return len(copies)


def _folders(config: Config) -> list[Path]:
    return list(dict.fromkeys(config.curation.pool.sources)) if config.curation.pool.enabled else []


async def open_source(directory: Path, field: str) -> Reader:
    """Open the folder; the caller closes it. Raises UserError with the name of the config's field."""
    run = RunDirectory(directory)
    if not run.is_run:
        raise UserError(
            f"{field}: {directory} is not a run directory: it has no {run.database.name}; name folders that "
            "`dart collect` made"
        )
    return await run.open()


async def fitting_successes(
    source: Reader, directory: Path, config: Config, field: str, per_task: int | None
) -> list[Success]:
    """The source's successes on this run's tasks: the newest `per_task` of each, or all if it is None.

    Raises UserError if there is none, or if its tokens or prompts mean something else in this run.
    """
    theirs = (await source.run()).config
    # Runs that do not say how they read did so strictly. What was read strictly is read alike by the reference.
    unsaid = Agent(read="strict").model_dump(mode="json")
    for name, ours in config.agent.model_dump(mode="json").items():
        other = theirs.get("agent", {}).get(name, unsaid[name])
        if other != ours and not (name == "read" and other == "strict"):
            raise UserError(
                f"{field}: {directory} was made with agent.{name} {other}, and this run has {ours}: "
                f"set agent.{name} to {other}, or collect again with this config"
            )
    if theirs.get("prompt", digest_of(config.agent)) != digest_of(config.agent):  # older runs do not say
        raise UserError(
            f"{field}: {directory} was made by another version of dart, whose texts for agent.prompt "
            f"{config.agent.prompt} are not those of this one: collect again"
        )
    if "vocabulary" not in theirs:
        raise UserError(
            f"{field}: {directory} was made by an older dart, which did not record the model's vocabulary, so nobody "
            "knows what its tokens mean: collect again"
        )
    if theirs["vocabulary"] is None or theirs["vocabulary"] != vocabulary_digest(config.model.folder):
        raise UserError(
            f"{field}: {directory} was made with the vocabulary of {theirs.get('model', {}).get('path')}, and "
            f"model.path {config.model.path} has another, where its tokens mean something else: collect again with it"
        )
    tasks = config.environment.tasks
    names, (first, last) = tasks.training, tasks.eval_seeds
    found = await source.newest_successes(per_task)
    wanted = [success for success in found if success.task.name in names]
    evaluated = {name for name in tasks.evaluation if name not in tasks.single_instance}
    held_out = [one for one in wanted if one.task.name in evaluated and first <= one.task.seed < last]
    if held_out and config.evaluation.episodes:
        raise UserError(
            f"{field}: {directory} has {len(held_out)} successes on seeds in environment.tasks.eval_seeds [{first}, "
            f"{last}), for example {held_out[0].task.id}, so the evaluation would not be held out: move eval_seeds, or "
            "leave the folder out"
        )
    if not wanted:
        there = ", ".join(sorted({success.task.name for success in found})) or "none at all"
        raise UserError(
            f"{field}: {directory} holds no success of {', '.join(names)} (there are of {there}): "
            "collect these, or leave the folder out"
        )
    return wanted


def _copy(success: Trajectory, prefix: str) -> Trajectory:
    return replace(
        success,
        id=f"{prefix}{success.id}",
        group_id=f"{prefix}{success.group_id}",
        steps=tuple(unscored(step, 0) for step in without_bytes(success).steps),
        last_image=None,  # the pool needs the steps alone
    )
