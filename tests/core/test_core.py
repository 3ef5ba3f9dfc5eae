"""Pure decisions: groups, curation, feed, routing, sync plan, usage."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart.core.curation.advantage import group_advantages
from dart.core.curation.batches import ReleasedGroup, balance, samples_of
from dart.core.curation.judging import Decision, judge, start_budget
from dart.core.curation.orders import Order
from dart.core.curation.sampling import TaskSampler
from dart.core.routing import Replica, Router
from dart.core.sync_plan import SyncPlan
from dart.core.types import Generation, Image, Step, Task, Termination, Trajectory, VersionSpan
from dart.core.usage import EnvState, Ledger

IMAGE = Image.of(b"x", "image/png", 2, 2)


def step(index: int = 0, version: int = 0, tokens: int = 3) -> Step:
    ids = tuple(range(tokens))
    return Step(
        index, (IMAGE,), Generation((1, 2), ids, (-0.5,) * tokens, (VersionSpan(version, 0, tokens),), "t"), None
    )


def trajectory(order: Order | None = None, reward: float = 0.0, version: int = 0, steps: int = 2) -> Trajectory:
    order = order or Order("g000001-1", "g000001", Task("s", "n", 1), 5)
    made = tuple(step(index, version) for index in range(steps))
    return Trajectory(order.trajectory_id, order.group_id, order.task, "do", made, Termination.ENVIRONMENT,
                      reward, reward >= 1.0, order.step_limit, 0.0, 1.0)  # fmt: skip


def test_advantages_by_hand() -> None:
    # mean 0.5, population std 0.5
    assert group_advantages([1, 0], [3, 1]) == [1.0, -1.0]
    # over steps: 1, 1, 1, 0 → mean 0.75, std sqrt(3)/4
    by_step = group_advantages([1, 0], [3, 1], level="step")
    assert by_step == pytest.approx([0.25 / (3**0.5 / 4), -0.75 / (3**0.5 / 4)])
    assert group_advantages([1, 0], [3, 1], std_normalise=False) == [0.5, -0.5]
    assert group_advantages([0.3, 0.3], [1, 1]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="2 rewards and 1 lengths"):
        group_advantages([1, 0], [3])


def test_every_task_comes_once_a_round_and_submitted_ones_first() -> None:
    sampler = TaskSampler("s", ["a", "b", "c"], (0, 100), random.Random(0))
    assert {sampler.next().name for _ in range(3)} == {"a", "b", "c"}
    sampler.submit(Task("s", "z", 7))
    assert sampler.next() == Task("s", "z", 7)


def test_judge_names_why() -> None:
    def decide(*rewards: float) -> str:
        return judge([trajectory(reward=r) for r in rewards], level="trajectory", std_normalise=True).detail

    assert decide(1, 1) == "all 2 succeeded"
    assert decide(0, 0, 0) == "all 3 failed"
    assert decide(0.5, 0.5) == "all 2 had reward 0.5"
    assert decide(1, 0) == "1 of 2 succeeded"
    assert judge([trajectory(reward=1), trajectory()], level="trajectory", std_normalise=True).release


def group(name: str, version: int, n: int = 2) -> ReleasedGroup:
    return ReleasedGroup(name, tuple(trajectory(version=version) for _ in range(n)), (1.0, -1.0)[:n])


def test_shaping_moves_advantages_but_drops_nothing() -> None:
    long, short = trajectory(reward=1.0, steps=3), trajectory(reward=1.0, steps=1)
    lost = trajectory(reward=0.0, steps=1)

    def shaped(*group: Trajectory) -> Decision:
        return judge(group, level="trajectory", std_normalise=False, shaping=lambda t: -0.5 * (len(t.steps) > 2))

    assert shaped(long, short).cause == "all succeeded"
    # rewards 0.5, 1, 0: mean 0.5
    assert shaped(long, short, lost).advantages == (0.0, 0.5, -0.5)


def test_balance_leaves_no_sample_out() -> None:
    samples = samples_of([group("a", 0), group("b", 0)])
    assert len(samples) == 8, "every step of every trajectory"
    shares = balance(samples, 3)
    assert sorted(id(s) for share in shares for s in share) == sorted(map(id, samples))
    tokens = [sum(s.tokens for s in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(s.tokens for s in samples)


def test_budget_always_lets_a_batch_fill() -> None:
    assert start_budget(0, 64, 8) == 72
    assert start_budget(2, 64, 8) == 136


def test_router_capacity_then_affinity_then_version() -> None:
    def made(busy: int = 0) -> Router:
        router = Router()
        router.join(Replica("a", 4, 1, busy=busy))
        router.join(Replica("b", 4, 2))
        return router

    def chosen(router: Router, affinity: str | None = None) -> str | None:
        replica = router.take(affinity)
        return replica.id if replica else None

    assert chosen(made()) == "b"
    assert chosen(made(busy=2), "a") == "a"
    assert chosen(made(busy=3), "a") == "b"
    assert chosen(made(busy=4), "a") == "b"
    router = made(busy=3)
    router.set_serving(router.replicas["b"], False)
    assert [chosen(router), chosen(router, "a")] == ["a", None]


ROUTED = st.lists(st.tuples(st.sampled_from(["take", "back", "serve", "stop", "version", "leave", "join"]),
                            st.integers(0, 3)), max_size=120)  # fmt: skip


@given(ROUTED)
def test_the_router_chooses_as_a_pass_over_all_replicas_would(events: list[tuple[str, int]]) -> None:
    router = Router()
    taken: list[Replica] = []
    version = 0
    for event, number in events:
        name = "abcd"[number]
        replica = router.replicas.get(name)
        match event:
            case "join":
                router.join(Replica(name, 3, version))
            case "leave":
                router.leave(name)
            case "take":
                with_room = [r for r in router.replicas.values() if r.serving and r.busy < r.slots]
                least = min(((r.busy, -r.version) for r in with_room), default=None)
                before = {r.id: (r.busy, -r.version) for r in with_room}
                picked = router.take()
                assert (picked is None) == (least is None)
                if picked:
                    assert before[picked.id] == least
                    taken.append(picked)
            case "back" if taken:
                router.give_back(taken.pop())
            case "serve" | "stop" if replica:
                router.set_serving(replica, event == "serve")
            case "version" if replica:
                version += 1
                router.set_version(replica, version)
        assert router.free == sum(r.slots - r.busy for r in router.replicas.values() if r.serving)
        assert len(router._line) <= 64 + 4 * 4


def test_sync_rolls_one_at_a_time_and_skips_to_the_newest() -> None:
    plan = SyncPlan(max_unavailable=1)
    plan.joined("a", 0)
    plan.joined("b", 0)
    assert plan.next() is None
    plan.published(1)
    assert plan.next() == ("a", 1)
    assert plan.next() is None, "never both at once"
    plan.published(2)
    plan.updated("a", 1)
    assert plan.next() == ("b", 2), "the oldest first, straight to the newest"
    plan.failed("b")
    assert plan.next() == ("a", 2), "one that fails holds nobody else up"
    plan.updated("a", 2)
    assert plan.next() == ("b", 2)
    plan.failed("b")
    plan.published(3)
    assert [plan.next(), plan.failed("b") or plan.updated("a", 3), plan.next()] == [("a", 3), None, ("b", 3)]
    plan.left("b")
    assert plan.settled
    with pytest.raises(ValueError, match="versions only grow"):
        plan.published(2)


@given(st.lists(st.sampled_from(["publish", "next", "done", "fail", "leave", "join"]), max_size=100), st.integers(1, 3))
def test_sync_never_exceeds_max_unavailable_and_settles(events: list[str], most: int) -> None:
    plan = SyncPlan(most)
    running: dict[str, int] = {}
    for name in "abcd":
        plan.joined(name, 0)
    for event in events:
        match event:
            case "publish":
                plan.published(plan.version + 1)
            case "next":
                if chosen := plan.next():
                    assert chosen[0] not in running
                    running[chosen[0]] = chosen[1]
                assert len(running) <= most
            case "done" if running:
                plan.updated(*running.popitem())
            case "fail" if running:
                plan.failed(running.popitem()[0])
            case "leave" if running:
                plan.left(running.popitem()[0])
            case "join":
                plan.joined("e", 0)
                running.pop("e", None)
    for name, version in running.items():
        plan.updated(name, version)
    while chosen := plan.next():
        plan.updated(*chosen)
    assert plan.settled


def test_the_ledger_books_every_slot_second_once() -> None:
    idle, acting, queued, lost = EnvState.IDLE, EnvState.ACTING, EnvState.QUEUED, EnvState.LOST
    ledger = Ledger({acting, queued}, 100.0)
    assert ledger.utilisation(101.0) == 0.0
    ledger.joined("a", idle, 2, 101.0)
    ledger.joined("b", idle, 1, 102.0)
    ledger.blame(idle, "nothing to do", 102.0)
    ledger.move("a", idle, acting, 103.0)
    ledger.blame(idle, "paused", 104.0)
    ledger.move("a", acting, queued, 105.0)
    ledger.move("b", idle, acting, 105.0)
    assert ledger.counts("a") == {idle: 1, queued: 1}
    assert ledger.seconds(106.0) == pytest.approx({idle: 2 + 5 + 3, acting: 2 + 1, queued: 1})
    assert ledger.utilisation(106.0) == pytest.approx(4 / 14)
    assert ledger.causes(idle, 106.0) == pytest.approx({"nothing to do": 3 + 2, "paused": 2 + 1})
    ledger.lost("b", lost, 106.0, for_good=False)
    ledger.lost("a", lost, 107.0, for_good=True)
    ledger.move("a", idle, acting, 107.0)
    assert ledger.counts() == {lost: 1}
    assert sum(ledger.seconds(110.0).values()) == pytest.approx(2 * 6 + 8)
    assert ledger.seconds(110.0, "b") == pytest.approx({idle: 3, acting: 1, lost: 4})
    ledger.restart(110.0)
    assert {state: spent for state, spent in ledger.seconds(112.0).items() if spent} == {lost: 2}
    assert ledger.causes(idle, 112.0) == {}
