"""Which replica takes a request, and which is updated next."""

from __future__ import annotations

import random

import pytest
from fleet_samples import transfer_broke

from dart.core.fleet.health import MOST_REST_SECONDS, QUARANTINE_PRICE, Condition, Health
from dart.core.fleet.invariants import validate
from dart.core.fleet.replica import LOOK_AHEAD, Replica, Request
from dart.core.fleet.replicas import AFFINITY_SLACK, Replicas
from dart.core.usage import ReplicaState


def made(*names: str, slots: int = 4, **options: int) -> Replicas[None]:
    replicas: Replicas[None] = Replicas(0.0, **options)
    for name in names:
        replicas.join(name, slots, replicas.version, None, 0.0)
    return replicas


def the(replicas: Replicas[None], name: str) -> Replica[None]:
    replica = replicas.get(name)
    assert replica is not None
    return replica


def take(replicas: Replicas[None], affinity: str | None = None, now: float = 0.0) -> str | None:
    taken = replicas.take(Request(affinity), now)
    return taken.name if taken else None


def fail(replicas: Replicas[None], name: str, now: float = 0.0, times: int = 3) -> None:
    for _ in range(times):
        replica = the(replicas, name)
        request: Request[None] = Request()
        request.replica = replica
        replica.busy += 1
        replicas.failed(request, f"{name}: no memory", now)


# ---- who takes this request ----


def test_capacity_then_affinity_then_version() -> None:
    def ready(busy: int = 0) -> Replicas[None]:
        replicas: Replicas[None] = Replicas(0.0)
        replicas.join("b", 4, 1, None, 0.0)
        replicas.join("a", 4, 0, None, 0.0)
        for _ in range(busy):
            assert replicas.take(Request("a"), 0.0)
        assert not the(replicas, "b").busy
        return replicas

    assert take(ready()) == "b"
    assert take(ready(busy=AFFINITY_SLACK), "a") == "a"
    assert take(ready(busy=AFFINITY_SLACK + 1), "a") == "b"
    replicas = made("a", slots=1)
    assert [take(replicas), take(replicas)] == ["a", None]
    replicas.pause(the(replicas, "a"), 0.0)
    assert take(replicas, "a") is None


def test_a_queued_request_is_preferred_where_its_prefix_is_but_not_for_ever() -> None:
    replicas = made("a", "b", slots=1)
    busy = {name: Request[None](name) for name in "ab"}
    for request in busy.values():
        assert replicas.take(request, 0.0)
    first = Request[None]("a")
    replicas.wait(first)
    for turn in range(LOOK_AHEAD):
        behind = Request[None]("b")
        replicas.wait(behind)
        replicas.served(busy["b"], 0.0)
        assert replicas.grants(0.0) == [behind] and behind.replica is the(replicas, "b"), turn
        busy["b"] = behind
    replicas.wait(Request("b"))
    replicas.served(busy["b"], 0.0)
    assert replicas.grants(0.0) == [first], "it has waited for long enough"
    replicas.served(busy["a"], 0.0)
    (last,) = replicas.grants(0.0)
    assert last.replica is the(replicas, "a"), "room is not left empty for want of a prefix"


def test_a_retry_goes_to_another_replica_even_if_it_has_to_wait() -> None:
    replicas = made("a", "b", slots=1)
    request: Request[None] = Request("a")
    assert replicas.take(request, 0.0) is the(replicas, "a")
    replicas.failed(request, "no memory", 0.0)
    other: Request[None] = Request("b")
    replicas.take(other, 0.0)
    assert replicas.take(request, 0.0) is None, "a is free, but b will be"
    replicas.wait(request)
    later: Request[None] = Request()
    replicas.wait(later)
    replicas.served(other, 1.0)
    assert replicas.grants(1.0) == [request, later], "each the one that it can have"
    assert request.replica is the(replicas, "b") and later.replica is the(replicas, "a")


def test_a_single_replica_is_asked_again_at_once() -> None:
    replicas = made("a")
    request: Request[None] = Request()
    replicas.take(request, 0.0)
    replicas.failed(request, "no memory", 0.0)
    assert replicas.take(request, 0.0) is the(replicas, "a")


def test_failures_make_a_replica_the_dearer_one() -> None:
    replicas = made("a", "b", slots=64)
    fail(replicas, "a", times=1)
    assert [take(replicas) for _ in range(5)] == ["b"] * 4 + ["a"]


def test_in_quarantine_it_gets_nothing_then_one_probe_at_a_time() -> None:
    replicas = made("a", "b")
    a = the(replicas, "a")
    fail(replicas, "a")
    assert a.condition == "quarantined" and a.health.last_failure == "a: no memory"
    assert [take(replicas, "a") for _ in range(5)] == ["b"] * 4 + [None]
    assert replicas.next_alarm(0.0) == 1.0
    replicas.time_passed(1.0)
    assert a.condition == "probing"
    probe: Request[None] = Request()
    assert replicas.take(probe, 1.0) is a
    assert take(replicas, now=1.0) is None, "b is full, and a is being probed"
    replicas.failed(probe, "a: no memory", 1.5)
    assert a.condition == "quarantined" and a.health.until == 1.5 + 2.0, "twice as long"
    replicas.time_passed(3.5)
    again: Request[None] = Request()
    assert replicas.take(again, 4.0) is a
    replicas.served(again, 5.0)
    assert a.condition == "ready" and replicas.take(Request("a"), 5.0) is a


def test_requests_that_are_nobodys_fault_change_nothing() -> None:
    replicas = made("a")
    for _ in range(100):
        request: Request[None] = Request()
        replicas.take(request, 0.0)
        replicas.ended(request, 0.0)
    assert the(replicas, "a").health == Health()


def test_without_a_healthy_replica_the_least_bad_one_is_asked() -> None:
    replicas = made("a", "b")
    fail(replicas, "a")
    fail(replicas, "b")
    replicas.time_passed(1.0)
    fail(replicas, "a", now=1.0, times=1)
    fail(replicas, "b", now=1.0, times=0)
    assert the(replicas, "a").health.quarantines == 2
    request: Request[None] = Request()
    assert replicas.take(request, 1.0) is the(replicas, "b"), "its probe"
    assert take(replicas, now=1.0) == "b", "rather than to wait"
    replicas.failed(request, "b: no memory", 1.0)
    assert replicas.take(request, 1.0) is None
    replicas.wait(request)
    assert replicas.next_alarm(1.0) == 1.25
    replicas.withdraw(request)
    assert replicas.take(request, 1.25) is the(replicas, "a"), "a request that has failed gives them time"
    replicas.served(request, 1.3)
    assert the(replicas, "a").condition == "ready"


def test_a_good_replica_that_is_being_updated_is_waited_for() -> None:
    replicas = made("bad", "good")
    fail(replicas, "bad")
    replicas.staged(1, 0.0)
    assert replicas.next_update() == (the(replicas, "bad"), 1)
    replicas.updated(the(replicas, "bad"), 1, 0.0)
    good, _ = replicas.next_update() or pytest.fail("both are updated")
    replicas.pause(good, 0.0)
    assert take(replicas) is None
    transfer_broke(replicas, good)
    assert take(replicas) == "bad", "its transfer broke: who knows for how long"


def test_what_a_replica_did_is_remembered_while_it_is_gone() -> None:
    replicas = made("a", "b")
    fail(replicas, "a", times=2)
    replicas.leave(the(replicas, "a"), 0.0, for_good=False)
    assert replicas.usage.counts() == {ReplicaState.IDLE: 1, ReplicaState.LOST: 1}
    assert replicas.join("a", 4, 0, None, 0.5).condition == "quarantined", "its third failure was to die"
    assert replicas.usage.counts() == {ReplicaState.IDLE: 1, ReplicaState.QUARANTINED: 1}
    replicas.leave(the(replicas, "a"), 0.6, for_good=True)
    assert replicas.join("a", 4, 0, None, 0.7).condition == "ready"


# ---- health ----


def history(failing: float, seconds: float, rate: float = 10.0) -> tuple[Health, int, int]:
    """A replica at `rate` requests per second, of which that share fails; and how many it got, and how many failed."""
    health, chance, now, asked, failed = Health(), random.Random(0), 0.0, 0, 0
    while now < seconds:
        now += 1 / rate
        health.time_passed(now)
        if health.condition is Condition.QUARANTINED:
            continue
        asked += 1
        if chance.random() < failing:
            failed += 1
            health.failed("", now)
            assert health.until <= now + MOST_REST_SECONDS
        else:
            health.served(health.condition is Condition.PROBING, now)
    return health, asked, failed


def test_one_that_always_fails_is_asked_once_a_minute_in_the_end() -> None:
    _, asked, _ = history(1.0, 3600)
    assert asked < 3 + 6 + 60


def test_a_replica_that_fails_now_and_then_stays() -> None:
    _, asked, failed = history(0.05, 3600)
    assert asked > 0.97 * 36_000 and failed > 1500


def test_one_that_fails_half_the_time_is_hardly_asked() -> None:
    _, asked, _ = history(0.5, 3600)
    assert asked < 0.05 * 36_000


def test_time_forgives() -> None:
    health = Health()
    health.failed("", 0.0)
    health.failed("", 5.0)
    assert 0 < health.price < QUARANTINE_PRICE
    for now in (15.0, 25.0):
        health.time_passed(now)
    assert health.price == 0 and health.condition is Condition.HEALTHY


# ---- who is updated next ----


def test_updates_roll_one_at_a_time_and_skip_to_the_newest() -> None:
    replicas = made("a", "b")
    a, b = the(replicas, "a"), the(replicas, "b")
    assert replicas.next_update() is None
    replicas.staged(1, 0.0)
    assert replicas.next_update() == (a, 1)
    assert replicas.next_update() is None, "never both at once"
    replicas.staged(2, 0.0)
    replicas.updated(a, 1, 0.0)
    assert replicas.next_update() == (b, 2), "the oldest first, straight to the newest"
    transfer_broke(replicas, b)
    assert replicas.next_update() == (a, 2), "one that fails holds nobody else up"
    replicas.updated(a, 2, 0.0)
    assert replicas.next_update() == (b, 2)
    transfer_broke(replicas, b)
    replicas.staged(3, 0.0)
    assert replicas.next_update() == (a, 3)
    replicas.updated(a, 3, 0.0)
    assert replicas.next_update() == (b, 3)
    replicas.leave(b, 0.0, for_good=True)
    assert replicas.settled
    assert not replicas.updated(b, 3, 0.0) and replicas.versions == {"a": 3}
    with pytest.raises(ValueError, match="versions only grow"):
        replicas.staged(2, 0.0)


def test_a_trainer_that_sends_to_nobody_does_not_take_all_replicas_out_of_service() -> None:
    replicas = made("a", "b", "c", "d")
    replicas.staged(1, 0.0)
    tried = []
    for _ in range(6):
        chosen, _ = replicas.next_update() or pytest.fail("nobody has the version")
        tried.append(chosen.name)
        replicas.pause(chosen, 0.0)
        transfer_broke(replicas, chosen)
    assert tried == ["a", "b", "a", "b", "a", "b"], "c and d serve with the old version"
    chosen, _ = replicas.next_update() or pytest.fail("a is tried again")
    replicas.updated(chosen, 1, 0.0)
    assert [replicas.next_update()] == [(the(replicas, "c"), 1)], "the trainer sends again: b is not to hold c up"
    validate(replicas)


def test_transfers_that_break_take_turns() -> None:
    replicas = made("a", "b")
    replicas.staged(1, 0.0)
    order = []
    for _ in range(4):
        chosen, _ = replicas.next_update() or pytest.fail("nobody has the version")
        transfer_broke(replicas, chosen)
        order.append(chosen.name)
    assert order == ["a", "b", "a", "b"]


def test_old_weights_serve_nothing() -> None:
    replicas = made("a", version=7)
    stale = replicas.join("b", 4, 6, None, 0.0)
    assert not stale.serving and [take(replicas) for _ in range(5)] == ["a"] * 4 + [None]


def test_a_replica_with_less_room_keeps_what_it_has() -> None:
    replicas, waiting = made("a"), Request[None]()
    taken = [Request[None]() for _ in range(4)]
    assert all(replicas.take(request, 0.0) for request in taken) and not replicas.take(waiting, 0.0)
    replicas.wait(waiting)
    replicas.resize(the(replicas, "a"), 2, 0.0)
    for request in taken[:2]:
        replicas.served(request, 1.0)
        assert not replicas.grants(1.0)
    replicas.served(taken[2], 1.0)
    assert replicas.grants(1.0) == [waiting]
    assert take(replicas) is None
    replicas.resize(the(replicas, "a"), 3, 2.0)
    assert take(replicas) == "a"
    validate(replicas)
