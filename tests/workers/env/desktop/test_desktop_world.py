"""The world in the env worker: the contract, and failures that cost one attempt alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from desktop_samples import needs_desktop, remains

from dart.config import Environment, EnvWorkerConfig, TaskSet
from dart.core.action import Finish, Observe
from dart.core.types import Task
from dart.errors import UserError
from dart.testing import conform
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, task_to_proto
from dart.wire.role import CommandError
from dart.workers.env.desktop import world
from dart.workers.env.desktop.world import Desktop, DesktopOptions
from dart.workers.env.role import EnvRole
from dart.worlds.plugs import check, find

pytestmark = [pytest.mark.desktop]
SCREEN = (320, 240)


class OwnDesktop(Desktop):
    """A world of one's own."""


@needs_desktop
def test_it_conforms() -> None:
    conform("desktop", "dialog-press-3", "dialog-type", screen=SCREEN)


def test_what_is_missing_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "NEEDED", {"no-xvfb": "xvfb", "sh": "dash", "no-openbox": "openbox"})
    monkeypatch.setattr(world, "MODULES", ("Xlib", "no_jeepney"))
    said = {name: check() for name, check in Desktop.checks(DesktopOptions()).items()}
    assert "apt-get install --no-install-recommends xvfb openbox" in str(said["desktop programs"])
    assert "no_jeepney is not installed: run `pip install 'dart-gui-rl[env-desktop]'`" in str(said["desktop packages"])
    with pytest.raises(UserError, match="no_jeepney"):
        asyncio.run(Desktop().start(DesktopOptions(), SCREEN))


def test_options_and_tasks_are_checked_before_anything_starts() -> None:
    with pytest.raises(UserError, match=r"environment\.options\.settle_second"):
        check("desktop", {"settle_second": 1}, [])
    with pytest.raises(UserError, match="no task 'dialog-flower'"):
        check("desktop", {}, ["dialog-flower"])
    assert find("desktop") is Desktop


@asynccontextmanager
async def role(slots: int, kind: str = "desktop") -> AsyncIterator[tuple[EnvRole, asyncio.Queue[pb.Slots]]]:
    hosted, said = EnvRole(), asyncio.Queue[pb.Slots]()
    environment = Environment(kind=kind, viewport=SCREEN, slots=slots, tasks=TaskSet(names=("dialog-press-2",)))
    try:
        await hosted.prepare(EnvWorkerConfig(environment=environment).model_dump_json())
        running = asyncio.create_task(hosted.run(said.put_nowait))
        while (await said.get()).count < slots:
            pass
        yield hosted, said
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        await hosted.close()


def reset(name: str, attempt: int = 1, suite: str = "desktop") -> pb.Reset:
    task = Task(suite, "dialog-press-2", 3)
    return pb.Reset(assignment=pb.Assignment(assignment_id=name, attempt=attempt), task=task_to_proto(task))


def act(name: str, action: object, attempt: int = 1) -> pb.Act:
    assignment = pb.Assignment(assignment_id=name, attempt=attempt)
    return pb.Act(assignment=assignment, action=action_to_proto(action))  # type: ignore[arg-type]


@needs_desktop
async def test_a_subclass_is_a_world_of_its_own() -> None:
    kind = f"{__name__}:{OwnDesktop.__name__}"
    async with role(1, kind) as (hosted, _):
        seen = await hosted.handle(reset("one", suite=kind))
        assert isinstance(seen, pb.Observed) and seen.image.data


@needs_desktop
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_x_server_costs_that_attempt_alone(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped counts as dead: calls to it hang, and only the time limit of the verb ends them."""
    from dataclasses import replace

    monkeypatch.setattr(Desktop, "timeouts", replace(Desktop.timeouts, act=15.0))
    async with role(2) as (hosted, said):
        await hosted.handle(reset("one"))
        await hosted.handle(reset("other"))
        one, _ = (hosted._held[name, 1].env.env.session for name in ("one", "other"))  # type: ignore[attr-defined]
        os.kill(int((one.folder / "x-server").read_text()), number)
        with pytest.raises(CommandError) as failed:
            await hosted.handle(act("one", Observe()))
        assert failed.value.code == pb.FAILURE_CODE_ENVIRONMENT
        seen = await hosted.handle(act("other", Observe()))
        assert isinstance(seen, pb.Observed)
        assert seen.image.data
        for name in ("one", "other"):
            await hosted.handle(pb.Release(assignment=pb.Assignment(assignment_id=name, attempt=1)))
        while (slots := await said.get()).granted < 4:
            assert not slots.reason or number == signal.SIGSTOP
        assert remains(one.folder, one.display) == []
        for name in ("one", "other"):
            again = await hosted.handle(reset(name, 2))
            assert isinstance(again, pb.Observed)
            assert again.image.data


@needs_desktop
async def test_nothing_is_left_after_some_episodes() -> None:
    threads = threading.active_count()
    seen: set[tuple[object, str]] = set()
    async with role(3) as (hosted, _):
        for turn in range(3):
            names = [f"{turn}-{slot}" for slot in range(3)]

            async def episode(name: str) -> None:
                await hosted.handle(reset(name))
                session = hosted._held[name, 1].env.env.session  # type: ignore[attr-defined]
                seen.add((session.folder, session.display))
                last = await hosted.handle(act(name, Finish()))
                assert isinstance(last, pb.Observed)
                assert (last.done, last.reward) == (True, 0.0)
                await hosted.handle(pb.Release(assignment=pb.Assignment(assignment_id=name, attempt=1)))

            await asyncio.gather(*(episode(name) for name in names))
    assert len(seen) == 9, "each episode had a desktop of its own"
    assert [left for folder, display in seen for left in remains(folder, display)] == []  # type: ignore[arg-type]
    assert threading.active_count() <= threads + 16  # the loop's own executor
