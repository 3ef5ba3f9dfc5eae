"""The pool of environments, and workers whose environments come and go."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from fleet_samples import fleet, screen
from run_processes.told import events

from dart.coordinator.fleet.environments import EnvPool, EnvSession
from dart.coordinator.fleet.roster import Roster
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.coordinator.service.journal import Journal
from dart.core.action import Click, Several, Wait
from dart.core.curation.orders import Order
from dart.core.types import Observation, Task
from dart.core.usage import EnvState
from dart.v1 import session_pb2 as pb
from dart.wire.convert import observation_to_proto

TASK = Task("s", "a", 1)


class Rig:
    """A pool and one worker, whose words are `say`'s arguments."""

    def __init__(self, *capabilities: str, slots: int = 4) -> None:
        self.fleet = Fleet(60.0)
        self.pool = EnvPool(self.fleet)
        self.worker = self.join("env-0", *capabilities, slots=slots)

    def join(self, name: str, *capabilities: str, slots: int = 4) -> Worker:
        hello = pb.Hello(worker_id=name, instance_id=f"{name}-{id(self)}", role=pb.ROLE_ENV, capabilities=capabilities)
        worker, _ = self.fleet.admit(hello)
        self.fleet.receive(worker, pb.SessionRequest(ready=pb.Ready(slots=slots)))
        return worker

    def say(self, count: int, granted: int, booting: int = 0, reason: str = "", quarantined: int = 0) -> None:
        slots = pb.Slots(count=count, granted=granted, booting=booting, reason=reason, quarantined=quarantined)
        self.fleet.receive(self.worker, pb.SessionRequest(slots=slots))

    async def begin(self, number: int = 1) -> EnvSession:
        """An episode whose Reset has been sent, and has no answer."""
        session = EnvSession(self.pool, await self.pool.acquire(), Order(f"t{number}", "g", TASK, 3))
        resetting = asyncio.ensure_future(session.reset(TASK))
        await asyncio.sleep(0)
        resetting.cancel()
        return session

    @property
    def counts(self) -> dict[str, int]:
        return {str(state): number for state, number in self.pool.usage.counts().items()}


async def acquired(pool: EnvPool) -> Worker | None:
    """None where one has to wait for it."""
    taking = asyncio.ensure_future(pool.acquire())
    await asyncio.sleep(0)
    if taking.done():
        return taking.result()
    taking.cancel()
    await asyncio.wait({taking})
    return None


async def test_nothing_is_free_before_the_worker_says_so() -> None:
    rig = Rig("slots")
    assert rig.pool.slots == 0
    assert await acquired(rig.pool) is None
    waiting = asyncio.ensure_future(rig.pool.acquire())
    rig.say(count=1, granted=1, booting=3)
    assert await waiting is rig.worker
    assert (rig.pool.slots, rig.counts) == (1, {"idle": 1, "booting": 3})
    assert await acquired(rig.pool) is None
    rig.say(count=4, granted=4)
    assert (rig.pool.slots, rig.counts) == (4, {"idle": 4})


async def test_an_episode_withdraws_the_credit_until_the_environment_is_renewed() -> None:
    rig = Rig("slots", slots=1)
    rig.say(count=1, granted=1)
    session = await rig.begin()
    assert rig.counts == {"resetting": 1}
    session.close()
    assert rig.counts == {"renewing": 1}
    assert await acquired(rig.pool) is None
    rig.say(count=1, granted=1)  # said before the Release arrived
    assert (rig.counts, await acquired(rig.pool)) == ({"renewing": 1}, None)
    rig.say(count=1, granted=2)
    assert rig.counts == {"idle": 1}
    assert await acquired(rig.pool) is rig.worker


async def test_one_that_cannot_be_renewed_is_gone() -> None:
    rig = Rig("slots", slots=2)
    rig.say(count=2, granted=2)
    (await rig.begin()).close()
    rig.say(count=1, granted=2, booting=1, reason="the snapshot is gone")
    assert (rig.pool.slots, rig.counts) == (1, {"idle": 1, "booting": 1})
    rig.say(count=2, granted=3)
    assert (rig.pool.slots, rig.counts) == (2, {"idle": 2})


async def test_what_is_missing_or_quarantined_is_in_the_ledger_and_counts_as_no_failure() -> None:
    """A quota of two machines for four environments, and one of the two quarantined."""
    now = time.monotonic()
    rig = Rig("slots")
    rig.say(count=2, granted=2, reason="429: 2 of 2 in use")
    assert (rig.pool.slots, rig.counts, rig.pool.failures("env-0")) == (2, {"idle": 2, "missing": 2}, 0)
    (await rig.begin()).close()
    rig.say(count=1, granted=2, quarantined=1, reason="environment 0 is quarantined for 10 s")
    assert rig.counts == {"idle": 1, "missing": 2, "quarantined": 1}
    offered = {state: seconds for state, seconds in rig.pool.usage.seconds(now + 1000).items() if state != "missing"}
    busy = sum(offered.get(state, 0.0) for state in (EnvState.RESETTING, EnvState.ACTING))
    assert rig.pool.usage.utilisation(now + 1000) == pytest.approx(busy / sum(offered.values()))
    rig.say(count=1, granted=2, booting=2, quarantined=2)
    assert rig.worker.state == "lost", "five of four"


async def test_what_is_taken_back_is_not_given_out() -> None:
    rig = Rig("slots")
    rig.say(count=2, granted=2)
    rig.say(count=1, granted=1)
    assert await acquired(rig.pool) is rig.worker
    assert await acquired(rig.pool) is None
    rig.say(count=2, granted=2)
    assert await acquired(rig.pool) is rig.worker
    assert await acquired(rig.pool) is None


async def test_saying_it_twice_changes_nothing() -> None:
    rig = Rig("slots", slots=2)
    for _ in range(3):
        rig.say(count=2, granted=2)
    assert rig.counts == {"idle": 2}
    assert [await acquired(rig.pool) for _ in range(3)] == [rig.worker, rig.worker, None]


async def test_a_worker_that_grants_more_than_it_has_is_lost_alone() -> None:
    rig = Rig("slots")
    other = rig.join("env-1")
    rig.say(count=1, granted=1)
    rig.say(count=1, granted=2)
    assert rig.worker.state == "lost"
    assert "broke a rule once, the last: Slots is count" in rig.fleet.boundary.told((pb.ROLE_ENV, "env-0"))
    assert rig.pool.slots == 4
    assert [await acquired(rig.pool) for _ in range(5)] == [*[other] * 4, None]


async def test_one_that_says_nothing_has_what_its_ready_said() -> None:
    rig = Rig(slots=2)
    rig.say(count=1, granted=1)
    assert (rig.pool.slots, rig.counts) == (2, {"idle": 2})
    session = await rig.begin()
    assert rig.counts == {"idle": 1, "resetting": 1}
    session.close()
    session.close()
    assert rig.counts == {"idle": 2}
    assert [await acquired(rig.pool) for _ in range(3)] == [rig.worker, rig.worker, None]


@pytest.mark.parametrize("capabilities", [(), ("slots",)])
async def test_an_episode_that_never_began_gives_it_back(capabilities: tuple[str, ...]) -> None:
    rig = Rig(*capabilities, slots=1)
    rig.say(count=1, granted=1)
    session = EnvSession(rig.pool, await rig.pool.acquire(), Order("t", "g", TASK, 3))
    assert await acquired(rig.pool) is None
    session.close()
    assert await acquired(rig.pool) is rig.worker
    assert not rig.worker.outbox, "nothing was begun, so nothing is released"


async def test_a_worker_that_comes_back_has_none_until_it_says_so() -> None:
    rig = Rig("slots")
    rig.say(count=3, granted=3, booting=1)
    rig.fleet.lose(rig.worker, "silent")
    assert (rig.pool.slots, rig.counts) == (0, {"lost": 4})
    rig.worker = rig.join("env-0", "slots", slots=2)
    assert (rig.pool.slots, rig.counts) == (0, {})
    rig.say(count=2, granted=2)
    assert (rig.pool.slots, rig.counts) == (2, {"idle": 2})


async def test_environments_of_a_worker_whose_attempts_fail_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dart.coordinator.fleet.environments.rest_seconds", lambda failures, _: 0.01 * failures)
    rig = Rig("slots", slots=1)
    rig.say(count=1, granted=1)
    (await rig.begin()).close(failed=True)
    rig.say(count=1, granted=2)
    assert rig.counts == {"resting": 1}
    rig.say(count=1, granted=2)
    assert rig.counts == {"resting": 1}
    assert await rig.pool.acquire() is rig.worker
    rig.say(count=1, granted=2)
    assert rig.counts == {"idle": 1}


async def test_a_worker_cannot_fill_the_journal_with_reasons(tmp_path: Path) -> None:
    rig, journal = Rig("slots"), Journal(tmp_path / "metrics.jsonl")
    Roster(rig.fleet, journal)
    for number in range(100):
        rig.say(count=1, granted=1, reason=f"image {number} is missing")
    journal.close()
    (event,) = events(tmp_path / "metrics.jsonl", "environments")
    assert "image 0 is missing" in event["reason"]


# ---- several actions in one step ----


@pytest.mark.parametrize(
    ("last", "answers", "sent"),
    [
        (False, ["", ""], [("wait", False), ("click", False)]),
        (True, ["", "done"], [("wait", False), ("click", True)]),
        (False, ["done"], [("wait", False)]),
        (False, ["no such element"], [("wait", False)]),
        (True, ["no such element", "done"], [("wait", False), ("observe", True)]),
    ],
)
async def test_several_actions_are_sent_one_by_one_until_one_fails_or_the_episode_is_over(
    last: bool, answers: list[str], sent: list[tuple[str, bool]]
) -> None:
    seen: list[tuple[str, bool]] = []

    def env(command: object) -> pb.Observed | pb.Released:
        if isinstance(command, pb.Release):
            return pb.Released()
        if isinstance(command, pb.Reset):
            return observation_to_proto(Observation(screen("first"), "do it"), 0.0)
        assert isinstance(command, pb.Act)
        seen.append((command.action.WhichOneof("kind") or "", command.last))
        answer = answers[len(seen) - 1]
        done = answer == "done"
        error = "" if done else answer
        return observation_to_proto(Observation(screen(str(len(seen))), "", done, last_action_error=error), 0.0)

    async with fleet(env=env) as (envs, _):
        session = EnvSession(envs, await envs.acquire(), Order("t1", "g", TASK, 3))
        await session.reset(TASK)
        observation = await session.act(Several((Wait(0.1), Click(None))), last)
        session.close(False)
    assert seen == sent
    assert (observation.done, observation.last_action_error) == (answers[-1] == "done", answers[-1].replace("done", ""))


@pytest.mark.parametrize("works", [True, False])
async def test_the_state_is_judged_without_an_action_and_a_failure_decides_nothing(works: bool) -> None:
    def env(command: object) -> pb.Observed | pb.Released | pb.Failure:
        if isinstance(command, pb.Release):
            return pb.Released()
        if isinstance(command, pb.Reset):
            return observation_to_proto(Observation(screen("first"), "do it"), 0.0)
        assert isinstance(command, pb.Act) and command.last and command.action.HasField("observe")
        if not works:
            return pb.Failure(code=pb.FAILURE_CODE_ENVIRONMENT, message="the machine is gone")
        return observation_to_proto(Observation(screen("last"), "", True, 0.75), 0.0)

    async with fleet(env=env) as (envs, _):
        session = EnvSession(envs, await envs.acquire(), Order("t1", "g", TASK, 3))
        await session.reset(TASK)
        verdict = await session.judge()
        session.close(False)
    assert (verdict.reward if verdict else None) == (0.75 if works else None)
