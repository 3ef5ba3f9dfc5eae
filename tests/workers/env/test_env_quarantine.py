"""Environments that keep failing, verbs that never end, and what the coordinator is told of time limits: the real role
in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from benchmarks.simulation import virtual_time
from dart.config import Environment, EnvWorkerConfig
from dart.core import action as a
from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, task_to_proto
from dart.wire.role import CommandError
from dart.workers.env.places import FIRST_QUARANTINE_SECONDS, MOST_QUARANTINE_SECONDS, STRIKES, Record
from dart.workers.env.role import EnvRole
from dart.worlds import Action, Env, Observation, Task, Timeouts, Verdict, World, WorldOptions, from_pixels

PICTURE = from_pixels(bytes(3), 1, 1)
HANGS: set[str] = set()
"""Verbs that never end."""


class Machines(World):
    timeouts = Timeouts(start=30, lease=30, reset=20, act=10, judge=900, probe=5, renew=15, close=25)
    made: list[Machine] = []  # noqa: RUF012
    broken: set[int] = set()  # noqa: RUF012
    """The numbers of the machines on which every action fails."""
    alive = True

    async def start(self, options: object, screen: tuple[int, int]) -> None:
        await hang("start")

    async def lease(self) -> Env:
        machine = Machine(WorldOptions(), (1, 1))
        machine.number = len(self.made)
        self.made.append(machine)
        return machine

    async def close(self) -> None:
        await hang("close")


class Machine(Env):
    number = 0
    closed = False

    async def reset(self, task: Task) -> Observation:
        return Observation(PICTURE, "do it")

    async def act(self, action: Action) -> Observation:
        await hang("act")
        if self.number in Machines.broken:
            raise OSError(f"machine {self.number} is broken")
        return Observation(PICTURE)

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        await asyncio.sleep(600)
        return Verdict(0.0)

    async def probe(self) -> bool:
        return Machines.alive or self.number > 0

    async def close(self) -> None:
        self.closed = True


async def hang(verb: str) -> None:
    if verb in HANGS:
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    HANGS.clear()
    monkeypatch.setattr(Machines, "made", [])
    monkeypatch.setattr(Machines, "broken", set())


class Host:
    def __init__(self, slots: int, **changes: object) -> None:
        raw = {"kind": f"{__name__}:Machines", "tasks": {"names": ["a"]}, "slots": slots, **changes}
        self.config = EnvWorkerConfig(environment=Environment.model_validate(raw)).model_dump_json()
        self.role, self.said, self.episodes = EnvRole(), [pb.Slots()], 0

    async def episode(self) -> str:
        """Why it failed; empty if it came to a verdict."""
        self.episodes += 1
        place = pb.Assignment(assignment_id=str(self.episodes), attempt=1)
        why = ""
        try:
            await self.role.handle(pb.Reset(assignment=place, task=task_to_proto(Task(self.role._suite, "a", 1))))
            for action in (a.Click(None), a.Finish()):
                await self.role.handle(pb.Act(assignment=place, action=action_to_proto(action)))
        except CommandError as error:
            why = str(error)
        await self.role.handle(pb.Release(assignment=place))
        return why


def hosted(work: Callable[[Host], Awaitable[None]], slots: int = 4, **changes: object) -> pb.Ready:
    """What the worker said when it was ready."""

    async def play() -> pb.Ready:
        host = Host(slots, **changes)
        ready = await host.role.prepare(host.config)
        running = asyncio.create_task(host.role.run(host.said.append))
        await asyncio.sleep(1)
        await work(host)
        running.cancel()
        await host.role.close()
        return ready

    return virtual_time.run(play())


async def nothing(host: Host) -> None:
    """Only the worker's start is of interest."""


# ---- quarantine ----


def test_an_environment_that_fails_alone_is_quarantined_and_replaced() -> None:
    Machines.broken.add(1)

    async def work(host: Host) -> None:
        for _ in range(STRIKES + 1):
            await asyncio.gather(*(host.episode() for _ in range(4)))
        quarantined = [slots for slots in host.said if slots.quarantined]
        assert {(slots.count, slots.quarantined) for slots in quarantined} == {(3, 1)}
        reason = quarantined[-1].reason
        assert "environment 1 is quarantined for 10 s, because its episodes fail and others do not" in reason
        assert "OSError: machine 1 is broken" in reason
        assert Machines.made[1].closed and len(Machines.made) == 5, "it was replaced once its rest was over"
        assert (host.said[-1].count, host.said[-1].quarantined) == (4, 0)

    hosted(work)


def test_where_all_fail_none_is_quarantined() -> None:
    Machines.broken.update(range(100))

    async def work(host: Host) -> None:
        for _ in range(3 * STRIKES):
            assert all(await asyncio.gather(*(host.episode() for _ in range(4))))
        assert not any(slots.quarantined for slots in host.said)

    hosted(work)


def test_how_long_a_quarantine_lasts() -> None:
    record, seconds = Record(), []
    for now in range(STRIKES + 8):
        if rest := record.failed(float(now), now - 0.5):
            seconds.append(rest)
    assert seconds[:3] == [FIRST_QUARANTINE_SECONDS, 2 * FIRST_QUARANTINE_SECONDS, 4 * FIRST_QUARANTINE_SECONDS]
    assert seconds[-1] == MOST_QUARANTINE_SECONDS
    record.ended_well()
    assert [record.failed(100.0 + now, 100.5) for now in range(STRIKES)] == [0.0] * (STRIKES - 1) + [
        FIRST_QUARANTINE_SECONDS
    ]


def test_an_episode_of_another_that_goes_on_shows_that_others_work() -> None:
    record = Record()
    assert [record.failed(now, -1.0, 9.5) for now in (10.0, 11.0, 12.0)] == [0.0, 0.0, FIRST_QUARANTINE_SECONDS]
    record = Record()
    assert not any(record.failed(now, -1.0, now - 0.5) for now in (10.0, 11.0, 12.0)), "it began after the failures"


def test_one_whose_zero_was_not_believed_is_not_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `renew` says that it is ready; its probe says that it is dead."""

    async def work(host: Host) -> None:
        monkeypatch.setattr(Machines, "alive", False)
        assert "its verdict of 0 is discarded" in await host.episode()
        await asyncio.sleep(5)
        assert [machine.closed for machine in Machines.made] == [True, False]
        assert host.said[-1].count == 1

    hosted(work, slots=1)


# ---- time limits ----


def test_an_evaluator_may_take_its_time_and_one_that_hangs_costs_its_attempt_alone() -> None:
    ends: Counter[str] = Counter()

    async def work(host: Host) -> None:
        async def one() -> None:
            ends[await host.episode()] += 1

        first = asyncio.create_task(one())
        await asyncio.sleep(100)
        HANGS.add("act")
        second = asyncio.create_task(one())
        await asyncio.gather(first, second)

    hosted(work)
    assert ends == {"": 1, "EnvironmentFailure: act took longer than 10 s": 1}


def test_the_config_overrides_what_the_world_declares_and_the_coordinator_is_told() -> None:
    HANGS.add("act")

    async def work(host: Host) -> None:
        assert await host.episode() == "EnvironmentFailure: act took longer than 3 s"

    told = hosted(work, timeouts={"act": 3.0, "judge": 1200.0}).longest_seconds
    assert dict(told) == {"reset": 40.0, "act": 1208.0, "suggest": 3.0, "boot": 35.0, "renew": 20.0}
    told = hosted(nothing, timeouts={"act": 3.0, "judge": 1e7}).longest_seconds
    assert told["act"] == 86_400.0, "the coordinator takes no more than a day"


def test_a_world_that_declares_nothing_leaves_the_run_its_own_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machines, "timeouts", Timeouts())
    assert not hosted(nothing).longest_seconds


def test_a_world_that_never_starts_ends_the_worker_with_a_remedy() -> None:
    HANGS.add("start")
    with pytest.raises(UserError, match=r"did not start within 7 s: .*set environment\.timeouts\.start to more"):
        hosted(nothing, timeouts={"start": 7.0})


def test_a_world_that_never_closes_does_not_keep_the_worker() -> None:
    HANGS.add("close")
    hosted(nothing)  # a deadlock of the virtual clock otherwise


@pytest.mark.parametrize(
    ("wrong", "name"), [({"act": 0}, "act"), ({"jugde": 5}, "jugde"), ({"renew": "long"}, "renew")]
)
def test_a_wrong_time_limit_is_refused_by_its_name(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"timeouts\.{name}"):
        Environment.model_validate({"tasks": {"names": ["a"]}, "timeouts": wrong})
