"""The lifecycle machine: histories of roll-outs, failures, updates and restarts; its invariants after each event."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from lifecycle_samples import ENVIRONMENTS, begin, hopeless, machine, released, stage, trajectory, verdicts

from dart.core.curation.batches import ReleasedGroup
from dart.core.curation.judging import STALE, UNMADE, UNUSABLE, Stage
from dart.core.curation.orders import (
    FAILING_SECONDS,
    LEAST_FAILURES,
    MOST_ATTEMPTS,
    OUTAGE_SECONDS,
    Attempt,
    Failures,
    Order,
)
from dart.core.curation.usable import why_unusable
from dart.core.types import Task, Trajectory, VersionSpan


def test_group_closes_when_all_have_finished_in_any_order() -> None:
    groups = machine()
    orders = begin(groups, 3)
    assert len({order.group_id for order in orders}) == 1
    assert groups.next(ENVIRONMENTS)[1] is not None, "an environment never waits for another group's roll-outs"
    groups.finished(trajectory(orders[2]))
    groups.finished(trajectory(orders[0]))
    assert not groups.undecided and stage(groups, orders[0].group_id) is Stage.OPEN
    groups.finished(trajectory(orders[1], 1.0))
    assert stage(groups, orders[0].group_id) is Stage.CLOSING
    (verdict,) = verdicts(groups, stored=False)
    assert (verdict.stage, verdict.cause, verdict.detail) == (Stage.WAITING, "released", "1 of 3 succeeded")
    assert verdict.plan == "because"
    assert groups.waiting_trajectories == 0, "nothing moves before it is stored"
    groups.decided(verdict)
    assert stage(groups, verdict.group_id) is Stage.WAITING and groups.waiting_trajectories == 3
    groups.validate()


def test_a_pooled_success_replaces_the_worst_attempt() -> None:
    groups = machine()
    first, second, third = begin(groups, 3)
    for order, reward in ((second, 0.0), (first, 0.9), (third, 0.5)):
        groups.finished(replace(trajectory(order), reward=reward))
    group = groups.to_judge()
    assert group is not None
    verdict = groups.judge(group, replace(trajectory(first, 1.0), id="copy", pooled_from="earlier"))
    assert verdict.replaced == second.trajectory_id
    assert [one.reward for one in verdict.trajectories] == [0.9, 0.5, 1.0], "the copy is the last"


def test_infrastructure_failure_gives_the_same_rollout_out_again_first() -> None:
    groups = machine(rollouts=2)
    first, second = begin(groups, 2)
    assert groups.failed(first, now=0.0) is Attempt.AGAIN
    again, opened = groups.next(ENVIRONMENTS)
    assert opened is None
    assert (again.trajectory_id, again.attempt) == (first.trajectory_id, 2)
    groups.finished(trajectory(second))
    groups.finished(trajectory(again))
    assert [(one.released, one.detail) for one in verdicts(groups)] == [(False, "all 2 failed")]
    assert groups._begun == 0


def test_a_roll_out_ends_once() -> None:
    groups = machine()
    order = begin(groups, 1)[0]
    groups.finished(trajectory(order))
    for again in (lambda: groups.finished(trajectory(order)), lambda: groups.failed(order, 1.0)):
        with pytest.raises(ValueError, match="roll-out g000001-1 of group g000001 does not run"):
            again()
    groups.validate()


def test_a_group_does_without_a_roll_out_that_cannot_be_made() -> None:
    groups = machine()
    orders = begin(groups, 2)
    groups.failed(orders[0], now=0.0)
    again = groups.next(ENVIRONMENTS)[0]
    assert again.attempt == 2
    assert groups.failed(hopeless(again), now=1.0) is Attempt.GIVEN_UP and groups._begun == 2
    third, opened = groups.next(ENVIRONMENTS)
    assert third.trajectory_id.endswith("-3") and opened is None
    groups.finished(trajectory(orders[1], 1.0))
    groups.finished(trajectory(third))
    assert [one.detail for one in verdicts(groups)] == ["1 of 2 succeeded"]


def test_a_group_of_which_nothing_can_be_made_is_dropped() -> None:
    groups = machine()
    for order in begin(groups, 3):
        groups.failed(hopeless(order), now=0.0)
    (verdict,) = verdicts(groups)
    assert (verdict.stage, verdict.cause, verdict.trajectories) == (Stage.DROPPED, UNMADE, ())
    assert groups._begun == 0


def test_a_task_that_is_wrong_itself_is_not_tried_again() -> None:
    groups = machine()
    orders = begin(groups, 3)
    assert [groups.failed(order, 0.0, certain=True) for order in orders] == [Attempt.GIVEN_UP] * 3
    (verdict,) = verdicts(groups)
    assert (verdict.stage, verdict.cause) == (Stage.DROPPED, UNMADE)


def test_a_run_of_which_every_task_is_wrong_ends() -> None:
    failures, order = Failures(), Order("t", "g", Task("s", "a", 1), 5)
    for number in range(LEAST_FAILURES - 1):
        assert failures.failed(order, float(number), certain=True) is Attempt.GIVEN_UP
    assert not failures.ever_worked
    assert failures.failed(order, FAILING_SECONDS, certain=True) is Attempt.NOTHING_WORKS
    failures.finished("a")
    assert failures.ever_worked


def test_nothing_works_after_long_enough_and_often_enough() -> None:
    failures = Failures()
    groups = machine(failures=failures)
    order = groups.next(1)[0]
    for number in range(LEAST_FAILURES - 1):
        assert groups.failed(order, now=float(number)) is Attempt.AGAIN
        order = replace(groups.next(0)[0], attempt=1)
    assert groups.failed(order, now=FAILING_SECONDS - 1) is Attempt.AGAIN, "not for long enough"
    order = groups.next(0)[0]
    assert groups.failed(order, now=FAILING_SECONDS) is Attempt.NOTHING_WORKS
    groups.finished(trajectory(order))
    assert failures.in_a_row == 0


@pytest.mark.parametrize("resumed", [False, True])
def test_an_outage_is_waited_out_in_a_run_that_has_worked(resumed: bool) -> None:
    failures = Failures()
    groups = machine(first=2, failures=failures)
    if resumed:
        failures.finished("a")
        groups.next(1)
    else:
        groups.finished(trajectory(groups.next(1)[0]))
    order = groups.next(0)[0]
    for number in range(100):
        assert groups.failed(hopeless(order), now=number * FAILING_SECONDS) is (
            Attempt.GIVEN_UP if number < LEAST_FAILURES else Attempt.AGAIN
        ), "while others may still succeed, a roll-out is given up; when none does, no roll-out is to blame"
        order = groups.next(0)[0]
    groups.finished(trajectory(groups.next(0)[0]))
    assert order.excused and not order.hopeless
    assert groups.failed(order.failed("a"), now=1e6) is Attempt.AGAIN, "nor is one that fails once more afterwards"


def failing(failures: Failures, order: Order, times: int, begins: float = 0.0) -> Order | None:
    """The order after so many failed attempts on two workers, one a second; None if it is given up."""
    for number in range(times):
        again = failures.again(order.failed(f"env-{number % 2}"), now=begins + number)
        if not isinstance(again, Order):
            assert again is Attempt.GIVEN_UP
            return None
        order = again
    return order


def test_where_every_roll_out_is_needed_an_outage_is_waited_out_for_tasks_that_have_worked() -> None:
    a, b = (Order(f"t-{name}", f"g-{name}", Task("s", name, 1), 5) for name in ("a", "b"))
    assert failing(Failures(), a, MOST_ATTEMPTS - 1) and not failing(Failures(), a, MOST_ATTEMPTS)
    failures = Failures()
    failures.finished("a")
    assert not failing(failures, a, MOST_ATTEMPTS), "so few failures in a row are no outage"
    for _ in range(LEAST_FAILURES):
        failing(failures, a, 1)
    waiting = failing(failures, a, 1000)
    assert waiting and waiting.attempt == 1001
    assert failing(failures, b, MOST_ATTEMPTS), "b has never worked, but nothing else works either"
    assert not failing(failures, b, MOST_ATTEMPTS, OUTAGE_SECONDS), "it may be broken itself, and waits no longer"
    assert failing(failures, a, MOST_ATTEMPTS, OUTAGE_SECONDS)
    failures.finished("a")
    assert failing(failures, waiting, 1), "the outage is over, and its attempts are excused"


def test_where_every_roll_out_is_needed_a_run_ends_when_nothing_has_ever_worked() -> None:
    failures = Failures()
    orders = [Order(f"t{number}", "g", Task("s", "a", 1), 5) for number in range(LEAST_FAILURES)]
    assert all(isinstance(failures.again(order, now=0.0), Order) for order in orders)
    assert failures.again(orders[0], now=FAILING_SECONDS) is Attempt.NOTHING_WORKS


# ---- batches ----


def test_each_group_is_in_one_batch_and_the_stale_are_dropped() -> None:
    groups = machine(size=6)
    old = released(groups, version=0)
    assert not groups.update_due
    names = [released(groups, version=3), released(groups, version=4)]
    (verdict,) = groups.stale(trainer_version=4)
    assert (verdict.group_id, verdict.cause) == (old, STALE)
    assert verdict.detail == "stale: 4 versions old, 1 allowed"
    assert groups.stale(4) == [], "each is told once"
    groups.decided(verdict)
    assert groups.update_due and [group.id for group in groups.take()] == names
    assert not groups.update_due and groups.waiting_trajectories == 0 and groups._begun == 6
    with pytest.raises(ValueError, match="are in training: one batch at a time"):
        groups.take()
    groups.consumed()
    assert groups._begun == 0 and stage(groups, names[0]) is None
    groups.validate()


def test_a_group_of_long_episodes_does_not_wait_behind_fresher_ones() -> None:
    groups = machine(size=6)
    fresher, fresh, slow = (released(groups, version=version) for version in (4, 3, 2))
    assert [group.id for group in groups.take()] == [slow, fresh]
    groups.consumed()
    groups.validate()
    assert stage(groups, fresher) is Stage.WAITING


def test_what_the_trainer_refuses_is_dropped_and_the_others_are_next() -> None:
    groups = machine(size=6)
    names = [released(groups) for _ in range(3)]
    assert [group.id for group in groups.take()] == names[:2]
    groups.unusable(names[0], "sample g000001-1/0 has a token beyond the vocabulary")
    assert stage(groups, names[0]) is Stage.TRAINING, "until the update is returned"
    groups.returned()
    (verdict,) = verdicts(groups)
    assert verdict.cause == UNUSABLE and len(verdict.trajectories) == 3
    assert verdict.detail == "cannot be trained on: sample g000001-1/0 has a token beyond the vocabulary"
    assert [group.id for group in groups.take()] == names[1:]


@pytest.mark.parametrize("where", ["open", "running", "closing", "deciding", "waiting", "training"])
def test_unusable_ends_a_group_once_wherever_it_is(where: str) -> None:
    groups = machine()
    orders = begin(groups, 2 if where in ("open", "running") else 3)
    name = orders[0].group_id
    for order in orders[1:]:
        groups.finished(trajectory(order, float(order is orders[1])))
    if where != "running":
        groups.finished(trajectory(orders[0]))
    verdict = None
    if where in ("deciding", "waiting", "training"):
        group = groups.to_judge()
        assert group is not None
        verdict = groups.judge(group)
    if verdict and where != "deciding":
        groups.decided(verdict)
    if where == "training":
        groups.take()
    groups.unusable(name, "its screenshot is gone")
    groups.unusable(name, "another reason")
    groups.validate()
    if where == "running":
        assert not groups.undecided, "a roll-out is still under way"
        groups.finished(trajectory(orders[0]))
    if verdict and where == "deciding":
        groups.decided(verdict)
    if where == "training":
        groups.returned()
    assert [(one.stage, one.detail) for one in verdicts(groups)] == [
        (Stage.DROPPED, "cannot be trained on: its screenshot is gone")
    ]
    assert groups._begun == 0 and stage(groups, name) is None
    groups.unusable(name, "it is gone")
    assert not groups.undecided and groups.waiting_trajectories == 0


def test_an_unusable_group_makes_no_failed_attempt_again() -> None:
    groups = machine()
    first, second = begin(groups, 2)
    groups.unusable(first.group_id, "its screenshot is gone")
    assert groups.failed(first, now=0.0) is Attempt.AGAIN
    groups.validate()
    assert groups.next(ENVIRONMENTS)[0].group_id != first.group_id
    groups.finished(trajectory(second, 1.0))
    assert [(one.cause, len(one.trajectories)) for one in verdicts(groups)] == [(UNUSABLE, 1)]


def test_a_synchronous_update_begins_when_sampling_has_come_to_rest() -> None:
    groups = machine(rollouts=3, size=3, synchronous=True)
    orders = begin(groups, 5)
    for order in orders[:3]:
        groups.finished(trajectory(order, float(order is orders[0])))
    assert not groups.update_due, "the first group is not decided about"
    verdicts(groups)
    assert groups.waiting_trajectories == 3 and not groups.update_due, "two roll-outs of the second still run"
    assert groups.why_wait(ENVIRONMENTS) == "an update waits for what is under way"
    for order in orders[3:]:
        groups.finished(trajectory(order))
    assert groups.update_due, "the third has not begun"
    groups.take()
    groups.consumed()
    assert groups.why_wait(ENVIRONMENTS) == "the update and its weights are waited for"
    groups.update_over()
    assert groups.why_wait(ENVIRONMENTS) is None


def test_the_budget_holds_new_groups_back() -> None:
    groups = machine(rollouts=3, size=6)  # one batch and one group: 9
    begin(groups, 9)
    assert groups.why_wait(ENVIRONMENTS) == "the trainer is behind: more roll-outs would grow too old"
    groups.unusable("g000001", "a reason")
    assert groups.why_wait(ENVIRONMENTS) is not None, "its roll-outs still run"
    groups.pause(True)
    assert groups.why_wait(ENVIRONMENTS) == "the run is paused"


# ---- restarts ----


def test_a_restart_gives_out_what_an_open_group_lacks() -> None:
    task = Task("s", "a", 4)
    groups = machine(first=8)
    done = trajectory(Order("g000007-2", "g000007", task, 5), 1.0)
    groups.restore_open("g000007", task, 3, [done], "as planned before")
    groups.validate()
    orders = begin(groups, 3)
    assert [(one.trajectory_id, one.attempt) for one in orders[:2]] == [("g000007-1", 2), ("g000007-3", 2)]
    assert orders[2].group_id == "g000008"
    for order in orders[:2]:
        groups.finished(trajectory(order))
    (verdict,) = verdicts(groups)
    assert (verdict.detail, verdict.plan) == ("1 of 3 succeeded", "as planned before")


def test_a_restart_drops_poison_and_keeps_the_rest() -> None:
    task = Task("s", "a", 4)
    groups = machine(first=8)
    good = trajectory(Order("g000001-1", "g000001", task, 5))
    groups.restore_released(ReleasedGroup.evenly("g000001", (good,), (1.0,)), task)
    empty = replace(good, group_id="g000002", steps=())
    why = why_unusable(empty)
    assert why == "it has no steps"
    groups.restore_released(ReleasedGroup.evenly("g000002", (empty,), (1.0,)), task, unusable=why)
    groups.restore_open("g000003", task, 3, [replace(good, id="g000003-1", group_id="g000003", reward=math.inf)])
    groups.unusable("g000003", "its reward is inf")
    groups.validate()
    assert [(one.group_id, one.cause) for one in verdicts(groups)] == [("g000002", UNUSABLE), ("g000003", UNUSABLE)]
    assert groups.waiting_trajectories == groups._begun == 1


# ---- what can be trained on ----

GOOD = trajectory(Order("g1-1", "g1", Task("s", "a"), 5))


def poisoned(**changes: object) -> Trajectory:
    generation = replace(GOOD.steps[1].generation, **changes)  # type: ignore[arg-type]
    return replace(GOOD, steps=(GOOD.steps[0], replace(GOOD.steps[1], generation=generation)))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (replace(GOOD, reward=math.nan), "its reward is nan: it must be a finite number"),
        (replace(GOOD, reward=math.inf), "its reward is inf"),
        (replace(GOOD, reward=1e308), "its reward is 1e.308: it must be a finite number of at most 1e.06"),
        (replace(GOOD, steps=()), "it has no steps"),
        (poisoned(token_ids=()), "step 1 has no sampled tokens"),
        (poisoned(prompt_token_ids=()), "step 1 has no prompt tokens"),
        (poisoned(token_ids=(3, 100, 5)), "step 1 has token 100: the vocabulary ends at 99"),
        (poisoned(logprobs=(-0.5,)), "step 1 has 1 log-probabilities for 3 tokens"),
        (poisoned(logprobs=()), "step 1 has 0 log-probabilities for 3 tokens"),
        (poisoned(logprobs=(-0.5, math.nan, -0.5)), "step 1 has a log-probability that is not finite"),
        (poisoned(logprobs=(math.inf, -math.inf, -0.5)), "step 1 has a log-probability that is not finite"),
        (poisoned(versions=()), "step 1 has weight versions for 0 of 3 tokens"),
        (poisoned(versions=(VersionSpan(0, 0, 2),)), "step 1 has weight versions for 2 of 3 tokens"),
        (poisoned(versions=(VersionSpan(0, 0, 1), VersionSpan(1, 2, 3))), r"for tokens \[2, 3\) after token 1"),
        (poisoned(versions=(VersionSpan(0, 0, 2), VersionSpan(0, 1, 3))), r"for tokens \[1, 3\) after token 2"),
        (poisoned(versions=(VersionSpan(0, 0, 0), VersionSpan(0, 0, 3))), r"for tokens \[0, 0\) after token 0"),
        (poisoned(versions=(VersionSpan(2**64 - 1, 0, 3),)), "step 1 has version 18446744073709551615"),
        (poisoned(versions=(VersionSpan(0, 0, 4),)), "step 1 has weight versions for 4 of 3 tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_said(bad: Trajectory, why: str) -> None:
    told = why_unusable(bad, vocabulary=100)
    assert told is not None and re.search(why, told)


def test_what_can_be_trained_on() -> None:
    assert why_unusable(GOOD, 100) is None and why_unusable(poisoned(token_ids=(3, 100, 5))) is None
    unscored = tuple(replace(step, generation=replace(step.generation, logprobs=())) for step in GOOD.steps)
    assert why_unusable(replace(GOOD, steps=unscored, pooled_from="g0-1")) is None, "the trainer scores it again"


# ---- all of it, in any order ----
