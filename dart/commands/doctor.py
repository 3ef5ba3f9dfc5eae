"""`dart doctor`: finds what is missing on this machine before a run does. Its checks import nothing heavy."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import click

from dart.agent import resizing
from dart.config import BUILTIN_SUITE, Config, Environment, load
from dart.core.capacity import devices
from dart.errors import USER_ERROR, UserError
from dart.job import Job, Train
from dart.processes import fits, limits
from dart.processes.gpus import LEAST_DRIVER, gpus_here, old_driver, place
from dart.processes.settings import of_launchers
from dart.trackers.base import KINDS, installed
from dart.wire.channel import listen
from dart.worlds.missing import problem
from dart.worlds.plugs import find, read_options

QWEN2_5 = "Qwen2_5_VLForConditionalGeneration"
SHARED_BY_ENGINE_MB = 256
"""vLLM 0.33 makes rings of up to 240 MB between the processes of one replica, and ends if there is no room for one."""
TRIED_SECONDS = 60
"""How long an environment may take to begin a task in `dart doctor`."""
ARCHITECTURES = ("Qwen3VLForConditionalGeneration", QWEN2_5)


def doctor(config_path: Path | None, overrides: Sequence[str] = ()) -> None:
    """Print a line per check; exit code 2 when something is missing. Raises UserError for a wrong config."""
    if overrides and config_path is None:
        raise UserError(f"--set {overrides[0]} changes a config, and none is named: dart doctor CONFIG --set …")
    config = load(config_path, overrides) if config_path else None
    bad = 0
    for name, check in checks(config, Train()):
        why = _why(check)
        bad += why is not None
        _tell(name, why)
    if config is not None and not bad and (tried := _one_environment(config.environment)) is not None:
        bad += bool(tried)
        _tell("one environment", tried or None)
    for note in limits.notes(config, Train()):
        click.echo(f"allows   {note}")
    for note in fits.notes(config, Train()) if config else ():
        click.echo(f"needs    {note}")
    of_config = (*warnings(config), *fits.warnings(config, Train())) if config else ()
    for warning in (*_driver_warnings(), *_launcher_warnings(), *of_config):
        click.echo(f"warning  {warning}")
    click.echo("nothing is missing" if not bad else f"{bad} to fix")
    sys.exit(USER_ERROR if bad else 0)


def _tell(name: str, why: str | None) -> None:
    click.echo(f"{'missing' if why else 'ok     '}  {name}" + (f": {why}" if why else ""))


def _one_environment(environment: Environment) -> str | None:
    """What is wrong with one environment of a world whose code dart does not know, which another process makes, shows
    and takes a step in: "" if nothing is, None if that was not to be tried, or took too long to tell."""
    if not (environment.kind == "gym" or ":" in environment.kind) or not environment.tasks.all:
        return None
    name = environment.tasks.all[0]
    seed = 0 if name in environment.tasks.single_instance else environment.tasks.train_seeds[0]
    asked = json.dumps([environment.kind, name, environment.options, environment.viewport, seed])
    command = [sys.executable, "-c", _TRY_WORLD, asked]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TRIED_SECONDS)
    except subprocess.TimeoutExpired:
        click.echo(f"warning  one environment: {environment.kind} has not begun {name} within {TRIED_SECONDS} s")
        return None
    said = tried.stderr.strip().splitlines() or [f"the process ended with code {tried.returncode}"]
    return f"{environment.kind} with task {name}: {said[-1]}" if tried.returncode else ""


_TRY_WORLD = """
import json, sys
from dart.errors import UserError
from dart.testing import begin
kind, task, options, screen, seed = json.loads(sys.argv[1])
try:
    begin(kind, task, options, tuple(screen), seed)
except (UserError, AssertionError) as error:
    sys.exit(" ".join(str(error).split()))
"""


def problems(config: Config, job: Job) -> list[str]:
    """The problems that keep this config's job from running here; empty when there are none."""
    return [why for _, check in checks(config, job) if (why := _why(check)) is not None]


def _why(check: Callable[[], str | None]) -> str | None:
    try:
        return check()
    except UserError as error:
        return str(error)


def checks(config: Config | None, job: Job) -> list[tuple[str, Callable[[], str | None]]]:
    """Pairs of name and check; a check returns what is wrong and how to fix it, or None."""
    found: list[tuple[str, Callable[[], str | None]]] = [
        ("python >= 3.11", _python),
    ]
    if job.model:
        found += [
            ("torch", lambda: _module("torch", "pip install 'dart-gui-rl[train,cpu]', or [train,gpu]")),
            ("transformers", lambda: _module("transformers", "pip install 'dart-gui-rl[train]'")),
            ("shared memory", partial(_shared_memory, config, job)),
        ]
    if config is None or job.replicas(config):
        found.append(("vllm", _vllm))
    if config is None or job.environments(config):
        found += _world(config.environment if config else None)
    if config is not None:
        if job.model:
            found.append(("model folder", lambda: _model(config)))
        if job.model and job.environments(config):
            seen = config.environment.viewport
            found.append(("size of screenshots", lambda: resizing.problem(config.agent, seen, config.model.folder)))
        found.append(("limits of this machine", lambda: limits.problem(config, job)))
        found.append(("port", lambda: _port(config)))
        if config.run.database or config.run.blobs or config.checkpoint.upload:
            found.append(("database and object store", lambda: _stores(config)))
        if isinstance(job, Train) and ":" in config.trainer.loss.kind:
            found.append(("your loss", lambda: _loss(config.trainer.loss.kind)))
        if config.tracking.to:
            found.append(("trackers", lambda: _trackers(config)))
        found.append(("gpus", lambda: _gpus(config, job)))
        if job.model:
            found.append(("memory of the gpus", lambda: fits.too_much(config, job)))
    return found


def _stores(config: Config) -> str | None:
    from dart.store.elsewhere.place import check

    return problem(lambda: check(config.run, config.checkpoint.upload))


def _loss(kind: str) -> str | None:
    """What is wrong with a loss of the user's own. Another process tries it out: this one does not import torch."""
    tried = subprocess.run([sys.executable, "-c", _TRY_LOSS, kind], capture_output=True, text=True, check=False)
    said = tried.stderr.strip().splitlines() or [f"{kind} ended the process with code {tried.returncode}"]
    return f"trainer.loss.kind: {said[-1]}" if tried.returncode else None


_TRY_LOSS = """
import sys
from dart.algo.objectives import find
try:
    find(sys.argv[1])
except ValueError as error:
    sys.exit(str(error))
"""


def _trackers(config: Config) -> str | None:
    missing = [f"tracking.to names {kind}: {KINDS[kind].remedy}" for kind in config.tracking.to if not installed(kind)]
    return "\n".join(missing) or None


def _driver_warnings() -> list[str]:
    if devices.on_cpu() or (version := old_driver()) is None:
        return []
    return [
        f"driver: this machine's NVIDIA driver is {version}, and torch and vLLM are built for CUDA 13, which needs "
        f"{LEAST_DRIVER} or newer: install a newer driver, or, on a data-center GPU, NVIDIA's cuda-compat package"
    ]


def _launcher_warnings() -> list[str]:
    if not (names := of_launchers(os.environ)):
        return []
    return [
        f"environment: {_some(names)} tells a process its place among those of another launcher: `dart train` does not "
        "pass it on, and `dart worker --role train` is what it says"
    ]


def warnings(config: Config) -> list[str]:
    """What does not keep the config from running, but is probably a mistake."""
    tasks, cap, found = config.environment.tasks, config.curation.step_limit, []
    if tasks.not_held_out:
        found.append(
            f"held-out tasks: the only instance of {_some(tasks.not_held_out)} is also trained on, so success on it is "
            "not held-out success: hold tasks out by name, in environment.tasks.eval_names or the file's eval part"
        )
    if longer := [name for name, limit in tasks.step_limits.items() if limit > cap]:
        found.append(
            f"step limits: those of {_some(longer)} are above curation.step_limit ({cap}), which is the cap on all: "
            "raise it if they are meant"
        )
    if (left_out := tasks.evaluation[config.evaluation.episodes :]) and config.evaluation.episodes:
        found.append(
            f"evaluation.episodes: with {config.evaluation.episodes} for {len(tasks.evaluation)} tasks, the evaluation "
            f"leaves out {_some(left_out)}: set it to {len(tasks.evaluation)} or more"
        )
    if twice := [name for name, times in Counter((*tasks.names, *tasks.train_names)).items() if times > 1]:
        found.append(f"task names: {_some(twice)} is listed more than once, which has no effect: list it once")
    return [*found, *_world_warnings(config.environment)]


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _python() -> str | None:
    if tuple(sys.version_info[:2]) >= (3, 11):
        return None
    return f"this is Python {sys.version.split()[0]}: use 3.11 or newer"


def _module(name: str, remedy: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"the package {name} is not installed: {remedy}"


def _vllm() -> str | None:
    if missing := _module("vllm", "pip install 'dart-gui-rl[rollout,cpu]', or [rollout,gpu] on a GPU machine"):
        return missing
    vision = importlib.util.find_spec("torchvision")
    with contextlib.suppress(metadata.PackageNotFoundError):
        cpu = "+cpu" in metadata.version("torch")
        if vision and cpu and not _torchvision_mended():
            return "torchvision's compiled operators do not load with a CPU torch: run `python -m dart.mend`"
    return None


def _torchvision_mended() -> bool:
    from dart.mend import mended

    return mended()


def _shared_memory(config: Config | None, job: Job) -> str | None:
    if not Path("/dev/shm").is_dir():
        return None
    needed, why = 64, ""
    if config is not None and job.replicas(config) and config.rollout.gpus > 1:
        needed, why = SHARED_BY_ENGINE_MB, " by the processes of a vLLM replica on more than one GPU"
    free = shutil.disk_usage("/dev/shm").free >> 20
    if free > needed:
        return None
    return (
        f"/dev/shm has only {free} MB free, and {needed} are needed{why}: give the machine or container more, for "
        "example docker run --shm-size=8g"
    )


def _model(config: Config) -> str | None:
    folder = config.model.folder
    field = f"model.path {config.model.path}"
    if not folder.is_dir():
        known = ", ".join(
            f"builtin:{path.name}" for path in sorted(folder.parent.glob("*/")) if (path / "config.json").exists()
        )
        built_in = f" (built in are {known})" if config.model.path.startswith("builtin:") else ""
        return f"{field}: the folder does not exist: name a Hugging Face model folder on this machine{built_in}"
    try:
        config_json = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = [str(name) for name in config_json.get("architectures") or ()]
    except (OSError, ValueError, AttributeError, TypeError):
        return f"{field}: the folder has no readable config.json: name a folder made by save_pretrained"
    if not any(name in ARCHITECTURES for name in architectures):
        return (
            f"{field}: architecture {', '.join(architectures) or 'unnamed'} is not supported: "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    if config.agent.grammar == "qwen3_vl" and QWEN2_5 in architectures:
        return (
            f"{field}: agent.grammar qwen3_vl reads coordinates on a grid of 0 to 999, as Qwen3-VL writes them, and "
            f"{QWEN2_5} writes pixels, so that its clicks would land elsewhere: use agent.grammar: ui_tars with a "
            "UI-TARS model, or a Qwen3-VL"
        )
    if not list(folder.glob("*.safetensors")):
        return f"{field}: the folder has no *.safetensors: save the model with save_pretrained"
    return None


def _world(environment: Environment | None) -> list[tuple[str, Callable[[], str | None]]]:
    """The world's own checks, and a check of the task names."""
    kind, options = (environment.kind, environment.options) if environment else (BUILTIN_SUITE, {})
    try:
        world = find(kind)
        read = read_options(world, options)
        asked = world.checks_with_screen(read, environment.viewport) if environment else world.checks(read)
        machine = list(asked.items())
    except UserError as error:
        why = str(error)
        return [("world", lambda: why)]

    def tasks() -> str | None:
        if environment is None or any(check() for _, check in machine):
            return None  # reported already
        names = environment.tasks.all
        wrong = [why for name in names if (why := problem(partial(world.check_tasks, read, (name,))))]
        return wrong[0] + (f" ({len(wrong) - 1} more names are wrong)" if len(wrong) > 1 else "") if wrong else None

    return [*machine, ("task names", tasks)] if environment else machine


def _world_warnings(environment: Environment) -> list[str]:
    """The world's own warnings; none if it is not here or its options are wrong, which the checks report."""
    try:
        world = find(environment.kind)
        options = read_options(world, environment.options)
    except UserError:
        return []
    return [f"{environment.kind} tasks: {warning}" for warning in world.warnings(options, environment.tasks.all)]


def _gpus(config: Config, job: Job) -> str | None:
    return problem(lambda: place(config, job, gpus_here()))


def _port(config: Config) -> str | None:
    if not config.server.port:
        return None
    try:
        with listen(config.server.host, config.server.port):
            return None
    except OSError as error:
        return (
            f"server.port {config.server.port} on {config.server.host}: {error.strerror}: "
            "stop the other program or set server.port to 0 for any free port"
        )
