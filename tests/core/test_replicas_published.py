"""Weights that are published only after every so many updates (`sync.every_updates`), or to all replicas at once."""

from __future__ import annotations

from dart.core.fleet.invariants import validate
from dart.core.fleet.replica import Replica
from dart.core.fleet.replicas import Replicas


def made(*names: str, every_updates: int, together: bool = False) -> tuple[Replicas[None], list[Replica[None]]]:
    replicas: Replicas[None] = Replicas(0.0, every_updates=every_updates, together=together)
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
