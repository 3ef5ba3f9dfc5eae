"""The real adb program with a server of its own, and worlds on fake devices."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from android.daemon import Device
from dart.workers.env.android.environment import AndroidEnv
from dart.workers.env.android.options import AndroidOptions
from dart.workers.env.android.world import Android

SCREEN = (270, 600)
TASKS: dict[str, object] = {
    "switch": {
        "instruction": "Switch demo on.", "setup": ["settings put global demo 0"],
        "check": {"shell": "settings get global demo", "expect": "1"},
        "tear_down": ["settings put global demo 0"],
    },
    "question": {
        "instruction": "How many?", "check": {"shell": 'echo "said: $DART_ANSWER"', "matches": "^said: it's 4[0-9]$"},
    },
    "short": {"instruction": "Be quick.", "step_limit": 2, "check": {"shell": "echo 0", "expect": "1"}},
    "broken": {"instruction": "x", "setup": ["nonsense 1"], "check": {"shell": "echo", "expect": ""}},
    "quick": {"instruction": "x", "check": {"shell": "sleep 0.1", "expect": ""}},
    "left": {"instruction": "x", "check": {"shell": "echo", "expect": ""}, "tear_down": ["exit 4"]},
}  # fmt: skip


@contextlib.contextmanager
def own_adb(home: Path) -> Iterator[None]:
    """adb's server on a port of its own, so that nobody's devices are touched."""
    if shutil.which("adb") is None:
        pytest.skip("adb is not installed: run `make android`")
    with socket.socket() as free, pytest.MonkeyPatch.context() as patch:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        patch.setenv("ANDROID_ADB_SERVER_PORT", str(port))
        patch.setenv("HOME", str(home))
        subprocess.run(["adb", "start-server"], check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run(["adb", "kill-server"], check=True, capture_output=True, env=os.environ)


def folder(at: Path) -> Path:
    """The tasks as files."""
    at.mkdir(exist_ok=True)
    for name, task in TASKS.items():
        (at / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return at


def options(tmp: Path, devices: list[object], **more: object) -> dict[str, object]:
    """`environment.options` that do not wait long. Tasks are those of `folder`, unless devices have servers."""
    served = any(isinstance(one, dict) and "android_world" in one for one in devices)
    tasks: dict[str, object] = {} if served else {"tasks_folder": str(folder(tmp / "tasks"))}
    return {
        "devices": devices, "settle_seconds": 0, "max_settle_seconds": 5, "max_wait_seconds": 0.2,
        "boot_seconds": 20, "locks_folder": str(tmp / "locks"), **tasks, **more,
    }  # fmt: skip


@contextlib.asynccontextmanager
async def leased(
    tmp: Path, devices: list[object], screen: tuple[int, int] = SCREEN, **more: object
) -> AsyncIterator[AndroidEnv]:
    """An environment of a world that has started."""
    world = Android()
    try:
        await world.start(AndroidOptions.model_validate(options(tmp, devices, **more)), screen)
        env = await world.lease()
        assert isinstance(env, AndroidEnv)
        yield env
    finally:
        await world.close()


def device(tmp: Path, **more: object) -> Device:
    return Device(tmp / "device", SCREEN, **more)  # type: ignore[arg-type]
