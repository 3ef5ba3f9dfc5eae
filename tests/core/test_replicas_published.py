"""Weights that are published only after every so many updates (`sync.every_updates`), or to all replicas at once."""

from __future__ import annotations

from fleet_samples import transfer_broke

from dart.core.fleet.invariants import validate
from dart.core.fleet.replica import Replica, Request
from dart.core.fleet.replicas import Replicas


def made(
    *names: str, every_updates: int = 1, together: bool = False, max_staleness: int | None = None
) -> tuple[Replicas[None], list[Replica[None]]]:
    replicas: Replicas[None] = Replicas(
        0.0, every_updates=every_updates, together=together, max_staleness=max_staleness
    )
    return replicas, [replicas.join(name, 4, 0, None, 0.0) for name in names]


def test_every_third_version_is_published() -> None:
    replicas, (a, b) = made("a", "b", every_updates=3)
    for version in (1, 2):
        replicas.staged(version, 0.0)
        assert replicas.next_update() is None and replicas.settled and not replicas.behind
    replicas.staged(3, 0.0)
    assert not replicas.settled and replicas.behind == [a, b]
    assert replicas.next_update() == (a, 3)
    replicas.updated(a, 3, 0.0)
    replicas.staged(4, 0.0)
    assert replicas.next_update() == (b, 4), "the trainer no longer has version 3"
    replicas.updated(b, 4, 0.0)
    assert replicas.settled and replicas.next_update() is None, "a has what was published"
    replicas.staged(5, 0.0)
    late = replicas.join("c", 4, 0, None, 0.0)
    assert not late.serving and replicas.next_update() == (late, 5)
    replicas.updated(late, 5, 0.0)
    replicas.publish_newest(0.0)
    assert replicas.behind == [a, b], "the last weights reach everybody, whatever their number"
    for replica in (a, b):
        assert replicas.next_update() == (replica, 5)
        replicas.updated(replica, 5, 0.0)
    assert replicas.settled
    replicas.publish_newest(0.0)
    assert replicas.settled, "published already"
    replicas.staged(7, 0.0)
    replicas.staged(8, 0.0)
    assert replicas.next_update() == (a, 8), "counted from the last one that was published"
    validate(replicas)


def test_all_at_once_at_every_second_version() -> None:
    replicas, _ = made("a", "b", every_updates=2, together=True)
    replicas.staged(1, 0.0)
    assert all(replica.serving for replica in replicas)
    late = replicas.join("c", 4, 0, None, 0.0)
    assert late.serving, "nothing newer is published"
    replicas.publish_newest(0.0)
    assert not any(replica.serving for replica in replicas)
    while chosen := replicas.next_update():
        replicas.updated(*chosen, 0.0)
    assert replicas.settled and all(replica.serving for replica in replicas)
    validate(replicas)


def test_all_at_once() -> None:
    replicas, (a, b, c) = made("a", "b", "c", every_updates=1, together=True)
    replicas.staged(1, 0.0)
    assert [replicas.next_update() for _ in range(4)] == [(a, 1), (b, 1), (c, 1), None]
    for replica in (a, b):
        replicas.updated(replica, 1, 0.0)
        assert not any(replica.serving for replica in replicas)
    replicas.leave(c, 0.0, for_good=False)
    assert replicas.settled and all(replica.serving for replica in replicas)


def test_all_at_once_when_the_last_one_behind_is_replaced() -> None:
    replicas, (a, _) = made("a", "b", every_updates=1, together=True)
    replicas.staged(1, 0.0)
    replicas.updated(a, 1, 0.0)
    replicas.join("b", 4, 1, None, 0.0)
    assert replicas.settled and all(replica.serving for replica in replicas)


# ---- transfers that break again and again ----


def test_a_replica_whose_transfers_break_takes_no_turn_from_others_and_rests_for_longer() -> None:
    replicas, (a, b, c) = made("a", "b", "c")
    replicas.staged(1, 0.0)
    assert replicas.next_update() == (a, 1) and replicas.next_update() is None
    assert replicas.update_broke(a, 0.0) == 0.5
    assert replicas.next_update() == (b, 1), "while it rests"
    replicas.update_failed(a, 1.0)
    assert replicas.next_update() == (a, 1), "beside the one whose turn it is"
    assert replicas.next_update() is None, "one sound replica at a time"
    validate(replicas)
    assert [replicas.update_broke(a, 0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    replicas.update_failed(a, 2.0)
    replicas.leave(a, 2.0, for_good=False)
    again = replicas.join("a", 4, 0, None, 3.0)
    assert again.health.breaks == 9, "a process that ended over it comes back under its name"
    assert replicas.next_update() == (again, 1)
    replicas.updated(again, 1, 4.0)
    replicas.updated(b, 1, 4.0)
    assert again.health.breaks == 0 and replicas.next_update() == (c, 1)


def test_a_replica_that_cannot_be_sent_weights_stops_sampling_what_would_be_dropped() -> None:
    replicas, (a, b) = made("a", "b", max_staleness=2)
    for version in (1, 2):
        replicas.staged(version, 0.0)
        while (chosen := replicas.next_update()) and chosen[0] is a:
            replicas.updated(*chosen, 0.0)
        transfer_broke(replicas, b)
        assert b.serving, "what it samples can be trained on"
    replicas.staged(3, 0.0)
    transfer_broke(replicas, b)
    assert a.serving and not b.serving
    replicas.updated(b, 3, 0.0)
    assert b.serving
    alone, (only,) = made("only", max_staleness=0)
    alone.staged(1, 0.0)
    alone.next_update()
    alone.update_failed(only, 0.0)
    assert only.serving, "nobody else does"
    replicas, (a, b) = made("a", "b", max_staleness=0)
    replicas.staged(1, 0.0)
    replicas.next_update()
    replicas.updated(a, 1, 0.0)
    assert replicas.next_update() == (b, 1)
    replicas.pause(a, 0.0)
    replicas.update_failed(b, 0.0)
    assert b.serving, "the fresher one does not"


def test_a_replica_that_a_broken_update_left_as_it_was_serves_on() -> None:
    replicas, (a, b) = made("a", "b", max_staleness=1)

    def broken(replica: Replica[None], *, serve: bool = True) -> bool:
        """Whether it serves after a transfer that broke."""
        while (chosen := replicas.next_update()) and chosen[0] is not replica:
            replicas.updated(*chosen, 0.0)
        replicas.pause(replica, 0.0)
        replicas.update_broke(replica, 0.0, serve=serve)
        validate(replicas)
        serving = replica.serving
        replicas.update_failed(replica, 0.0)
        assert replica.serving == serving
        return serving

    replicas.staged(1, 0.0)
    assert broken(b) and replicas.take(Request("b"), 0.0) is b
    assert not broken(b, serve=False)
    replicas.updated(b, 1, 0.0)
    replicas.staged(2, 0.0)
    assert broken(b), "what it samples can be trained on"
    replicas.staged(3, 0.0)
    assert a.version == 2 and not broken(b), "what it samples would be dropped"
    replicas.updated(b, 3, 0.0)
    replicas.staged(4, 0.0)
    replicas.exclude(b, 0.0)
    assert not broken(b)
    replicas, (a,) = made("a", together=True)
    replicas.staged(1, 0.0)
    assert not broken(a), "none serves until all have the version"


def test_an_instance_that_is_gone_does_not_come_back_with_its_transfer() -> None:
    replicas, (a,) = made("a")
    replicas.staged(1, 0.0)
    assert replicas.next_update() == (a, 1)
    replicas.leave(a, 0.0, for_good=False)
    replicas.update_broke(a, 0.0, serve=True)
    assert replicas.take(Request(), 0.0) is None


def test_who_is_excluded_is_not_waited_for_again() -> None:
    replicas, (a, b) = made("a", "b")
    replicas.staged(1, 0.0)
    replicas.next_update()
    replicas.updated(a, 1, 0.0)
    replicas.exclude(b, 0.0)
    assert replicas.settled
    replicas.staged(2, 0.0)
    assert not replicas.settled
    replicas.updated(a, 2, 0.0)
    assert replicas.settled and not replicas.behind
    replicas.leave(a, 0.0, for_good=True)
    assert not replicas.settled and replicas.behind == [b], "nobody else is left"


def test_a_trainer_that_sends_to_nobody_leaves_some_in_service() -> None:
    replicas, _ = made("a", "b", "c", "d")
    replicas.staged(1, 0.0)
    out, resting = set(), []
    for _ in range(12):
        while chosen := replicas.next_update():
            replicas.pause(chosen[0], 0.0)
            out.add(chosen[0].name)
            replicas.update_broke(chosen[0], 0.0)
            resting.append(chosen[0])
            validate(replicas)
        replicas.update_failed(resting.pop(0), 0.0)
    assert out == {"a", "b"}, "c and d serve with the old version"


def test_a_trainer_whose_transfers_end_engines_leaves_some_in_service() -> None:
    """Over NCCL the engine of a broken transfer ends, and its replica comes back minutes later."""
    replicas, _ = made("a", "b", "c", "d")
    replicas.staged(1, 0.0)
    for _ in range(2):
        replica, _version = replicas.next_update() or (None, 0)
        assert replica is not None
        replicas.pause(replica, 0.0)
        replicas.leave(replica, 0.0, for_good=False)
        assert replicas.update_broke(replica, 0.0) > 0
        replicas.update_failed(replica, 0.0)
        validate(replicas)
    assert [one.name for one in replicas if one.serving] == ["c", "d"] and replicas.next_update() is None
    again = replicas.join("a", 4, 0, None, 100.0)
    assert replicas.next_update() == (again, 1), "it is out of service anyway"
    assert replicas.next_update() is None
    replicas.leave(again, 110.0, for_good=False)
    replicas.update_broke(again, 110.0)
    assert replicas.next_update() is None
    assert replicas.next_alarm(110.0) == 300.0
    replicas.time_passed(300.0)
    assert replicas.next_update() is not None, "b is lost for good, so a may be at fault itself"
    validate(replicas)


def test_a_break_of_an_instance_that_was_replaced_is_not_held_against_the_new_one() -> None:
    replicas, (a,) = made("a")
    replicas.staged(1, 0.0)
    assert replicas.next_update() == (a, 1)
    replicas.leave(a, 0.0, for_good=False)
    again = replicas.join("a", 4, 0, None, 1.0)
    assert replicas.update_broke(a, 0.0) == 0.0 and again.health.breaks == 0
