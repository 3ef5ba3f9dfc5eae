"""The two ends of a session against each other, without a network: cut, resumed, repeated and cancelled at will."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dart.v1 import session_pb2 as pb
from dart.wire.outbox import too_large, whole
from dart.wire.session import LEAST_KEPT, CoordinatorEnd, Key, Overdue, WorkerEnd, assignment_of

Message = TypeVar("Message", pb.SessionRequest, pb.SessionResponse)


class Wire(Generic[Message]):
    """What was put into a stream and has not arrived yet, oldest first."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def put(self, message: Message, rest: Sequence[bytes] = (), /) -> None:
        self.sent.append(whole(message, rest))


def work(name: str = "a", attempt: int = 1) -> pb.Assignment:
    return pb.Assignment(assignment_id=name, attempt=attempt)


def key_of(message: pb.SessionRequest | pb.SessionResponse) -> Key:
    assignment = assignment_of(message)
    assert assignment is not None
    return assignment.assignment_id, assignment.attempt, assignment.sequence


def answered(end: CoordinatorEnd, assignment: pb.Assignment) -> Key | None:
    """What the coordinator's boundary does with a reply that keeps the rules."""
    if (owed := end.owed(assignment)) is None:
        end.unexpected()
        return None
    end.settle(owed, 0.0)
    return owed.key


class Pair:
    """A coordinator's end, a worker's end, and the stream between them."""

    def __init__(self) -> None:
        self.down: Wire[pb.SessionResponse] = Wire()
        self.up: Wire[pb.SessionRequest] = Wire()
        self.coordinator = CoordinatorEnd(7, self.down)
        self.worker = WorkerEnd(self.up)
        self.worker.welcomed(pb.Welcome(epoch=7), self.up)
        self.running: dict[Key, pb.SessionResponse] = {}
        self.carried_out: Counter[Key] = Counter()
        self.closed: list[Key] = []

    def call(self, command: pb.Act | pb.Reset | pb.Generate | pb.Release) -> Key:
        return self.coordinator.issue([command], 0.0)

    def release(self, name: str) -> Key:
        return self.coordinator.issue([pb.Release(assignment=work(name))], 0.0, awaited=False)

    def deliver(self, twice: bool = False) -> None:
        """The oldest command on its way arrives."""
        message = self.down.sent.pop(0)
        for _ in range(1 + twice):
            assignment = assignment_of(message)
            assert assignment is not None
            if self.worker.accept(assignment):
                key = key_of(message)
                self.carried_out[key] += 1
                if message.WhichOneof("body") != "abort":
                    assert not any(other[:2] == key[:2] for other in self.running), "one command of a work at a time"
                self.running[key] = message

    def finish(self, key: Key) -> None:
        """The worker has carried out a command."""
        message = self.running.pop(key)
        reply = None if message.WhichOneof("body") == "abort" else pb.Observed(instruction=str(key))
        self.worker.reply(assignment_of(message) or work(), reply)

    def answer(self, twice: bool = False) -> None:
        """The oldest reply on its way arrives."""
        message = self.up.sent.pop(0)
        for _ in range(1 + twice):
            if closed := answered(self.coordinator, assignment_of(message) or work()):
                assert message.observed.instruction == str(closed)
                self.closed.append(closed)

    def cut(self) -> None:
        """The stream is lost with all that is on its way; the worker dials again and is known."""
        self.down, self.up = Wire(), Wire()
        self.coordinator.resume(self.down, 0.0)
        assert not self.worker.welcomed(pb.Welcome(epoch=7, resumed=True), self.up)

    def settle(self) -> None:
        while self.down.sent or self.up.sent or self.running:
            while self.down.sent:
                self.deliver()
            for key in list(self.running):
                self.finish(key)
            while self.up.sent:
                self.answer()


def kinds(wire: Wire[pb.SessionResponse]) -> list[str | None]:
    return [message.WhichOneof("body") for message in wire.sent]


def test_a_command_is_answered() -> None:
    pair = Pair()
    key = pair.call(pb.Act(assignment=work()))
    pair.settle()
    assert pair.closed == [key] == [("a", 1, 1)]
    assert pair.call(pb.Act(assignment=work())) == ("a", 1, 2)


def test_a_lost_command_is_sent_again_and_a_lost_reply_is_repeated() -> None:
    pair = Pair()
    first = pair.call(pb.Act(assignment=work("a")))
    pair.cut()  # before it arrives
    pair.deliver()
    pair.finish(first)
    pair.cut()  # before its reply arrives
    pair.settle()
    assert pair.closed == [first]
    assert pair.carried_out == {first: 1}
    pair.cut()
    assert not pair.down.sent, "what was answered is not sent again"


def test_what_runs_when_the_stream_breaks_goes_on() -> None:
    pair = Pair()
    key = pair.call(pb.Generate(assignment=work()))
    pair.deliver()
    pair.cut()
    pair.deliver()
    pair.finish(key)
    pair.answer()
    assert pair.closed == [key]
    assert pair.carried_out == {key: 1}


def test_release_does_not_overtake_an_act_that_nobody_waits_for() -> None:
    pair = Pair()
    act = pair.call(pb.Act(assignment=work()))
    pair.coordinator.abandon(act)  # sampling was cancelled
    pair.release("a")
    pair.coordinator.finish(("a", 1))
    assert kinds(pair.down) == ["act"]
    pair.cut()
    assert kinds(pair.down) == ["act"], "nobody waits for it, but the release does"
    pair.deliver()
    pair.finish(act)
    pair.answer()
    assert kinds(pair.down) == ["release"]
    pair.cut()
    assert kinds(pair.down) == ["release"], "sent until it is answered"
    pair.settle()
    assert not pair.coordinator._work


def test_abort_overtakes_and_an_abandoned_generation_is_not_sent_again() -> None:
    pair = Pair()
    key = pair.call(pb.Generate(assignment=work("q")))
    pair.coordinator.issue([pb.Abort(assignment=work("q"))], 0.0, awaited=False)
    assert kinds(pair.down) == ["generate", "abort"]
    pair.coordinator.abandon(key)
    pair.coordinator.finish(("q", 1))
    pair.cut()
    assert not pair.down.sent
    pair.settle()
    assert answered(pair.coordinator, pb.Assignment(assignment_id="q", attempt=1, sequence=1, epoch=7)) is None
    assert pair.coordinator.stale == 1


def test_the_pages_of_one_call_go_together_and_once() -> None:
    pair = Pair()
    pages = [pb.SessionResponse(train_batch=pb.TrainBatch(assignment=work("u1"), page=page)) for page in range(3)]
    last = pair.coordinator.issue(pages, 0.0)
    pair.coordinator.issue([pb.SaveCheckpoint(assignment=work("u1"))], 0.0)
    assert [message.train_batch.page for message in pair.down.sent] == [0, 1, 2]
    for _ in range(2):  # once as they were sent, once more after a cut
        for message in pair.down.sent:
            assignment = message.train_batch.assignment
            pair.carried_out[key_of(message)] += pair.worker.accept(assignment)
            if message.train_batch.page < 2:
                pair.worker.reply(assignment, None)
        pair.cut()
    assert set(pair.carried_out.values()) == {1}
    pair.worker.reply(pages[2].train_batch.assignment, pb.Trained())
    assert answered(pair.coordinator, pair.up.sent[0].trained.assignment) == last


def test_another_epoch_voids_what_was_held() -> None:
    pair = Pair()
    key = pair.call(pb.Act(assignment=work()))
    pair.deliver()
    assert pair.worker.welcomed(pb.Welcome(epoch=8, resumed=False), pair.up)
    pair.finish(key)
    assert not pair.up.sent, "the answer is of an epoch that is over"
    pair.call(pb.Act(assignment=work("b")))
    pair.deliver()
    assert not pair.running, "and so is the command"
    assert answered(pair.coordinator, pb.Assignment(assignment_id="b", attempt=1, sequence=1, epoch=8)) is None


def test_a_first_welcome_voids_nothing() -> None:
    assert not WorkerEnd(Wire()).welcomed(pb.Welcome(epoch=8), Wire())


def test_overdue_commands_fail_and_let_the_next_go() -> None:
    end = CoordinatorEnd(7, down := Wire[pb.SessionResponse]())
    hanging = end.issue([pb.Act(assignment=work("a"))], 0.0)
    end.abandon(hanging)
    end.issue([pb.Release(assignment=work("a"))], 1.0, awaited=False)
    for name in "bc":
        end.issue([pb.Act(assignment=work(name))], 25.0)
    end.issue([pb.LoadWeights(assignment=work("w"))], 0.0)
    assert end.overdue(29.9, 30.0) == Overdue()
    late = end.overdue(30.0, 30.0)
    assert (late.failed, late.hangs) == ([hanging], False)
    assert "no answer to act for 30 s" in late.why
    assert kinds(down)[-1] == "release"
    assert end.overdue(54.9, 30.0) == Overdue(), "the release has its own time"
    assert end.overdue(55.0, 30.0).hangs, "half of what it owes"


def test_a_release_that_waited_for_its_act_has_its_time_from_when_it_is_sent() -> None:
    """Two evaluators that take ten minutes, say, at the end of training."""
    end = CoordinatorEnd(7, Wire[pb.SessionResponse]())
    for name in "ab":
        end.abandon(end.issue([pb.Act(assignment=work(name))], 0.0))
        end.issue([pb.Release(assignment=work(name))], 10.0, awaited=False)
    for name in "ab":
        owed = end.owed(pb.Assignment(assignment_id=name, attempt=1, sequence=1, epoch=7))
        assert owed is not None
        end.settle(owed, 100.0)
    assert end.overdue(129.9, 30.0, {}, environments=8) == Overdue()
    assert end.overdue(130.0, 30.0, {}, environments=8).hangs


def test_the_oldest_debt_is_the_one_that_somebody_waits_for() -> None:
    end = CoordinatorEnd(7, Wire[pb.SessionResponse]())
    assert end.oldest(5.0) == ("", 0.0)
    given_up = end.issue([pb.Act(assignment=work("a"))], 0.0)
    end.issue([pb.Generate(assignment=work("b"))], 10.0)
    end.issue([pb.Reset(assignment=work("c"))], 20.0)
    end.abandon(given_up)
    assert end.oldest(25.0) == ("generate", 15.0)


def test_a_message_that_is_too_large_closes_its_command() -> None:
    pair = Pair()
    key = pair.call(pb.Act(assignment=work()))
    pair.call(pb.Act(assignment=work()))
    message = pair.down.sent.pop()
    assert pair.coordinator.refused(message, 0.0) == key
    assert kinds(pair.down) == ["act"], "the next of its work goes"
    assert pair.coordinator.refused(message, 0.0) is None
    assert pair.coordinator.refused(pb.SessionResponse(bye=pb.Bye()), 0.0) is None


def test_a_reply_that_is_too_large_is_a_failure_also_when_it_is_repeated() -> None:
    pair = Pair()
    pair.call(pb.Act(assignment=work()))
    pair.deliver()
    pair.finish(("a", 1, 1))
    pair.worker.refused(pair.up.sent.pop(), too_large("observed", 20_000_000))
    pair.cut()
    pair.deliver()
    (failure,) = pair.up.sent
    assert failure.failure.message == "the message observed is 20,000,000 bytes, and the limit is 16,777,216"
    assert answered(pair.coordinator, failure.failure.assignment) == ("a", 1, 1)


def test_replies_are_kept_within_a_bound_and_what_runs_is_not_forgotten() -> None:
    pair = Pair()
    pair.call(pb.Act(assignment=work("long")))
    pair.deliver()
    for number in range(3 * LEAST_KEPT):
        key = pair.call(pb.Act(assignment=work(f"short-{number}")))
        pair.deliver()
        pair.finish(key)
        pair.answer()
    assert len(pair.worker._work) <= LEAST_KEPT + 1
    pair.cut()
    pair.settle()
    assert pair.carried_out["long", 1, 1] == 1


class Story(Pair):
    """Episodes that begin, act and are given up at random, over a stream that does its worst."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.waiting: dict[str, Key] = {}
        """Each episode that is on: the last command that it waited for."""
        self.released: list[Key] = []
        self.begun = 0

    def begin(self) -> None:
        name = f"e{self.begun}"
        self.begun += 1
        self.waiting[name] = self.call(pb.Reset(assignment=work(name)))

    def act(self) -> None:
        for name in [name for name, key in self.waiting.items() if key in self.closed]:
            self.waiting[name] = self.call(pb.Act(assignment=work(name)))

    def give_up(self) -> None:
        if self.waiting:
            name = self.chance.choice(list(self.waiting))
            self.coordinator.abandon(self.waiting.pop(name))
            self.released.append(self.release(name))
            self.coordinator.finish((name, 1))

    def something(self) -> None:
        step = self.chance.randrange(11)
        twice = self.chance.random() < 0.2
        if step < 4:
            (self.begin, self.act, self.act, self.give_up)[step]()
        elif step < 6 and self.running:
            self.finish(self.chance.choice(list(self.running)))
        elif step < 8 and self.down.sent:
            self.deliver(twice)
        elif step < 10 and self.up.sent:
            self.answer(twice)
        elif step == 10:
            self.cut()


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_each_command_is_carried_out_once_and_answered(seed: int) -> None:
    story = Story(seed)
    for _ in range(story.chance.randrange(10, 120)):
        story.something()
        story.coordinator.validate()
    story.settle()
    assert set(story.carried_out.values()) <= {1}
    assert len(story.closed) == len(set(story.closed))
    assert set(story.waiting.values()) <= set(story.closed), "everybody who waits has an answer"
    assert set(story.released) <= set(story.carried_out), "every environment is free again"
    assert not story.coordinator.unanswered
    assert story.coordinator._work.keys() == {(name, 1) for name in story.waiting}


@pytest.mark.parametrize("message", [pb.SessionResponse(), pb.SessionResponse(bye=pb.Bye())])
def test_what_is_no_command_has_no_assignment(message: pb.SessionResponse) -> None:
    assert assignment_of(message) is None


def late(end: CoordinatorEnd, now: float, environments: int = 8) -> Overdue:
    return end.overdue(now, 30.0, {"act": 1200.0}, environments)


def test_one_environment_that_hangs_is_no_worker_that_hangs() -> None:
    """It is the only one that was asked anything; its Release is answered."""
    end = CoordinatorEnd(7, Wire[pb.SessionResponse]())
    for number in range(5):
        asked = end.issue([pb.Act(assignment=work(f"a{number}"))], 2000.0 * number)
        assert late(end, 2000.0 * number + 1199.0) == Overdue(), "the world says that it may take so long"
        found = late(end, 2000.0 * number + 1200.0)
        assert (found.failed, found.hangs, found.why) == ([asked], False, "no answer to act for 1200 s")
        end.issue([pb.Release(assignment=work(f"a{number}"))], 2000.0 * number + 1200.0, awaited=False)
        assert answered(end, pb.Assignment(assignment_id=f"a{number}", attempt=1, sequence=2, epoch=7))


def test_a_worker_hangs_when_half_of_its_environments_are_late_and_none_has_answered() -> None:
    end = CoordinatorEnd(7, Wire[pb.SessionResponse]())
    for number in range(8):
        end.issue([pb.Reset(assignment=work(f"a{number}"))], float(number))
    assert [late(end, 30.0 + number).hangs for number in range(4)] == [False, False, False, True]


def test_a_worker_hangs_when_it_does_not_even_answer_a_release() -> None:
    end = CoordinatorEnd(7, Wire[pb.SessionResponse]())
    end.issue([pb.Act(assignment=work("a"))], 0.0)
    assert not late(end, 1200.0).hangs
    end.issue([pb.Release(assignment=work("a"))], 1200.0, awaited=False)
    assert not late(end, 1229.0).hangs
    assert late(end, 1230.0).hangs
