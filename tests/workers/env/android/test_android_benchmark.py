"""Tasks of a server with AndroidWorld's routes: how they begin, what counts, and servers that fail."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from android.daemon import Device
from android.phone import SWITCH
from android.programs import leased, options
from android.server import AndroidWorld

from dart.core.action import Click, Finish, FinishStatus, Point, System
from dart.core.types import Task
from dart.errors import UserError
from dart.workers.env.android.adb import DeviceError
from dart.workers.env.android.environment import AndroidEnv
from dart.workers.env.android.options import AndroidOptions
from dart.workers.env.android.world import Android
from dart.worlds.plugs import check

SWITCH_AT = Point((SWITCH[0] + SWITCH[2]) / 2, (SWITCH[1] + SWITCH[3]) / 2)


@dataclass
class Place:
    env: AndroidEnv
    server: AndroidWorld
    phone: Device

    async def begin(self, name: str, seed: int = 1) -> str:
        return (await self.env.reset(Task("android", name, seed))).instruction

    async def score(self, last: Finish, at_limit: bool = False) -> float:
        return (await self.env.judge(last, at_limit)).reward


@pytest.fixture
def server(phone: Device, tmp_path: Path) -> Iterator[AndroidWorld]:
    subprocess.run(["adb", "connect", phone.serial], check=True, capture_output=True)
    with AndroidWorld(tmp_path / "server", phone.serial) as made:
        yield made


@pytest.fixture
async def place(phone: Device, server: AndroidWorld, tmp_path: Path) -> AsyncIterator[Place]:
    async with leased(tmp_path, [{"serial": phone.serial, "android_world": server.url}]) as env:
        yield Place(env, server, phone)


async def test_an_episode_asks_what_the_benchmarks_own_runner_does(place: Place) -> None:
    goal = await place.begin("SwitchOn", 30)
    await place.env.act(Click(SWITCH_AT))
    assert await place.score(Finish()) == 1.0
    await place.env.renew()
    task = {"task_type": "SwitchOn", "task_idx": "0"}
    assert place.server.requests() == [
        ["/suite/reinitialize", {"n_task_combinations": "1", "seed": "30", "task_family": "android_world"}, None],
        ["/suite/task_list", {"max_index": "-1"}, None],
        ["/task/initialize", task, None],
        ["/reset", {"go_home": "true"}, None],
        ["/task/goal", task, None],
        ["/task/score", task, None],
        ["/task/tear_down", task, None],
    ]
    assert goal.startswith("Switch demo on")


async def test_the_seed_is_the_instance(place: Place) -> None:
    goals = [await place.begin("SwitchOn", seed) for seed in range(4)]
    assert len(set(goals)) > 1
    assert [await place.begin("SwitchOn", seed) for seed in range(4)] == goals


async def test_a_declared_end_counts_whatever_its_status(place: Place) -> None:
    statuses: tuple[FinishStatus, ...] = ("success", "fail", "infeasible", "call_user")
    await place.begin("SwitchOn")
    assert [await place.score(Finish(status)) for status in statuses] == [0.0] * 4
    await place.env.act(Click(SWITCH_AT))
    assert [await place.score(Finish(status)) for status in statuses] == [1.0] * 4


async def test_at_the_step_limit_a_task_that_is_done_counts_nothing(place: Place) -> None:
    await place.begin("SwitchOn")
    await place.env.conclude(Click(SWITCH_AT))
    verdict = await place.env.judge(Click(SWITCH_AT), True)
    assert verdict.reward == 0.0
    assert verdict.evidence == {"score": 1.0, "declared": False}


async def test_a_fraction_of_a_composite_task_is_its_reward(place: Place) -> None:
    await place.begin("HalfDone")
    assert await place.score(Finish()) == 0.5


async def test_the_answer_is_graded(place: Place) -> None:
    word = (await place.begin("SayWord")).split()[3].rstrip("?")
    assert await place.score(Finish()) == 0.0
    assert await place.score(Finish(answer="no")) == 0.0
    assert await place.score(Finish(answer=f"{word} {word}")) == 1.0


async def test_grading_that_raises_is_a_0_with_its_reason(place: Place) -> None:
    await place.begin("CannotGrade")
    verdict = await place.env.judge(Finish(), False)
    assert verdict.reward == 0.0
    assert verdict.evidence["score_error"] == "Internal Server Error"
    assert await place.env.probe()


async def test_a_task_that_cannot_begin_voids_the_attempt_and_the_next_begins(place: Place) -> None:
    with pytest.raises(DeviceError, match=r"/task/initialize.* answered 500"):
        await place.begin("CannotBegin")
    with pytest.raises(UserError, match="no task 'Nothing'"):
        await place.begin("Nothing")
    assert await place.begin("SwitchOn")


async def test_a_server_that_restarted_or_is_shared_is_no_verdict(place: Place) -> None:
    await place.begin("SwitchOn")
    await place.env.act(Click(SWITCH_AT))
    place.server.stop()
    with pytest.raises(DeviceError, match="did not answer"):
        await place.score(Finish())
    assert not await place.env.probe()
    place.server.start()
    assert await place.env.probe()
    with pytest.raises(DeviceError, match="has another suite now"):
        await place.score(Finish())


async def test_a_device_that_dies_during_grading_is_no_verdict(place: Place) -> None:
    await place.begin("SwitchOn")
    place.phone.stop()
    # The server answers 500, as AndroidWorld's does when its adb fails; the env worker then asks `probe`.
    assert await place.score(Finish()) == 0.0
    assert not await place.env.probe()


async def test_apps_are_opened_by_the_benchmarks_names(place: Place) -> None:
    await place.begin("SwitchOn")
    assert not (await place.env.act(System("open_app", "Notes"))).last_action_error
    assert ["/execute_action", {}, {"action_type": "open_app", "app_name": "Notes"}] in place.server.requests()
    assert ["monkey", "-p", "com.example.notes", "1"] in place.phone.events()


def test_servers_and_names_are_checked_before_a_run(server: AndroidWorld, phone: Device, tmp_path: Path) -> None:
    given = options(tmp_path, [{"serial": phone.serial, "android_world": server.url}])
    check("android", given, ["SwitchOn", "SayWord"])
    with pytest.raises(UserError, match="has no task SwitchOff: it has 5, such as CannotBegin"):
        check("android", given, ["SwitchOn", "SwitchOff"])
    checks = Android.checks(AndroidOptions.model_validate(given))
    assert [name for name, one in checks.items() if one()] == []
    server.stop()
    assert "does not answer" in (checks["android_world servers"]() or "")
    check("android", given, ["SwitchOff"])  # nothing is known, and the run may be for another machine
    server.start()
