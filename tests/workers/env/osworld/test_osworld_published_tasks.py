"""OSWorld's tasks, server and evaluators as published, end to end, on tasks that need no virtual machine.

    DART_OSWORLD_SERVER, DART_OSWORLD_PYTHON   as in support/osworld/desktop.py
    DART_OSWORLD_EVALUATORS                    what `python -m dart.workers.env.osworld install-evaluators` made
    DART_OSWORLD_TASKS                         evaluation_examples/examples of OSWorld

Only tasks are named here whose set-up does nothing, or only moves the pointer: the desktop is on this machine.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from osworld.desktop import HEIGHT, WIDTH, Desktop, desktop, needs_server

from dart.core.action import Action, Code, Finish, Observe
from dart.core.types import Task
from dart.errors import UserError
from dart.workers.env.osworld.episodes import OSWorldEnv
from dart.workers.env.osworld.machine import MachineError
from dart.workers.env.osworld.options import OSWorldOptions
from dart.workers.env.osworld.world import OSWorld

EVALUATORS, TASKS = os.environ.get("DART_OSWORLD_EVALUATORS", ""), os.environ.get("DART_OSWORLD_TASKS", "")
pytestmark = [
    needs_server,
    pytest.mark.skipif(not EVALUATORS or not TASKS, reason="DART_OSWORLD_EVALUATORS or DART_OSWORLD_TASKS is not set"),
]
INFEASIBLE = (
    "chrome/3720f614-37fd-4d04-8a6b-76f54f8c222d", "chrome/93eabf48-6a27-4cb6-b963-7d5fe1e0d3a9",
    "gimp/5ca86c6f-f317-49d8-b6a7-b527541caae8", "multi_apps/6d72aad6-187a-4392-a4c4-ed87269c51cf",
    "os/b3d4a89c-53f2-4d6b-8b6a-541fb5d205fa", "os/c288e301-e626-4b98-a1ab-159dcb162af5",
    "os/fe41f596-a71b-4c2f-9b2f-9dcd40b568c3",
)  # fmt: skip
PLAYER = "multi_apps/937087b6-f668-4ba6-9110-60682ee33441"
FEASIBLE = (
    PLAYER, "multi_apps/f8369178-fafe-40c2-adc4-b9b08a125456", "multi_apps/3c8f201a-009d-4bbe-8b65-a6f8b35bb57f",
    "os/94d95f96-9699-4208-98ba-3c3119edf9c2",
)  # fmt: skip
MAKE_VLC_THE_PLAYER = """
import subprocess, pathlib
there = pathlib.Path.home() / ".local/share/applications/vlc.desktop"
there.parent.mkdir(parents=True, exist_ok=True)
there.write_text("[Desktop Entry]\\nType=Application\\nName=VLC\\nExec=vlc\\nMimeType=video/mp4;\\n")
for kind in ("mp4", "mpeg", "ogg", "webm", "x-matroska", "x-msvideo", "quicktime", "x-flv"):
    subprocess.run(["xdg-mime", "default", "vlc.desktop", f"video/{kind}"], check=True)
"""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[OSWorldEnv, Desktop]]:
    with desktop(tmp_path / "desktop") as started:
        world = OSWorld()
        options = OSWorldOptions.model_validate(
            {
                "tasks_folder": TASKS, "evaluators": EVALUATORS, "state_folder": str(tmp_path / "state"),
                "static": {"hosts": [f"127.0.0.1:{started.port}"]}, "start_seconds": 0.5, "settle_seconds": 0.2,
            }
        )  # fmt: skip
        try:
            await world.start(options, (WIDTH, HEIGHT))
            env = await world.lease()
            assert isinstance(env, OSWorldEnv)
            yield env, started
        finally:
            await world.close()


async def reward(env: OSWorldEnv, name: str, last: Action, before: Action | None = None) -> float:
    seen = await env.reset(Task("osworld", name))
    assert seen.instruction and (seen.image.width, seen.image.height) == (WIDTH, HEIGHT)
    if before is not None:
        await env.act(before)
    return (await env.judge(last, False)).reward


async def test_published_tasks(place: tuple[OSWorldEnv, Desktop]) -> None:
    env, started = place
    for name in INFEASIBLE:
        assert await reward(env, name, Finish()) == 0.0, name
        assert await reward(env, name, Observe()) == 0.0, name
        assert await reward(env, name, Finish("infeasible")) == 1.0, name
    for name in FEASIBLE:
        assert await reward(env, name, Finish()) == 0.0, name
        assert await reward(env, name, Finish("infeasible")) == 0.0, name
    assert await reward(env, PLAYER, Finish(), Code("python", MAKE_VLC_THE_PLAYER)) == 1.0
    assert await reward(env, PLAYER, Finish("infeasible")) == 0.0
    with pytest.raises(UserError, match=r"set-up step googledrive is not supported"):
        await env.reset(Task("osworld", "multi_apps/0c825995-5b70-4526-b663-113f4c999dd2"))
    await env.reset(Task("osworld", PLAYER))
    started.kill()
    with pytest.raises(MachineError):
        await env.judge(Finish(), False)
    assert not await env.probe()
