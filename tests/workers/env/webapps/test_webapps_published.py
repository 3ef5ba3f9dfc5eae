"""The published applications and tasks themselves, where they are: DART_WEBAPPS names `websites` of a CUA-Gym-Hub clone
in which gmail_mock is built, and DART_WEBAPPS_TASKS, if it is set, a folder of bundles with golden patches."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from webapps.todo_tasks import FETCH, SETUP, bundle

from dart.core.action import Click, Finish, Point
from dart.core.types import Task
from dart.testing import conform
from dart.workers.env.webapps.environment import WebAppEnv
from dart.workers.env.webapps.options import WebAppsOptions
from dart.workers.env.webapps.tasks import Tasks
from dart.workers.env.webapps.world import WebApps

HUB, TASKS = os.environ.get("DART_WEBAPPS", ""), os.environ.get("DART_WEBAPPS_TASKS", "")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not HUB, reason="DART_WEBAPPS names no clone of CUA-Gym-Hub's websites"),
]
SCREEN = (1280, 800)
HANG_SECONDS = 120.0
MAIL = {
    "id": "m1", "threadId": "t1", "from": {"name": "Ada", "email": "ada@example.com"},
    "to": [{"name": "Demo", "email": "demo@example.com"}], "cc": [], "bcc": [], "subject": "Tea at four",
    "body": "Yes?", "timestamp": "2026-02-09T14:00:00Z", "read": False, "starred": False, "important": False,
    "labels": [], "category": "primary", "folder": "inbox", "attachments": [],
}  # fmt: skip
STATE = {"user": {"userId": "u1", "username": "Demo", "email": "demo@example.com"}, "emails": [MAIL], "labels": []}
STAR = FETCH.partition("texts")[0].replace("todo", "gmail") + "print('REWARD:', float(MAILS[0]['starred']))".replace(
    "MAILS", "state['current_state']['emails']"
)


def options(folder: Path) -> dict[str, object]:
    first = SETUP.index("state = ")
    setup = SETUP.replace(SETUP[first : SETUP.index("asked = ")], f"state = {STATE | {'drafts': []}!r}\n")
    bundle(folder / "star", STAR, setup.replace("TODO", "GMAIL"))
    return {"applications": HUB, "tasks_folder": str(folder)}


def test_a_published_application_conforms(tmp_path: Path) -> None:
    conform("webapps", "star", options=options(tmp_path), screen=SCREEN)


async def test_a_click_in_a_published_application_is_rewarded(tmp_path: Path) -> None:
    world = WebApps()
    try:
        await world.start(WebAppsOptions.model_validate(options(tmp_path)), SCREEN)
        env = await world.lease()
        assert isinstance(env, WebAppEnv)
        await env.reset(Task("webapps", "star"))
        assert (await env.judge(Finish(), False)).reward == 0.0
        began = time.monotonic()
        place = None
        while place is None:
            place = await env.page.evaluate(_STAR)
            await asyncio.sleep(0.1)
            assert time.monotonic() - began < HANG_SECONDS, "the mail's star is not on the page"
        await env.act(Click(Point(place[0] / SCREEN[0], place[1] / SCREEN[1])))
        verdict = await env.judge(Finish(), False)
        assert verdict.reward == 1.0
        assert "emails" in str(verdict.evidence["difference"])
    finally:
        await world.close()


_STAR = """(() => {
  const line = [...document.querySelectorAll('span, div')].find(one => one.textContent === 'Tea at four');
  for (let around = line; around; around = around.parentElement) {
    const star = around.querySelector('svg.lucide-star');
    if (star) { const box = star.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; }
  }
  return null;
})()"""


@pytest.mark.skipif(not TASKS, reason="DART_WEBAPPS_TASKS names no folder of bundles")
async def test_published_tasks_give_0_untouched_and_1_when_patched() -> None:
    settings = WebAppsOptions.model_validate({"applications": HUB, "tasks_folder": TASKS})
    names = sorted(path.parent.name for path in Path(TASKS).glob("*/golden_patch.py"))
    assert names
    Tasks(settings).check(names)
    world = WebApps()
    try:
        await world.start(settings, SCREEN)
        env = await world.lease()
        assert isinstance(env, WebAppEnv)
        for name in names:
            await env.reset(Task("webapps", name))
            assert (await env.judge(Finish(), False)).reward == 0.0, name
            await env.reset(Task("webapps", name))
            assert env.session is not None
            patched = await env.session.run((Path(TASKS) / name / "golden_patch.py").read_text())
            assert patched.code == 0, patched.errors
            assert (await env.judge(Finish(), False)).reward == 1.0, name
    finally:
        await world.close()
