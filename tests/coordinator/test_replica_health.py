"""Replicas that fail: requests go elsewhere, roll-outs go on, environments are not blamed, and a repair is noticed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import failing_replicas
import pytest
from fleet_samples import World, fleet, replica, screen
from run_processes.told import events

from benchmarks.instant import settings
from benchmarks.simulation.cluster import SetUp
from benchmarks.simulation.store import NoDatabase
from benchmarks.simulation.timings import SyncTimes, Timings
from benchmarks.simulation.workers import SimulatedReplica
from dart.agent.episode import ContextFull
from dart.agent.prompt import build_prompt
from dart.config import Agent, Sync
from dart.coordinator.fleet.replicas import GENERATE_ATTEMPTS
from dart.coordinator.fleet.sessions import InfrastructureError, Worker
from dart.coordinator.run import Run
from dart.coordinator.sampling.episodes import sample
from dart.coordinator.start import Start
from dart.core.curation.orders import Order
from dart.core.fleet.invariants import validate
from dart.core.fleet.replica import Request
from dart.core.fleet.replicas import Replicas
from dart.core.types import Task, Trajectory
from dart.job import Train
from dart.rundir import RunDirectory
from dart.v1 import session_pb2 as pb

PROMPT = build_prompt(Agent(), "do it", [], screen())


class Replica:
    """Answers with these failures, one after the other, then as it should. `asked`: how often it was."""

    def __init__(self, *failures: int, always: int | None = None) -> None:
        self._failures, self._always = list(failures), always
        self.asked = 0

    def __call__(self, command: Any) -> Any:
        if not isinstance(command, pb.Generate):
            return None
        self.asked += 1
        if self._failures or self._always is not None:
            code = self._failures.pop(0) if self._failures else self._always
            return pb.Failure(code=code, message=f"failure {code}")
        return replica(command)


async def asked(pool: Any, times: int, at_once: int = 4) -> Counter[str]:
    """By whom so many requests were served."""
    served: Counter[str] = Counter()

    async def client() -> None:
        for _ in range(times // at_once):
            _, name = await pool.generate(PROMPT, 1.0, 40, None)
            served[name] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    validate(pool.replicas)
    return served


# ---- requests ----


async def test_a_replica_gets_no_more_requests_at_once_than_it_has_room_for() -> None:
    async with fleet(rollout_a=replica, rollout_b=replica) as (_, pool):
        one, other = (pool.replicas.get(name) for name in ("rollout_a", "rollout_b"))
        small = pb.SessionRequest(slots=pb.Slots(count=1, reason="its KV cache is small"))
        pool._fleet.receive(one.session, small)
        assert (one.slots, one.session.slots, other.slots) == (1, 1, 4)
        served = await asked(pool, 40, at_once=5)
        assert served["rollout_a"] < served["rollout_b"]
        # Nonsense ends its session, and the other one serves.
        pool._fleet.receive(one.session, pb.SessionRequest(slots=pb.Slots(count=5)))
        assert one.gone and await asked(pool, 8) == {"rollout_b": 8}


async def test_one_failing_replica_of_two_gets_hardly_a_request() -> None:
    bad, good = Replica(always=pb.FAILURE_CODE_ENGINE), Replica()
    async with fleet(rollout_bad=bad, rollout_good=good) as (_, pool):
        assert await asked(pool, 400, at_once=8) == {"rollout_good": 400}
        assert bad.asked < 0.05 * (bad.asked + good.asked)
        told = pool.replicas.get("rollout_bad")
        assert told.condition in ("quarantined", "probing") and "failure 2" in told.health.last_failure


async def test_a_replica_whose_answers_make_no_sense_fails() -> None:
    def senseless(command: Any) -> Any:
        reply = replica(command)
        del reply.logprobs[:1]
        return reply

    async with fleet(rollout_bad=senseless, rollout_good=replica) as (_, pool):
        assert await asked(pool, 80, at_once=8) == {"rollout_good": 80}
        assert "Generated.logprobs is" in pool.replicas.get("rollout_bad").health.last_failure


async def test_a_repaired_replica_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dart.core.fleet.health.FIRST_REST_SECONDS", 0.01)
    bad = Replica(*[pb.FAILURE_CODE_ENGINE] * 5)
    async with fleet(rollout_bad=bad, rollout_good=replica) as (_, pool):
        while bad.asked < 6:
            await asked(pool, 8, at_once=8)
            await asyncio.sleep(0.01)
        assert pool.replicas.get("rollout_bad").condition == "ready"
        assert (await asked(pool, 160, at_once=8))["rollout_bad"] > 60


async def test_where_every_replica_fails_a_request_ends_and_says_who_failed_it() -> None:
    one, other = (Replica(always=pb.FAILURE_CODE_ENGINE) for _ in range(2))
    async with fleet(rollout_a=one, rollout_b=other) as (_, pool):
        with pytest.raises(InfrastructureError, match="failure 2") as failed:
            await pool.generate(PROMPT, 1.0, 40, None)
        assert failed.value.worker in ("rollout_a", "rollout_b")
        assert one.asked + other.asked == GENERATE_ATTEMPTS


@pytest.mark.parametrize(
    ("code", "error"), [(pb.FAILURE_CODE_INVALID, InfrastructureError), (pb.FAILURE_CODE_CONTEXT_FULL, ContextFull)]
)
async def test_what_is_the_requests_fault_is_held_against_nobody(code: int, error: type[Exception]) -> None:
    bad = Replica(always=code)
    async with fleet(rollout=bad) as (_, pool):
        for _ in range(5):
            with pytest.raises(error) as raised:
                await pool.generate(PROMPT, 1.0, 40, None)
            assert not getattr(raised.value, "worker", "")
        assert bad.asked == 5 and not pool.replicas.get("rollout").health.failures


async def test_a_screenshot_that_is_not_held_and_a_weight_update_are_no_failures() -> None:
    forgetful = Replica(pb.FAILURE_CODE_UNKNOWN_IMAGE)
    updated = Replica(pb.FAILURE_CODE_ABORTED, pb.FAILURE_CODE_ABORTED)
    async with fleet(rollout=forgetful) as (_, pool):
        assert await asked(pool, 1, 1) == {"rollout": 1}
        assert not pool.replicas.get("rollout").health.failures
    async with fleet(rollout=updated) as (_, pool):
        pool.replicas.staged(1, 0.0)
        assert pool.replicas.next_update()
        assert await asked(pool, 1, 1) == {"rollout": 1}
        assert not pool.replicas.get("rollout").health.failures


@pytest.mark.parametrize("code", [pb.FAILURE_CODE_UNKNOWN_IMAGE, pb.FAILURE_CODE_ABORTED])
async def test_but_a_replica_that_says_so_without_reason_fails(code: int) -> None:
    async with fleet(rollout_bad=Replica(always=code), rollout_good=replica) as (_, pool):
        assert await asked(pool, 80, at_once=8) == {"rollout_good": 80}
        assert pool.replicas.get("rollout_bad").condition != "ready"


async def test_a_request_that_is_cancelled_in_line_leaves_nothing_behind() -> None:
    async with fleet(rollout=lambda command: None) as (_, pool):
        waiting = [asyncio.create_task(pool.generate(PROMPT, 1.0, 40, None)) for _ in range(7)]
        await asyncio.sleep(0.01)
        assert (pool.replicas.waiting, pool.replicas.free) == (3, 0)
        for task in (waiting[0], waiting[4], waiting[5]):  # the place of the first goes to one that goes, too
            task.cancel()
        await asyncio.sleep(0.01)
        assert (pool.replicas.waiting, pool.replicas.free) == (0, 0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert pool.replicas.free == 4
        validate(pool.replicas)


# ---- roll-outs ----


class Orders:
    """Three roll-outs, each given out again until it is finished or hopeless."""

    temperature = 1.0

    def __init__(self) -> None:
        self.left = [Order(f"t{number}", "g", Task("s", "a", number), 3) for number in range(3)]
        self.finished_orders: list[Order] = []
        self.failures: list[tuple[Order, InfrastructureError]] = []

    async def next(self) -> Order | None:
        return self.left.pop() if self.left else None

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        self.finished_orders.append(order)

    def failed(self, order: Order, error: InfrastructureError) -> None:
        self.failures.append((order, error))


async def test_environments_do_not_rest_for_what_a_replica_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dart.core.fleet.replicas.FIRST_RETRY_SECONDS", 0.01)
    orders = Orders()
    async with fleet(env=World(), rollout=Replica(always=pb.FAILURE_CODE_ENGINE)) as (envs, pool):
        await sample(orders, envs, pool, settings())
        assert len(orders.failures) == 3
        for order, error in orders.failures:
            assert order.failed_on == {"rollout"} and error.worker == "rollout"
        assert not envs.failures("env")


async def test_an_environment_that_fails_is_to_blame() -> None:
    def broken(command: Any) -> Any:
        if isinstance(command, pb.Reset):
            return pb.Failure(code=pb.FAILURE_CODE_ENVIRONMENT, message="the page died")
        return World()(command)

    orders = Orders()
    async with fleet(env=broken, rollout=replica) as (envs, pool):
        await sample(orders, envs, pool, settings())
        assert {error.worker for _, error in orders.failures} == {"env"} and envs.failures("env") == 3
        assert not pool.replicas.get("rollout").health.failures


# ---- what people are told ----


async def test_the_status_and_the_journal_tell_of_a_quarantine(tmp_path: Path) -> None:
    database: Any = NoDatabase()
    run = Run(settings(), RunDirectory(tmp_path), database, Train(), Start())
    SimulatedReplica(run.fleet, "gpu-1", Timings(), 0)
    now = time.monotonic()

    def told() -> tuple[str, str]:
        (worker,) = run.status().workers
        return worker.state, worker.doing

    assert told() == ("ready", "idle")
    for _ in range(3):
        request: Request[Worker] = Request()
        assert run.replicas.take(request, now)
        run.replicas.failed(request, "gpu-1: CUDA error: out of memory", now)
    assert told() == ("quarantined", "quarantined; the last request failed with: gpu-1: CUDA error: out of memory")
    run.replicas.time_passed(now + 1.0)
    assert told()[0] == "probing"
    request = Request()
    assert run.replicas.take(request, now + 1.0)
    run.replicas.served(request, now + 2.0)
    assert told() == ("ready", "idle")
    run.journal.close()
    health = events(run.directory.metrics, "replica_health")
    assert [event["state"] for event in health] == ["quarantined", "probing", "healthy"]
    assert health[0]["why"] == "gpu-1: CUDA error: out of memory" and health[0]["failures"] == 3


# ---- a whole run, in virtual time ----

SET_UP = SetUp("80 environments, 2 replicas", 80, 2, trajectories_per_update=32, tasks=12)
HOURS = 0.2


def test_a_run_with_one_failing_replica_of_two() -> None:
    good, _ = failing_replicas.measure(failing_replicas.never, HOURS, SET_UP)
    failing, requests = failing_replicas.measure(failing_replicas.always, HOURS, SET_UP)
    assert failing["trajectories_per_hour"] >= 0.45 * good["trajectories_per_hour"] > 0
    assert requests.share < 0.05
    assert failing["given_up"] == failing["attempts_lost"] == failing["environment_seconds_at_rest"] == 0


def test_a_replica_that_fails_for_a_while() -> None:
    third = HOURS * 1200
    figures, requests = failing_replicas.measure(failing_replicas.between(third, 2 * third), HOURS, SET_UP)
    assert figures["given_up"] == figures["attempts_lost"] == 0
    recovery = failing_replicas.recovery(requests, 2 * third)
    assert recovery["seconds_until_it_serves"] is not None and recovery["seconds_until_it_serves"] <= 65
    assert recovery["seconds_until_an_equal_share"] is not None


def test_a_transfer_that_hangs_takes_nothing_from_the_other_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses for weights are short here, so that it does not matter how many of them come just then."""
    quick = SyncTimes(gigabytes_per_second=100.0, restart=0.1)
    monkeypatch.setattr(failing_replicas, "Timings", partial(Timings, sync=quick))
    monkeypatch.setattr(failing_replicas, "HUNG_SET_UP", SetUp("", 20, 4, trajectories_per_update=16))
    monkeypatch.setattr(failing_replicas, "HANGS_AFTER_SECONDS", 900.0)
    row = failing_replicas.hung_transfer(hours=0.5)
    replaced = Sync().timeout_seconds + failing_replicas.GRACE_SECONDS + failing_replicas.STARTING_SECONDS
    assert replaced <= row["seconds_until_it_serves"] <= replaced + 30
    assert row["share_against_before"] >= 0.98
    assert row["requests_of_others_against_before"] >= 0.98
    assert row["fewest_updates_of_another"] >= 1, "nobody waited for the one that hangs"
    assert row["given_up"] == row["attempts_lost"] == 0


def test_where_all_serve_together_nobody_waits_for_one_that_is_excluded() -> None:
    def taken(replicas: Replicas[None]) -> str | None:
        replica = replicas.take(Request(), 0.0)
        return replica.name if replica else None

    replicas: Replicas[None] = Replicas(0.0, 0, 2, together=True)
    for name in "ab":
        replicas.join(name, 4, 0, None, 0.0)
    replicas.staged(1, 0.0)
    for _ in range(2):
        replica, version = replicas.next_update() or (None, 0)
        assert replica is not None
        replicas.pause(replica, 0.0)
        if replica.name == "a":
            replicas.updated(replica, version, 0.0)
        else:
            replicas.update_failed(replica, 0.0)
    assert taken(replicas) is None
    b = replicas.get("b")
    assert b is not None
    replicas.exclude(b, 0.0)
    assert [taken(replicas), taken(replicas)] == ["a", "a"]
    replicas.updated(b, 1, 0.0)
    assert taken(replicas) == "b", "it comes back after all"
