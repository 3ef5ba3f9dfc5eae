"""Adaptive curation's pure decisions: roll-out number, trajectory length, task sampling, experience pool."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dart.core.curation.lifecycle import Lifecycle, Rules
from dart.core.curation.orders import Order
from dart.core.curation.planning import LengthRule, NumberRule, Planner, Result, rollout_number, spread, step_limit
from dart.core.curation.pool import Entry, ExperiencePool, pooled_copy
from dart.core.curation.sampling import TaskSampler
from dart.core.curation.schedule import Schedule
from dart.core.types import Generation, Image, Step, Task, Termination, Trajectory, VersionSpan

PAPER = NumberRule(maximum=8, minimum=2, threshold=0.6, window=16)
LENGTH = LengthRule(cap=30, floor=4, margin=2, window=None)
IMAGE = Image.of(b"x", "image/png", 2, 2)


def trajectory(name: str = "t", *, success: bool = True, steps: int = 1, id: str = "a", version: int = 0) -> Trajectory:
    generation = Generation((1, 2), (3, 4), (-0.5, -0.1), (VersionSpan(version, 0, 2),), "t")
    made = tuple(Step(index, (IMAGE,), generation, None) for index in range(steps))
    return Trajectory(id, "g", Task("s", name, 1), "do", made, Termination.ENVIRONMENT, float(success), success,
                      30, 0.0, 1.0)  # fmt: skip


# ---- dynamic roll-out number ----


@pytest.mark.parametrize(("wins", "of", "n"), [(0, 10, 8), (6, 10, 8), (7, 10, 5), (8, 10, 4), (9, 10, 3), (10, 10, 2)])
def test_the_papers_roll_out_numbers(wins: int, of: int, n: int) -> None:
    # ⌊9/sr − 7⌋: 9/0.7 − 7 = 5.86, 9/0.8 − 7 = 4.25, 9/0.9 − 7 = 3, 9/1 − 7 = 2
    assert rollout_number(wins, of, PAPER) == n


@settings(max_examples=2000, deadline=None)
@given(st.integers(1, 64), st.data())
def test_the_general_form_is_the_released_formula(results: int, data: st.DataObject) -> None:
    wins = data.draw(st.integers(1, results))
    n = rollout_number(wins, results, PAPER)
    if results < 8 or 10 * wins <= 6 * results:
        assert n == 8
    else:
        assert n == max(2, (9 * results) // wins - 7)


@settings(max_examples=2000, deadline=None)
@given(st.integers(1, 16), st.floats(0, 1), st.integers(0, 64), st.data())
def test_n_stays_within_bounds_and_falls_as_success_rises(
    minimum: int, threshold: float, results: int, data: st.DataObject
) -> None:
    rule = NumberRule(data.draw(st.integers(minimum, 16)), minimum, threshold, 64)
    numbers = [rollout_number(wins, results, rule) for wins in range(results + 1)]
    assert all(rule.minimum <= n <= rule.maximum for n in numbers)
    assert numbers == sorted(numbers, reverse=True)


def test_too_few_results_or_switched_off_decide_nothing() -> None:
    assert rollout_number(7, 7, PAPER) == 8
    assert rollout_number(16, 16, replace(PAPER, enabled=False)) == 8


# ---- dynamic length ----


def test_step_limits_by_hand() -> None:
    assert step_limit(None, LENGTH) == 30
    assert step_limit(1, LENGTH) == 4  # floor
    assert step_limit(7, LENGTH) == 9
    assert step_limit(29, LENGTH) == 30  # cap
    assert step_limit(7, replace(LENGTH, enabled=False)) == 30


def test_the_window_forgets_long_successes() -> None:
    planner = Planner(PAPER, replace(LENGTH, window=2, floor=1, margin=0))
    for steps in (9, 3, 5):
        planner.record(trajectory(steps=steps))
    assert planner.plan("t").step_limit == 5
    for steps in (2, 2):
        planner.record(trajectory(steps=steps))
    assert planner.plan("t").step_limit == 2


# ---- the planner ----


def test_changes_are_told_with_their_reasons() -> None:
    planner = Planner(PAPER, LENGTH)
    assert planner.plan("t").changes == ()
    for number in range(16):
        planner.record(trajectory(success=number >= 4, steps=7))
    plan = planner.plan("t")
    assert plan.changes == (
        "N 8→5: success 0.75 over the last 16",
        "step limit 30→9: the longest success took 7 steps",
    )
    assert plan.why == "N 5: success 0.75 over the last 16; step limit 9: the longest success took 7 steps"
    assert planner.plan("t").changes == ()
    assert planner.plan("other") .changes == () and planner.plan("other").rollouts == 8  # fmt: skip


def test_failures_never_shorten_and_tasks_do_not_mix() -> None:
    planner = Planner(PAPER, LENGTH)
    planner.record(trajectory("a", success=True, steps=3))
    planner.record(trajectory("b", success=False, steps=20))
    assert (planner.plan("a").step_limit, planner.plan("b").step_limit) == (5, 30)


def test_a_task_s_own_limit_caps_the_dynamic_one() -> None:
    planner = Planner(PAPER, LENGTH, {"short": 6, "long": 99})
    assert [planner.plan(name).step_limit for name in ("short", "long", "other")] == [6, 30, 30]
    for name in ("short", "long"):
        planner.record(trajectory(name, success=True, steps=5))
    assert [planner.plan(name).step_limit for name in ("short", "long")] == [6, 7]


OUTCOMES = st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(1, 30)), max_size=80)


@settings(max_examples=2000, deadline=None)
@given(OUTCOMES, st.sampled_from([None, 1, 5, 100]))
def test_plans_keep_their_bounds_and_a_restart_changes_nothing(
    outcomes: list[tuple[str, bool, int]], window: int | None
) -> None:
    length = replace(LENGTH, window=window)
    planner, lengths, results = Planner(PAPER, length), {"a": [], "b": []}, {"a": [], "b": []}  # type: ignore[var-annotated]
    for name, success, steps in outcomes:
        planner.record(trajectory(name, success=success, steps=steps))
        results[name].append(Result(success, float(success)))
        if success:
            lengths[name].append(steps)
        plan = planner.plan(name)
        remembered = lengths[name][-window:] if window else lengths[name]
        assert 2 <= plan.rollouts <= 8
        assert plan.step_limit <= 30
        assert not remembered or plan.step_limit >= min(30, max(remembered))
        assert 0 <= planner.informative(name) <= 1
    restarted = Planner(PAPER, length)
    kept = max(PAPER.window, window or 1)
    for name in "ab":
        restarted.restore(name, results[name][-kept:], lengths[name][-kept:], max(lengths[name], default=None))
        assert restarted.plan(name).why == planner.plan(name).why
        assert restarted.histories[name] == planner.histories[name]


def test_how_much_there_is_to_learn_goes_by_the_rewards() -> None:
    assert spread([1.0, 0.0, 0.0, 0.0]) == pytest.approx(4 * 0.25 * 0.75)
    assert spread([0.3] * 8) == spread([1.0]) == 0
    assert spread([0.0, 1e308, 1e308, -5.0]) == 1, "of a world that keeps to no bounds"
    planner = Planner(PAPER, LENGTH)
    for number in range(8):  # none of them a success, and every group trains
        planner.record(replace(trajectory(success=False), reward=0.2 + 0.6 * (number % 2)))
    assert planner.informative("t") == pytest.approx(0.36)
    assert planner.plan("t").rollouts == 8


# ---- task sampling ----


def test_equal_weights_make_shuffled_rounds() -> None:
    sampler = TaskSampler("s", "abcdef", (0, 100), random.Random(0))
    rounds = ["".join(sampler.next().name for _ in range(6)) for _ in range(20)]
    assert all(sorted(one) == list("abcdef") for one in rounds)
    assert len(set(rounds)) > 10


@settings(max_examples=2000, deadline=None)
@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=12), st.integers(0, 1000))
def test_every_task_is_covered_in_proportion_to_its_weight(weights: list[float], seed: int) -> None:
    names = [str(number) for number in range(len(weights))]
    weight = dict(zip(names, weights, strict=True))
    sampler = TaskSampler("s", names, (0, 9), random.Random(seed), weight.__getitem__)
    visits = [sampler.next().name for _ in range(600)]
    counts = Counter(visits)
    for name in names:
        expected = 600 * weight[name] / sum(weights)
        assert abs(counts[name] - expected) <= len(names) + 1
        at = [place for place, visit in enumerate(visits) if visit == name]
        for first, second in itertools.pairwise(at):
            between = Counter(visits[first + 1 : second])
            assert all(count <= 1 / weight[name] + 1 for count in between.values())


# ---- the pool ----


def entry(id: str, seed: int = 0, update: int = 0, name: str = "t") -> Entry:
    return Entry(id, Task("s", name, seed), update)


def test_pool_takes_the_same_seed_then_the_least_used_then_the_newest() -> None:
    pool = ExperiencePool(per_task=3, max_age=None)
    for number in range(4):
        pool.add(entry(f"e{number}", seed=number))
    assert len(pool) == 3 and pool.has("t") and not pool.has("u")

    def take(seed: int) -> str:
        taken = pool.take(Task("s", "t", seed), 0)
        assert taken is not None
        return taken.trajectory_id

    assert take(1) == "e1"
    assert [take(9) for _ in range(4)] == ["e3", "e2", "e3", "e2"]  # e0 made room; e1 has been used
    assert pool.take(Task("s", "u", 1), 0) is None


def test_pool_forgets_what_is_too_old() -> None:
    pool = ExperiencePool(per_task=3, max_age=10)
    pool.add(entry("old", update=0))
    pool.add(entry("new", update=5))
    assert pool.take(Task("s", "t", 7), 10) is not None
    taken = pool.take(Task("s", "t", 7), 12)
    assert taken is not None and taken.trajectory_id == "new" and len(pool) == 1
    assert pool.take(Task("s", "t", 7), 16) is None and not pool.has("t")


@pytest.mark.parametrize(
    ("made_at", "oldest", "now", "fresh"),
    [(3, 3, 3, True), (4, 3, 5, True), (2, 3, 4, False), (5, 3, 4, False)],
    ids=["as-old", "newer", "older-than-the-group", "from-lost-versions"],
)
def test_a_pooled_copy_never_makes_its_group_older(made_at: int, oldest: int, now: int, fresh: bool) -> None:
    success = trajectory(steps=2, version=made_at, id="won")
    copy = pooled_copy(success, "g7", now, oldest)
    assert (copy.id, copy.group_id, copy.pooled_from) == ("g7-pooled", "g7", "won")
    assert copy.success and copy.task == success.task
    for step, original in zip(copy.steps, success.steps, strict=True):
        assert step.generation.token_ids == original.generation.token_ids
        assert step.generation.logprobs == (original.generation.logprobs if fresh else ())
    assert copy.oldest_version == (made_at if fresh else now) >= oldest


# ---- all of it together ----


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 15), st.sampled_from(["win", "lose", "die"]), st.integers(1, 12)), max_size=250)
)
def test_random_runs_keep_the_invariants(events: list[tuple[int, str, int]]) -> None:
    """Workers finish, fail and die in any order; curation runs as the data manager wires it."""
    planner, pool = Planner(PAPER, replace(LENGTH, cap=12)), ExperiencePool(4, None)
    groups = Lifecycle(
        Rules(Schedule("rollout", synchronous=False, rollouts=8, trajectories_per_update=1000), max_staleness=4),
        TaskSampler("s", ["a", "b", "c"], (0, 5), random.Random(1)),
        lambda task: planner.plan(task.name),
    )
    running: deque[Order] = deque()
    finished: set[str] = set()
    decided: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    replaced: set[str] = set()
    running.extend(groups.next(16)[0] for _ in range(16))
    for which, what, steps in events:
        order = running[which % len(running)]
        running.remove(order)
        if what == "die":
            groups.failed(replace(order, attempt=1), now=0.0)
        else:
            one = replace(
                trajectory(order.task.name, success=what == "win", steps=min(steps, order.step_limit)),
                id=order.trajectory_id, group_id=order.group_id, task=order.task,
            )  # fmt: skip
            assert one.id not in finished
            finished.add(one.id)
            planner.record(one)
            if one.success:
                pool.add(Entry(one.id, one.task, 0))
            groups.finished(one)
            if group := groups.to_judge():
                assert 2 <= len(group.finished) == group.planned <= 8
                spare = pool.take(group.task, 0) if group.wants_success else None
                stand_in = None
                if spare is not None:
                    assert spare.task.name == group.task.name
                    success = replace(one, id=spare.trajectory_id, success=True, reward=1.0)
                    stand_in = pooled_copy(success, group.id, 0, 0)
                    replaced.add(group.finished[-1].id)
                verdict = groups.judge(group, stand_in)
                assert verdict.released or stand_in is None
                assert [bool(one.pooled_from) for one in verdict.trajectories].count(True) == (stand_in is not None)
                groups.decided(verdict)
                decided[verdict.released].update(one.id for one in verdict.trajectories if not one.pooled_from)
        running.append(groups.next(16)[0])
    groups.validate()
    assert groups.waiting_trajectories == sum(decided[True].values()) + len(replaced)
    assert max([*decided[True].values(), *decided[False].values()], default=1) == 1
    assert not set(decided[True]) & set(decided[False])
    assert set(decided[True]) | set(decided[False]) | replaced <= finished
    assert sum(len(history.results) for history in planner.histories.values()) <= len(finished)


def test_a_task_with_one_instance_is_always_that_one() -> None:
    sampler = TaskSampler("s", ["a", "b"], (5, 100), random.Random(0), single=["b"])
    drawn = [sampler.next() for _ in range(40)]
    assert {task.seed for task in drawn if task.name == "b"} == {0}
    assert len({task.seed for task in drawn if task.name == "a"}) > 10
