"""Any history of events leaves the lifecycle machine valid, and ends every trajectory once."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lifecycle_samples import ENVIRONMENTS, hopeless, machine, trajectory

from dart.core.curation.batches import ReleasedGroup
from dart.core.curation.judging import Verdict
from dart.core.curation.orders import Attempt, Order
from dart.core.curation.schedule import Sampling
from dart.core.types import Task

ROUNDS = 100
"""Far more than any history here takes; each gives every environment a roll-out."""


class AnyHistory(RuleBasedStateMachine):
    """Events in any order, decisions that are stored late, and a mirror of what must have become of every roll-out."""

    @initialize(
        sampling=st.sampled_from(["rollout", "task", "batch"]),
        synchronous=st.booleans(),
        waiting=st.integers(0, 4),
        lacking=st.integers(0, 3),
    )
    def start(self, sampling: Sampling, synchronous: bool, waiting: int, lacking: int) -> None:
        self.synchronous = synchronous
        self.groups = machine(rollouts=3, size=6, sampling=sampling, synchronous=synchronous, first=100)
        self.running: list[Order] = []
        self.unstored: list[Verdict] = []
        self.batch: list[ReleasedGroup] = []
        self.version, self.now = 0, 0.0
        self.finished: set[str] = set()
        self.over: Counter[str] = Counter()
        task = Task("s", "a", 1)
        for number in range(waiting):
            name = f"g{number:06d}"
            members = tuple(trajectory(Order(f"{name}-{place}", name, task, 5)) for place in (1, 2, 3))
            self.finished |= {one.id for one in members}
            self.groups.restore_released(ReleasedGroup.evenly(name, members, (1.0, 0.0, -1.0)), task)
        if lacking:
            name = "g000050"
            done = [trajectory(Order(f"{name}-{place}", name, task, 5)) for place in range(lacking + 1, 4)]
            self.finished |= {one.id for one in done}
            self.groups.restore_open(name, task, 3, done)

    @rule()
    def begin(self) -> None:
        if self.groups.why_wait(ENVIRONMENTS) is None:
            order, _ = self.groups.next(ENVIRONMENTS)
            assert order.trajectory_id not in {one.trajectory_id for one in self.running}
            assert order.trajectory_id not in self.finished
            self.running.append(order)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.0, 1.0]))
    def finish(self, data: st.DataObject, reward: float) -> None:
        order = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.groups.finished(trajectory(order, reward, self.version))
        self.finished.add(order.trajectory_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), worker=st.sampled_from("ab"), hopeless_now=st.booleans())
    def fail(self, data: st.DataObject, worker: str, hopeless_now: bool) -> None:
        order = self.running[place := data.draw(st.integers(0, len(self.running) - 1))]
        self.now += 1.0
        tried = hopeless(order) if hopeless_now else order.failed(worker)
        if self.groups.failed(tried, self.now) is not Attempt.NOTHING_WORKS:
            del self.running[place]

    @rule()
    def judge(self) -> None:
        if group := self.groups.to_judge():
            self.unstored.append(self.groups.judge(group))

    @precondition(lambda self: self.unstored)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        verdict = self.unstored.pop(data.draw(st.integers(0, len(self.unstored) - 1)))
        self.groups.decided(verdict)
        if not verdict.released:
            self.over.update(one.id for one in verdict.trajectories)

    @precondition(lambda self: not self.batch)
    @rule()
    def update(self) -> None:
        self.unstored += self.groups.stale(self.version)
        if self.groups.update_due:
            if self.synchronous:
                assert not self.running, "sampling has come to rest"
            self.batch = self.groups.take()

    @precondition(lambda self: self.batch)
    @rule()
    def consume(self) -> None:
        self.groups.consumed()
        self.over.update(one.id for group in self.batch for one in group.trajectories)
        self.batch = []
        self.version += 1
        self.groups.update_over()

    @precondition(lambda self: self.batch)
    @rule(which=st.integers(0, 5), whole=st.booleans())
    def refuse(self, which: int, whole: bool) -> None:
        culprits = self.batch if whole else [self.batch[which % len(self.batch)]]
        for group in culprits:
            self.groups.unusable(group.id, "the trainer refuses it")
        self.groups.returned()
        self.batch = []

    @rule(number=st.integers(98, 112))
    def condemn(self, number: int) -> None:
        """Also groups that are open, closing, in training, over, or never were."""
        self.groups.unusable(f"g{number:06d}", "somebody says so")

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.groups.pause(paused)
        assert not paused or self.groups.why_wait(ENVIRONMENTS) == "the run is paused"
        self.groups.pause(False)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "groups"):
            return
        self.groups.validate()
        assert max(self.over.values(), default=1) == 1, "a trajectory is over once"
        assert set(self.over) <= self.finished
        here = {one.id for group in self.groups._groups.values() for one in group.members}
        assert here | set(self.over) == self.finished and not here & set(self.over), "no trajectory is lost"

    def teardown(self) -> None:
        """From any state, when nothing goes wrong any more: updates follow, and what was there comes to an end."""
        if not hasattr(self, "groups"):
            return
        left, version, rewards = set(self.groups._groups), self.version, itertools.cycle([1.0, 0.0])
        for _ in range(ROUNDS):
            while len(self.running) < ENVIRONMENTS and self.groups.why_wait(ENVIRONMENTS) is None:
                self.begin()
            for order in self.running:
                self.groups.finished(trajectory(order, next(rewards), self.version))
                self.finished.add(order.trajectory_id)
            self.running = []
            while group := self.groups.to_judge():
                self.unstored.append(self.groups.judge(group))
            self.store_all()
            if self.batch:
                self.consume()
            self.update()
            self.store_all()
            self.holds()
            if left.isdisjoint(self.groups._groups) and self.version >= version + 3:
                return
        raise AssertionError(
            f"{left & set(self.groups._groups)} are left, and {self.version - version} updates were made"
        )

    def store_all(self) -> None:
        for verdict in self.unstored:
            self.groups.decided(verdict)
            if not verdict.released:
                self.over.update(one.id for one in verdict.trajectories)
        self.unstored = []


AnyHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestAnyHistory = AnyHistory.TestCase
