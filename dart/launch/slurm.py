"""`dart launch slurm`: a run as one heterogeneous job.

The job's script is made here and kept in the run's directory, which every node sees. Its head says what Slurm is asked
for, a component for each group of `dart.launch.plan`; its rest, slurm.sh, starts and restarts the processes, and brings
the job back when its time is up. Nothing stays behind on the machine that submitted it.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import click

from dart.config import Config, load
from dart.config.cluster import Slurm
from dart.core.fleet.restarts import LASTING_SECONDS, MOST_RESTARTS
from dart.errors import INTERRUPTED, NOT_READY, USER_ERROR, UserError
from dart.launch.plan import GOODBYE_SECONDS, Group, plan
from dart.rundir import HERE, RunDirectory

MB_PER_GB = 1000


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """The command line of `dart launch slurm`."""

    config: Path
    overrides: tuple[str, ...] = ()
    run: Path | None = None
    dry_run: bool = False


def slurm(options: SlurmOptions) -> None:
    """Submit the run, or print its script. Raises UserError."""
    config = load(options.config, options.overrides)
    if options.dry_run:
        path = options.run or config.run.directory / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        click.echo(script(config, path.absolute()), nl=False)
        return
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch here: run this where jobs are submitted, or add --dry-run to see the script"
        )
    if options.run is not None:
        directory = RunDirectory.at(options.run.absolute())
    else:
        directory = RunDirectory.make(config.run.directory.absolute(), config.run.name)
    if directory.summary.is_file():
        click.echo(f"run {directory.path} is finished: its outcome is in {directory.summary}")
        return
    _not_submitted(directory.path)
    written = script(config, directory.path)
    directory.logs.mkdir(exist_ok=True)
    _config(directory.path).write_text(config.as_yaml(), encoding="utf-8")
    _script(directory.path).write_text(written, encoding="utf-8")
    job = _ask("sbatch", "--parsable", str(_script(directory.path))).strip().partition(";")[0]
    _job(directory.path).write_text(job, encoding="ascii")
    click.echo(f"job {job}, run directory {directory.path}")
    click.echo(f"it has {len(plan(config))} components, and Slurm gives each of them nodes of its own")
    click.echo(f"squeue --jobs={job} shows the job, scancel {job} ends it; dart status RUN shows the run")


def script(config: Config, run: Path) -> str:
    """The whole script. `run`: absolute. Raises UserError."""
    if "\n" in str(run):
        raise UserError(f"--run {str(run)!r} has a line break, which no line of #SBATCH can hold: choose another name")
    if config.server.tls_client_ca is not None:
        raise UserError("server.tls_client_ca: `dart launch slurm` gives workers no certificates: remove it; they "
                        "prove themselves with tokens")  # fmt: skip
    groups, settings = plan(config), config.cluster.slurm
    lines = ["#!/bin/bash"]
    for number, group in enumerate(groups):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {option}" for option in _directives(settings, group, run)]
    lines += ["", "# shellcheck disable=SC2034"]
    lines += [f"{name}={shlex.quote(str(value))}" for name, value in _variables(settings, run).items()]
    lines += [f'host="{settings.host}"', "declare -A steps=("]
    for number, group in enumerate(groups):
        lines += [f"    [{group.part}]='--het-group={number} {' '.join((*_resources(group), *_bound(group)))}'"]
    lines += [")", "", "# What each node needs before a process of the part $1.", "prepare() {"]
    lines += [f"    {line}" for line in settings.setup]
    lines += ["    case $1 in"]
    for group in groups:
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in group.environment.items())
        lines += [f"    {group.part}) {exports}: ;;"]
    lines += ["    esac", "}", ""]
    return "\n".join(lines) + resources.files("dart.launch").joinpath("slurm.sh").read_text(encoding="utf-8")


def _directives(settings: Slurm, group: Group, run: Path) -> Iterator[str]:
    """Options of sbatch for one component. Those for the job are the first one's."""
    log = str(run / "logs").replace("%", "%%")
    yield f"--job-name={shlex.quote(f'dart-{run.name}')}"
    if group.part == "coordinator":
        yield f"--output={shlex.quote(f'{log}/slurm-%j.log')}"
        yield "--open-mode=append"
        yield f"--signal=B:USR1@{settings.signal_seconds}"
    yield "--requeue" if settings.requeue else "--no-requeue"
    for name, value in (
        ("partition", settings.partition),
        ("account", settings.account),
        ("qos", settings.qos),
        ("time", math.ceil(settings.time_limit_hours * 60) if settings.time_limit_hours else None),
    ):
        if value is not None:
            yield f"--{name}={value}"
    yield from _resources(group)
    yield from getattr(settings.options, group.part)


def _resources(group: Group) -> Iterator[str]:
    """What Slurm is asked for, for the job and again for the step: a step does not inherit it from a component."""
    cpus = math.ceil(group.needs.cpus)
    yield f"--ntasks={group.count}"
    yield f"--cpus-per-task={cpus}"
    if group.needs.memory_gb is not None:
        yield f"--mem-per-cpu={math.ceil(group.needs.memory_gb * MB_PER_GB / cpus)}M"
    if group.gpus:
        yield f"--gpus-per-task={group.gpus}"


def _bound(group: Group) -> Iterator[str]:
    """Ranks see all GPUs that the job has on their node, and take one each: NCCL cannot reach another rank's memory if
    its GPU is hidden."""
    if group.part == "train" and group.gpus:
        yield "--gpu-bind=none"


def _variables(settings: Slurm, run: Path) -> dict[str, str | int | Path]:
    return {
        "run": run,
        "logs": str(run / "logs").replace("%", "%%"),
        "config": _config(run),
        "script": _script(run),
        "continuing": shlex.join(["dart", "launch", "slurm", f"{HERE}/{_config(run).name}", "--run", HERE]),
        "python": settings.python or sys.executable,
        "save_seconds": settings.signal_seconds - GOODBYE_SECONDS,
        "requeue": "yes" if settings.requeue else "no",
        "most_restarts": MOST_RESTARTS,
        "lasting_seconds": round(LASTING_SECONDS),
        "user_error": USER_ERROR,
        "not_ready": NOT_READY,
        "interrupted": INTERRUPTED,  # of a coordinator that was told to end, and of the script then
    }


def _config(run: Path) -> Path:
    return run / "slurm.yaml"


def _script(run: Path) -> Path:
    return run / "slurm.sbatch"


def _job(run: Path) -> Path:
    """The id of the last job that was submitted for the run."""
    return run / "slurm.job"


def _not_submitted(run: Path) -> None:
    """Two jobs would fight for the run. Raises UserError while Slurm has one for it."""
    if not _job(run).is_file():
        return
    job = _job(run).read_text(encoding="ascii").strip()
    shown = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T"], capture_output=True, text=True, check=False
    )
    if shown.returncode != 0 and "Invalid job id" not in shown.stderr:  # Slurm has forgotten such a job
        raise UserError(
            f"--run {run}: Slurm does not say whether its job {job} has ended ({shown.stderr.strip()}): try again when "
            f"`squeue --jobs={job}` answers"
        )
    if states := shown.stdout.split():
        raise UserError(f"--run {run}: its job {job} is {states[0].lower()}: wait for its end, or `scancel {job}`")


def _ask(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = re.sub(r"(?m)^sbatch: (error: )?", "", done.stderr).strip()
        raise UserError(f"cluster.slurm: sbatch refuses the job: {said}: correct these fields (see `sinfo`)")
    return done.stdout
