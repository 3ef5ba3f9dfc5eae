"""The whole life of every group, as one state machine.

    open ──> closing ──> waiting ──> training ──> consumed
      ▲         │  ▲        │            │
      └ restart │  └────────┴────────────┘  stale; cannot be trained on
                └──> dropped

Events come in as method calls, with the time where it matters; the results are the machine's state and the return
values. Nothing here waits or does I/O. The data manager (`coordinator.sampling.data`) reports roll-outs, updates and
restarts, stores each `Verdict`, and confirms it with `decided`: until then the group stays closing, so a decision that
is not durable yet moves nothing.

The unit of scheduling is one trajectory (roll-out-wise sampling): there is always a next order, whatever other groups
still wait for. An attempt that infrastructure ended is given out again with the next attempt number, and does not
affect the others.

Invariants, which `validate` checks: each group is in one stage and one queue; started = finished + running + to
be tried again + given up; the counters are the sums over the groups; no roll-out is finished twice and no group is in
a batch twice; the trajectories that have begun and are not over exceed the budget by less than one group.

For example, with N = 2 and batches of two trajectories:

    next, next             group g1 is open, and both of its roll-outs run
    failed(g1-1)           g1-1 is the next order again, as attempt 2
    finished(g1-2), next, finished(g1-1)          closing: `to_judge` gives g1
    decided(judge(g1))     waiting, if their rewards differ
    take                   training: g1 is a batch
    consumed               over; or `returned`, and it waits again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dart.core.curation.batches import ReleasedGroup
from dart.core.curation.group import Group
from dart.core.curation.judging import STALE, UNMADE, UNUSABLE, Judging, Stage, Verdict, staleness, start_budget
from dart.core.curation.orders import Attempt, Failures, Order
from dart.core.curation.planning import Plan
from dart.core.curation.sampling import TaskSampler
from dart.core.curation.schedule import Schedule, Situation, batch_over, update_due, why_wait
from dart.core.curation.waiting import WaitingLine
from dart.core.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class Rules:
    """`max_staleness`: the most versions that a token may be behind when its update begins."""

    schedule: Schedule
    max_staleness: int
    judging: Judging = field(default_factory=Judging)
    every_updates: int = 1

    @property
    def budget(self) -> int:
        size = self.schedule.trajectories_per_update
        return start_budget(self.max_staleness, size, self.schedule.rollouts, self.every_updates)


class Lifecycle:
    """All groups that are neither consumed nor dropped. `plan(task)` is asked when a group opens."""

    def __init__(
        self,
        rules: Rules,
        sampler: TaskSampler,
        plan: Callable[[Task], Plan],
        first_number: int = 1,
        failures: Failures | None = None,
    ) -> None:
        """`failures`: the run's, if its attempts are not only those of these groups."""
        self._rules, self._mode, self._budget = rules, rules.schedule, rules.budget
        self._sampler, self._plan, self._number = sampler, plan, first_number
        self._groups: dict[str, Group] = {}
        self._with_next: deque[Group] = deque()
        """Open groups with a roll-out to give out."""
        self._to_judge: deque[Group] = deque()
        """Closing groups that have not been given out for a decision."""
        self._waiting = WaitingLine()
        self._batch: list[Group] = []
        """In training."""
        self._failures = failures or Failures()
        self._open = self._closing = self._running = 0
        self._begun = 0
        """Trajectories that have begun, or that an open group still owes, and are neither consumed nor dropped."""
        self._most = self._budget + rules.schedule.rollouts - 1
        """The limit of `_begun`."""
        self._opened, self._updating, self._paused = 0, False, False

    # ---- questions ----

    @property
    def waiting_groups(self) -> int:
        return len(self._waiting)

    @property
    def waiting_trajectories(self) -> int:
        return self._waiting.trajectories

    def situation(self, environments: int) -> Situation:
        return Situation(
            opens=not self._with_next,
            open_groups=self._open + self._closing,
            running=self._running + self._closing,
            waiting=self._waiting.trajectories,
            environments=environments,
            opened=self._opened,
            updating=self._updating,
        )

    def why_wait(self, environments: int) -> str | None:
        """Why no environment may begin a roll-out; None when one may."""
        if self._paused:
            return "the run is paused"
        if self._begun >= self._budget and not self._with_next:
            return "the trainer is behind: more roll-outs would grow too old"
        return why_wait(self._mode, self.situation(environments)) if self._mode.holds_back else None

    @property
    def update_due(self) -> bool:
        """Whether `take` may be called: there is a batch, or a finished batch-wise batch that released nothing."""
        return update_due(self._mode, self.situation(0))

    # ---- roll-outs ----

    @property
    def next_group(self) -> int:
        """The number of the next group."""
        return self._number

    @property
    def submitted_tasks(self) -> int:
        """Those that still wait to be opened."""
        return self._sampler.submitted

    def submit(self, task: Task) -> None:
        self._sampler.submit(task)

    def pause(self, paused: bool) -> None:
        self._paused = paused

    def next(self, environments: int) -> tuple[Order, Group | None]:
        """The next order, and its group if the order opened it. `environments`: how many there are now."""
        self._failures.environments(environments)
        opened = None
        if not self._with_next:
            opened = self._open_group()
        group = self._with_next[0]
        if group.retry:
            order = group.retry.popleft()
        else:
            group.started += 1
            order = Order(f"{group.id}-{group.started}", group.id, group.task, group.step_limit)
        if not group.has_next:
            self._with_next.popleft()
        group.running.add(order.trajectory_id)
        self._running += 1
        return order, opened

    def finished(self, trajectory: Trajectory) -> None:
        """The trajectory is stored. Raises ValueError if it was not running."""
        self._ended(trajectory.group_id, trajectory.id)
        self._failures.finished(trajectory.task.name)
        group = self._groups[trajectory.group_id]
        group.finished.append(trajectory)
        if len(group.finished) == group.planned:
            self._close(group)

    def failed(self, order: Order, now: float, certain: bool = False) -> Attempt:
        """Infrastructure ended this attempt (`Failures.failed`). Raises ValueError if it was not running."""
        attempt = self._failures.failed(order, now, certain)
        if attempt is Attempt.NOTHING_WORKS:
            return attempt  # the run ends: nothing follows for this roll-out
        self._ended(order.group_id, order.trajectory_id)
        group = self._groups[order.group_id]
        if attempt is Attempt.AGAIN and not group.unusable:
            if not group.has_next:
                self._with_next.appendleft(group)
            group.retry.append(order.again(outage=self._failures.outage))
        else:
            self._without(group, 1)
            if len(group.finished) == group.planned:
                self._close(group)
        return attempt

    def _ended(self, group_id: str, trajectory_id: str) -> None:
        group = self._groups.get(group_id)
        if group is None or trajectory_id not in group.running:
            raise ValueError(f"roll-out {trajectory_id} of group {group_id} does not run: it cannot end")
        group.running.remove(trajectory_id)
        self._running -= 1

    def _without(self, group: Group, rollouts: int) -> None:
        """The group gives up this many roll-outs that were started."""
        group.planned -= rollouts
        group.given_up += rollouts
        self._begun -= rollouts

    def _open_group(self) -> Group:
        task = self._sampler.next()
        plan = self._plan(task)
        group = Group(f"g{self._number:06d}", task, plan.rollouts, plan.step_limit, plan.why)
        self._number += 1
        self._opened += plan.rollouts
        self._enter(group)
        self._open += 1
        self._with_next.append(group)
        return group

    def _enter(self, group: Group) -> None:
        if group.id in self._groups:
            raise ValueError(f"group {group.id} is here already")
        self._groups[group.id] = group
        self._begun += group.size

    # ---- decisions ----

    @property
    def undecided(self) -> bool:
        """Whether `to_judge` has a group."""
        return bool(self._to_judge)

    def to_judge(self) -> Group | None:
        """A closing group to decide about, each returned once; None when there is none."""
        return self._to_judge.popleft() if self._to_judge else None

    def judge(self, group: Group, stand_in: Trajectory | None = None) -> Verdict:
        """The verdict on a closing group. `stand_in`: a copy of a success, to replace a failure: of those with the
        lowest reward the one that ended last.

        The verdict takes effect with `decided`, once it is stored.
        """
        if group.unusable:
            detail = f"{UNUSABLE}: {group.unusable}"
            return Verdict(group.id, group.task, Stage.DROPPED, UNUSABLE, detail, group.members, plan=group.why)
        if not group.finished:
            return Verdict(group.id, group.task, Stage.DROPPED, UNMADE, UNMADE, plan=group.why)
        members, replaced = group.members, ""
        if stand_in is not None:
            worst = max(range(len(members)), key=lambda number: (-members[number].reward, number))
            replaced = members[worst].id
            members = (*members[:worst], *members[worst + 1 :], stand_in)
        decision = self._rules.judging.decide(members)
        stage = Stage.WAITING if decision.release else Stage.DROPPED
        return Verdict(
            group.id, group.task, stage, decision.cause, decision.detail, members, decision.advantages,
            stand_in, replaced, group.why,
        )  # fmt: skip

    def decided(self, verdict: Verdict) -> None:
        """The verdict is stored: the group waits for the trainer or is dropped. Raises ValueError if it was not
        closing.

        A group that has become unusable meanwhile is judged again.
        """
        group = self._groups.get(verdict.group_id)
        if group is None or group.stage is not Stage.CLOSING:
            raise ValueError(f"group {verdict.group_id} is not closing: nothing can be decided about it")
        if not verdict.released:
            group.stage = Stage.DROPPED
            self._closing -= 1
            self._gone(group)
        else:
            self._begun -= group.size
            group.released = ReleasedGroup(group.id, verdict.trajectories, verdict.advantages)
            self._begun += group.size
            if group.unusable:
                self._to_judge.append(group)
                return
            self._closing -= 1
            self._waiting.add(group)
        # Asynchronously, the next batch may begin when the last group of this one is decided about.
        if self._mode.sampling == "batch" and not self._mode.synchronous and batch_over(self._mode, self.situation(0)):
            self._opened = 0

    def unusable(self, group_id: str, why: str) -> None:
        """The group cannot be trained on. Accepted in any stage; only the first reason counts.

        An open group gives out no more roll-outs, and closes when those under way have ended. A group in training stays
        there until the update is `returned`. A group that is consumed, dropped or unknown is left alone.
        """
        group = self._groups.get(group_id)
        if group is None or group.unusable:
            return
        group.unusable = why
        match group.stage:
            case Stage.OPEN:
                if group.has_next:
                    self._with_next.remove(group)
                lacking = group.planned + group.given_up - group.started
                group.planned -= lacking
                self._begun -= lacking
                self._without(group, len(group.retry))
                group.retry.clear()
                if not group.running:
                    self._close(group)
            case Stage.WAITING:
                self._waiting.remove([group])
                self._judge_again(group)
            case _:
                pass  # closing: judged again, or for the first time; training: judged when it is returned

    def _close(self, group: Group) -> None:
        """Close the group: nothing is left to run."""
        self._open -= 1
        self._judge_again(group)

    def _judge_again(self, group: Group) -> None:
        """Have a group judged: one that nothing is left to run of, or that became unusable later."""
        self._closing += 1
        group.stage = Stage.CLOSING
        self._to_judge.append(group)

    def _gone(self, group: Group) -> None:
        self._begun -= group.size
        del self._groups[group.id]

    # ---- batches ----

    def stale(self, trainer_version: int) -> list[Verdict]:
        """Verdicts on waiting groups with a token past the staleness bound, which are closing from now on."""
        if stale := self._waiting.older_than(trainer_version - self._rules.max_staleness):
            self._waiting.remove(stale)
            self._closing += len(stale)
        return [self._stale_verdict(group, trainer_version) for group in stale]

    def _stale_verdict(self, group: Group, trainer_version: int) -> Verdict:
        group.stage = Stage.CLOSING
        worst = max(staleness(trainer_version, trajectory) for trajectory in group.members)
        detail = f"{STALE}: {worst} versions old, {self._rules.max_staleness} allowed"
        return Verdict(group.id, group.task, Stage.DROPPED, STALE, detail, group.members, plan=group.why)

    def take(self) -> list[ReleasedGroup]:
        """Begin an update with the oldest groups that fill a batch. Empty if nothing of a batch was released.

        Call it when `update_due`. Raises ValueError while another batch is in training.
        """
        if self._batch:
            raise ValueError(f"groups {[group.id for group in self._batch]} are in training: one batch at a time")
        batch = self._waiting.take(self._mode.trajectories_per_update)
        for group in batch:
            group.stage = Stage.TRAINING
        self._batch = batch
        if batch:
            self._updating = True
        else:
            self.update_over()
        return [group.released for group in batch if group.released]

    def consumed(self) -> None:
        """The update has trained on the batch."""
        for group in self._batch:
            group.stage = Stage.CONSUMED
            self._gone(group)
        self._batch = []

    def returned(self) -> None:
        """The update was not made: its groups wait again, except those that have become unusable."""
        for group in self._batch:
            if group.unusable:
                self._judge_again(group)
            else:
                self._waiting.add(group)
        self._batch = []
        self.update_over()

    def update_over(self) -> None:
        """Every replica serves the update's weights, or there was nothing to train on."""
        self._updating = False
        if self._mode.synchronous:
            self._opened = 0

    # ---- restarts ----

    def restore_open(
        self, group_id: str, task: Task, planned: int, finished: Sequence[Trajectory], why: str = ""
    ) -> None:
        """Restore a group that an earlier process left open: finished roll-outs count, the rest is given out again.

        `why`: the reason for the plan's numbers.
        """
        limit = self._plan(task).step_limit
        group = Group(group_id, task, planned, limit, why, started=planned, finished=list(finished))
        done = {trajectory.id for trajectory in finished}
        names = (f"{group_id}-{number}" for number in range(1, planned + 1))
        group.retry.extend(Order(name, group_id, task, group.step_limit, 2) for name in names if name not in done)
        self._enter(group)
        self._most = max(self._most, self._begun)
        self._open += 1
        if group.retry:
            self._with_next.append(group)
        else:
            self._close(group)

    def restore_released(
        self, group: ReleasedGroup, task: Task, why: str = "", unusable: str = "", losses: int = 0
    ) -> None:
        """Restore a group that waited for the trainer, or was in training when the trainer was lost.

        `unusable`: why it cannot be trained on; losses: how often the trainer was lost with it.
        """
        size, finished = len(group.trajectories), list(group.trajectories)
        restored = Group(group.id, task, size, 0, why, started=size, finished=finished, released=group, losses=losses)
        restored.unusable = unusable
        self._enter(restored)
        self._most = max(self._most, self._begun)
        if unusable:
            self._judge_again(restored)
        else:
            self._waiting.add(restored)

    # ---- invariants ----

    def validate(self) -> None:
        """Check the invariants. Raises AssertionError; for tests."""
        by_stage: dict[Stage, list[Group]] = {stage: [] for stage in Stage}
        for group in self._groups.values():
            by_stage[group.stage].append(group)
            group.validate()
        assert not by_stage[Stage.CONSUMED] and not by_stage[Stage.DROPPED], "what is over is not kept"
        _same([group for group in by_stage[Stage.OPEN] if group.has_next], self._with_next)
        _same(by_stage[Stage.WAITING], self._waiting)
        _same(by_stage[Stage.TRAINING], self._batch)
        queued = {group.id for group in self._to_judge}
        assert len(queued) == len(self._to_judge), "a group is judged twice"
        assert queued <= {group.id for group in by_stage[Stage.CLOSING]}
        assert self._open == len(by_stage[Stage.OPEN])
        assert self._closing == len(by_stage[Stage.CLOSING])
        assert self._running == sum(len(group.running) for group in self._groups.values())
        assert self._begun == sum(group.size for group in self._groups.values()) <= self._most, "over budget"
        self._waiting.validate()


def _same(groups: Sequence[Group], queue: Iterable[Group]) -> None:
    """Assert that the queue holds exactly these groups, each once."""
    assert sorted(group.id for group in groups) == sorted(group.id for group in queue)
