"""`dart doctor`: what is missing on this machine, before a run finds out. It imports nothing heavy to look."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import click

from dart.config import BUILTIN_SUITE, Config, load
from dart.coordinator.job import Job, Train
from dart.errors import UserError
from dart.processes.gpus import gpus_here, place

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")


def doctor(config_path: Path | None) -> None:
    """Print a line per check; exit code 2 when something is missing."""
    config = load(config_path) if config_path else None
    bad = 0
    for name, check in checks(config, Train()):
        problem = check()
        bad += problem is not None
        click.echo(f"{'missing' if problem else 'ok     '}  {name}" + (f": {problem}" if problem else ""))
    click.echo("everything is there" if not bad else f"{bad} to mend")
    sys.exit(2 if bad else 0)


def problems(config: Config, job: Job) -> list[str]:
    """What keeps this config's job from running here; empty when nothing does."""
    return [problem for _, check in checks(config, job) if (problem := check()) is not None]


def checks(config: Config | None, job: Job) -> list[tuple[str, Callable[[], str | None]]]:
    """Name and check; a check says what is wrong and how to mend it, or None."""
    browser = config.environment.browser if config else None
    found: list[tuple[str, Callable[[], str | None]]] = [
        ("python >= 3.11", _python),
    ]
    if job.model:
        found += [
            ("torch", lambda: _module("torch", "pip install 'dart-gui-rl[train,cpu]', or [train,gpu]")),
            ("transformers", lambda: _module("transformers", "pip install 'dart-gui-rl[train]'")),
            ("shared memory", _shared_memory),
        ]
    if config is None or job.replicas(config):
        found.append(("vllm", _vllm))
    if config is None or job.environments(config):
        found += [
            ("miniwob tasks", lambda: _module("miniwob", "pip install 'dart-gui-rl[env-browser]'")),
            ("chromium", lambda: _browser(browser)),
        ]
    if config is not None:
        if job.model:
            found.append(("model folder", lambda: _model(config)))
        found.append(("port", lambda: _port(config)))
        found.append(("gpus", lambda: _gpus(config, job)))
        if job.environments(config):
            found.append(("task names", lambda: _tasks(config)))
    return found


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
            return "torchvision's compiled operators do not load beside a CPU torch: run `python -m dart.mend`"
    return None


def _torchvision_mended() -> bool:
    from dart.mend import mended

    return mended()


def _browser(named: str | None) -> str | None:
    if named:
        return None if shutil.which(named) else f"environment.browser {named} is not an executable: correct the path"
    if any(shutil.which(name) for name in BROWSERS):
        return None
    return (
        "no Chromium on the PATH: apt-get install -y --no-install-recommends chromium-headless-shell fonts-liberation"
    )


def _shared_memory() -> str | None:
    if not Path("/dev/shm").is_dir():
        return None
    free = shutil.disk_usage("/dev/shm").free
    return None if free > 64 << 20 else f"/dev/shm has only {free >> 20} MB free: give the machine or container more"


def _model(config: Config) -> str | None:
    folder = config.model.folder
    field = f"model.path {config.model.path}"
    if not folder.is_dir():
        known = ", ".join(
            f"builtin:{path.name}" for path in sorted(folder.parent.glob("*/")) if (path / "config.json").exists()
        )
        built_in = f" (there are {known})" if config.model.path.startswith("builtin:") else ""
        return f"{field}: the folder does not exist: name a Hugging Face model folder on this machine{built_in}"
    try:
        architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError):
        return f"{field}: the folder has no readable config.json: name a folder made by save_pretrained"
    if not any(name in ARCHITECTURES for name in architectures):
        return (
            f"{field}: architecture {', '.join(architectures) or 'unnamed'} is not supported: "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    if not list(folder.glob("*.safetensors")):
        return f"{field}: the folder has no *.safetensors: save the model with save_pretrained"
    return None


def _tasks(config: Config) -> str | None:
    if config.environment.kind != BUILTIN_SUITE:
        return (
            f"environment.kind {config.environment.kind}: the env workers that dart starts run {BUILTIN_SUITE} alone: "
            "start `dart coordinator` and env workers of your own"
        )
    if not importlib.util.find_spec("miniwob"):
        return None  # said already
    from importlib import import_module

    try:
        check = import_module("dart.workers.env.miniwob").check_task
    except ImportError as error:
        return f"the env worker does not import ({error}): pip install 'dart-gui-rl[env-browser]'"
    for name in config.environment.tasks.names:
        try:
            check(name)
        except UserError as error:
            return str(error)
    return None


def _gpus(config: Config, job: Job) -> str | None:
    try:
        place(config, job, gpus_here())
    except UserError as error:
        return str(error)
    return None


def _port(config: Config) -> str | None:
    if not config.server.port:
        return None
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.server.host, config.server.port))
        except OSError as error:
            return (
                f"server.port {config.server.port} on {config.server.host}: {error.strerror}: "
                "stop the other program or set server.port to 0 for any free port"
            )
    return None
