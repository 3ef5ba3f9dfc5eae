"""The env worker's role, command by command, with a real browser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dart.config import Environment, EnvWorkerConfig, SharedBlobs
from dart.core import action as a
from dart.core.types import Task
from dart.errors import UserError
from dart.screenshots.stored import StoredScreenshots
from dart.store.blobs import BlobStore
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, task_to_proto
from dart.wire.role import CommandError
from dart.workers.env.browser import Page
from dart.workers.env.miniwob import MiniWobEnv
from dart.workers.env.role import EnvRole

pytestmark = pytest.mark.browser


def config(shared: SharedBlobs | None = None, **changes: object) -> str:
    environment = {"tasks": {"names": ["click-test"]}, "slots": 2, "step_timeout_seconds": 5.0, **changes}
    return EnvWorkerConfig(environment=Environment.model_validate(environment), shared_blobs=shared).model_dump_json()


def assignment(name: str, attempt: int = 1) -> pb.Assignment:
    return pb.Assignment(assignment_id=name, attempt=attempt)


def reset(name: str, seed: int = 1, task: str = "click-test", attempt: int = 1) -> pb.Reset:
    return pb.Reset(assignment=assignment(name, attempt), task=task_to_proto(Task("miniwob", task, seed)))


def page_of(role: EnvRole, name: str) -> Page:
    env = role._held[name, 1].env
    assert isinstance(env, MiniWobEnv)
    return env.page


def act(name: str, action: a.Action, last: bool = False) -> pb.Act:
    return pb.Act(assignment=assignment(name), action=action_to_proto(action), last=last)


@asynccontextmanager
async def prepared(text: str) -> AsyncIterator[tuple[EnvRole, pb.Ready, list[pb.Slots]]]:
    """The role as its session runs it, what it said at first, and what it says of its slots."""
    worker, said = EnvRole(), list[pb.Slots]()
    try:
        ready = await worker.prepare(text)
        running = asyncio.create_task(worker.run(said.append))
        yield worker, ready, said
        running.cancel()
        await asyncio.wait({running})
    finally:
        await worker.close()


@pytest.fixture
async def role() -> AsyncIterator[EnvRole]:
    async with prepared(config()) as (worker, ready, _):
        assert ready.slots == 2 and ready.versions["miniwob"] and "Chrome" in ready.versions["chromium"]
        yield worker


async def test_an_episode(role: EnvRole) -> None:
    seen = await role.handle(reset("e1"))
    assert isinstance(seen, pb.Observed)
    assert (seen.instruction, seen.image.width_pixels, seen.image.height_pixels) == ("Click the button.", 160, 210)
    assert seen.image.data and seen.seconds > 0 and not seen.done
    moved = await role.handle(act("e1", a.Click(a.Point(0.5, 0.05))))
    assert isinstance(moved, pb.Observed) and not moved.done and moved.image.data
    last = await role.handle(act("e1", a.Finish(), last=True))
    assert isinstance(last, pb.Observed) and (last.done, last.reward, last.image.data) == (True, 0.0, b"")
    assert json.loads(last.evidence_json) == {"page_gave_a_verdict": False, "raw": None}
    assert isinstance(await role.handle(pb.Release(assignment=assignment("e1"))), pb.Released)
    with pytest.raises(CommandError, match="send Reset first") as refused:
        await role.handle(act("e1", a.Observe()))
    assert refused.value.code == pb.FAILURE_CODE_INVALID


async def test_screenshots_go_into_the_runs_directory_where_it_is_seen(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    told = StoredScreenshots(blobs).share()
    async with prepared(config(told)) as (worker, ready, _):
        assert ready.shares_blobs
        seen = await worker.handle(reset("e1"))
        assert isinstance(seen, pb.Observed)
        assert seen.image.data == b""
        assert blobs.get(seen.image.sha256).startswith(b"\x89PNG")


async def test_a_delay_makes_it_as_slow_as_a_desktop() -> None:
    async with prepared(config(delay={"reset_seconds": [0.3, 0.4], "step_seconds": [0.6, 0.7]})) as (worker, _, _):
        seen = await worker.handle(reset("e1"))
        moved = await worker.handle(act("e1", a.Wait(0.0)))
    assert isinstance(seen, pb.Observed) and seen.seconds >= 0.3
    assert isinstance(moved, pb.Observed) and moved.seconds >= 0.6


async def test_the_oracle_says_what_it_would_do(role: EnvRole) -> None:
    with pytest.raises(CommandError, match="send Reset first"):
        await role.handle(pb.Suggest(assignment=assignment("e1")))
    await role.handle(reset("e1"))
    suggested = await role.handle(pb.Suggest(assignment=assignment("e1")))
    assert isinstance(suggested, pb.Suggested)
    seen = await role.handle(pb.Act(assignment=assignment("e1"), action=suggested.action))
    assert isinstance(seen, pb.Observed) and (seen.done, seen.reward) == (True, 1.0)
    no_way_on = await role.handle(pb.Suggest(assignment=assignment("e1")))
    assert isinstance(no_way_on, pb.Suggested) and not no_way_on.HasField("action")
    await role.handle(reset("e2", task="click-pie"))
    with pytest.raises(CommandError, match="does not know task 'click-pie': it knows click-button") as refused:
        await role.handle(pb.Suggest(assignment=assignment("e2")))
    assert refused.value.code == pb.FAILURE_CODE_INVALID


async def test_a_reset_waits_for_the_release_that_it_follows(role: EnvRole) -> None:
    await role.handle(reset("e1"))
    await role.handle(reset("e2"))
    waiting = asyncio.ensure_future(role.handle(reset("e3")))
    await asyncio.sleep(0)
    assert not waiting.done()
    await role.handle(pb.Release(assignment=assignment("e1")))
    assert isinstance(await waiting, pb.Observed)


async def test_more_episodes_than_environments_are_refused(role: EnvRole) -> None:
    for name in ("e1", "e2"):
        await role.handle(reset(name))
    role.patience = 0.05
    with pytest.raises(CommandError, match=r"no environment became free within 0\.05 s, and 2 are held") as refused:
        await role.handle(reset("e3"))
    assert refused.value.code == pb.FAILURE_CODE_INVALID


async def test_a_broken_page_fails_its_attempt_alone(role: EnvRole) -> None:
    await role.handle(reset("bad"))
    await role.handle(reset("good"))
    page = page_of(role, "bad")
    page._send("Page.crash", {}, await page._tab(0))
    with pytest.raises(CommandError, match="PageCrashed") as failed:
        await role.handle(act("bad", a.Click(a.Point(0.5, 0.5))))
    assert failed.value.code == pb.FAILURE_CODE_ENVIRONMENT
    assert isinstance(await role.handle(act("good", a.Observe())), pb.Observed)
    await role.handle(pb.Release(assignment=assignment("bad")))
    assert isinstance(await role.handle(reset("bad", attempt=2)), pb.Observed)


async def test_commands_that_make_no_sense(role: EnvRole) -> None:
    await role.handle(reset("e1"))
    for command in (
        reset("e1", task="no-such-task"),
        pb.Act(assignment=assignment("e1")),
        pb.Abort(assignment=assignment("e1")),
    ):
        with pytest.raises(CommandError) as refused:
            await role.handle(command)
        wrong_task = "has no task" in str(refused.value)
        assert refused.value.code == (pb.FAILURE_CODE_TASK if wrong_task else pb.FAILURE_CODE_INVALID)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (config(tasks={"names": ["click-colour"]}), "did you mean click-color"),
        (config(browser="/no/such/browser"), r"environment\.options\.browser is '/no/such/browser'"),
        (config(options={"setle_seconds": 1}), r"environment\.options\.setle_seconds .*did you mean settle_seconds"),
        ('{"environment": {"kind": "desktop"}}', "use the same dart release"),
    ],
)
async def test_a_bad_config_ends_before_any_work(text: str, message: str) -> None:
    worker = EnvRole()
    try:
        with pytest.raises(UserError, match=message):
            await worker.prepare(text)
    finally:
        await worker.close()


async def test_what_is_prepared_anew_has_nothing_of_before() -> None:
    worker = EnvRole()
    for _ in range(2):
        await worker.prepare(config())
        said: list[pb.Slots] = []
        running = asyncio.create_task(worker.run(said.append))
        for name in ("e1", "e2"):
            assert isinstance(await worker.handle(reset(name)), pb.Observed)
        assert (said[-1].count, said[-1].granted, said[-1].booting) == (2, 2, 0)
        running.cancel()
        await asyncio.wait({running})
        await worker.close()
