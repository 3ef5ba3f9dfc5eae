"""Credits: two ends that only ever tell each other totals agree, whatever is on its way."""

from __future__ import annotations

import doctest
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart.core.fleet import credits as module
from dart.core.fleet.credits import Credits


def test_the_worked_example() -> None:
    assert doctest.testmod(module).failed == 0


def test_a_worker_without_the_capability_has_what_it_said_at_first() -> None:
    credits = Credits(elastic=False)
    assert credits.offered(3, 3, 0) == 3
    credits.take()
    credits.begin()
    assert (credits.free, credits.idle, credits.renewing) == (2, 2, 0)
    assert credits.end() == 1, "free again at once"
    assert (credits.free, credits.idle, credits.renewing) == (3, 3, 0)


def test_what_was_given_out_and_not_begun_comes_back() -> None:
    credits = Credits(elastic=True)
    credits.offered(1, 1, 0)
    credits.take()
    assert (credits.free, credits.idle) == (0, 1)
    credits.give_back()
    assert (credits.free, credits.renewing) == (1, 0)


def test_more_than_it_has_is_refused() -> None:
    credits = Credits(elastic=True)
    with pytest.raises(ValueError, match="granted is at most 2: its 2 environments and the 0 episodes that are over"):
        credits.offered(2, 3, 0)
    assert credits == Credits(elastic=True)
    credits = Credits(elastic=True, most=2)
    with pytest.raises(ValueError, match="at most the 2 slots of its Ready in all"):
        credits.offered(2, 2, 1)


class Worker:
    """The other end: environments that boot, are held, renewed and disposed of; its words arrive some time later."""

    def __init__(self) -> None:
        self.free = self.held = self.renewing = self.booting = self.granted = 0
        self.said: deque[tuple[int, int, int]] = deque()

    def say(self) -> None:
        self.said.append((self.free + self.held + self.renewing, self.granted, self.booting))


EVENTS = ("order", "booted", "reset", "release", "renewed", "disposed", "hear", "take", "give back", "begin", "end")


@given(st.lists(st.sampled_from(EVENTS), max_size=200))
def test_never_more_than_granted_and_in_the_end_the_same(events: list[str]) -> None:
    worker, credits = Worker(), Credits(elastic=True)
    resets = releases = given_out = 0  # commands on their way, and credits without an episode
    for event in events:
        match event:
            case "order":
                worker.booting += 1
            case "booted" if worker.booting:
                worker.booting, worker.free, worker.granted = worker.booting - 1, worker.free + 1, worker.granted + 1
            case "reset" if resets:
                assert worker.free > 0, "no Reset ever waits for an environment"
                resets, worker.free, worker.held = resets - 1, worker.free - 1, worker.held + 1
            case "release" if releases and worker.held:
                releases, worker.held, worker.renewing = releases - 1, worker.held - 1, worker.renewing + 1
            case "renewed" if worker.renewing:
                worker.renewing, worker.free = worker.renewing - 1, worker.free + 1
                worker.granted += 1
            case "disposed" if worker.renewing:
                worker.renewing -= 1
            case "hear" if worker.said:
                credits.offered(*worker.said.popleft())
                continue
            case "take" if credits.free > 0:
                credits.take()
                given_out += 1
            case "give back" if given_out:
                credits.give_back()
                given_out -= 1
            case "begin" if given_out:
                credits.begin()
                given_out, resets = given_out - 1, resets + 1
            case "end" if credits.begun > credits.ended:
                assert credits.end() == 0
                releases += 1
            case _:
                continue
        worker.say()
    while worker.said:
        credits.offered(*worker.said.popleft())
    assert credits.free == worker.free - resets - given_out
    assert credits.renewing == worker.renewing + releases, "also those whose Release is still on its way"
    assert (credits.count, credits.booting) == (worker.free + worker.held + worker.renewing, worker.booting)
