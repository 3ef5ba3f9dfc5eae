"""Pure decisions: groups, curation, feed, usage."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dart.core.curation.advantage import group_advantages
from dart.core.curation.judging import Judging, start_budget
from dart.core.curation.orders import Order
from dart.core.curation.sampling import TaskSampler
from dart.core.types import Generation, Image, Step, Task, Termination, Trajectory, VersionSpan
from dart.core.usage import MOST_ABSENT, EnvState, Ledger

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
    assert group_advantages([1, 0], [3, 1], level="trajectory") == [1.0, -1.0]
    # over steps: 1, 1, 1, 0 → mean 0.75, std sqrt(3)/4
    by_step = group_advantages([1, 0], [3, 1])
    assert by_step == pytest.approx([0.25 / (3**0.5 / 4), -0.75 / (3**0.5 / 4)])
    assert group_advantages([1, 0], [3, 1], level="trajectory", std_normalise=False) == [0.5, -0.5]
    assert group_advantages([0.3, 0.3], [1, 1]) == [0.0, 0.0]
    assert group_advantages([0.1, 0.1, 0.1], [1, 1, 1]) == [0.0, 0.0, 0.0], "their mean differs from 0.1 by rounding"
    assert group_advantages([0.3, 0.1 + 0.2], [2, 1]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="2 rewards and 1 lengths"):
        group_advantages([1, 0], [3])


def test_every_task_comes_once_a_round_and_submitted_ones_first() -> None:
    sampler = TaskSampler("s", ["a", "b", "c"], (0, 100), random.Random(0))
    assert {sampler.next().name for _ in range(3)} == {"a", "b", "c"}
    sampler.submit(Task("s", "z", 7))
    assert sampler.next() == Task("s", "z", 7)


def test_judge_names_why() -> None:
    def decide(*rewards: float) -> str:
        return Judging().decide([trajectory(reward=r) for r in rewards]).detail

    assert decide(1, 1) == "all 2 succeeded"
    assert decide(0, 0, 0) == "all 3 failed"
    assert decide(0.5, 0.5) == "all 2 had reward 0.5"
    assert decide(1, 0) == "1 of 2 succeeded"
    assert Judging().decide([trajectory(reward=1), trajectory()]).release


def test_shaping_moves_advantages_but_drops_nothing() -> None:
    long, short = (replace(trajectory(reward=1.0), steps=(step(tokens=n), step(1))) for n in (9, 5))
    lost = trajectory()
    # Responses of 8 tokens or more lose 0.5, those of up to 6 nothing.
    judging = Judging(level="trajectory", std_normalise=False, overlong_penalty=0.5, overlong_buffer=2, max_tokens=8)
    assert judging.decide([long, short]).cause == "all succeeded"
    # rewards 0.5, 1, 0: mean 0.5
    assert judging.decide([long, short, lost]).advantages == ((0.0, 0.0), (0.5, 0.5), (-0.5, -0.5))


def test_budget_always_lets_a_batch_fill() -> None:
    assert start_budget(0, 64, 8) == 72
    assert start_budget(2, 64, 8) == 136
    assert start_budget(16, 16, 8, every_updates=8) == 9 * 16 + 8, "the first are seven versions old when they begin"
    assert start_budget(7, 16, 8, every_updates=8) == 24


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


def test_lost_workers_whose_names_never_return_are_counted_up_to_a_number() -> None:
    """A supervisor starts a worker again under another name, for a week."""
    ledger = Ledger({EnvState.ACTING}, 0.0)
    for number in range(MOST_ABSENT + 50):
        ledger.joined(f"env-{number}", EnvState.IDLE, 2, float(number))
        ledger.lost(f"env-{number}", EnvState.LOST, number + 0.5, for_good=False)
    assert ledger.counts() == {EnvState.LOST: 2 * MOST_ABSENT}
    assert not ledger.counts("env-49") and ledger.counts("env-50") == {EnvState.LOST: 2}
    ledger.left("env-50", 200.0)
    ledger.joined("env-50", EnvState.IDLE, 2, 200.0)
    for number in range(MOST_ABSENT):
        ledger.joined(f"another-{number}", EnvState.IDLE, 1, 201.0)
        ledger.lost(f"another-{number}", EnvState.LOST, 201.0, for_good=False)
    assert ledger.counts() == {EnvState.LOST: MOST_ABSENT, EnvState.IDLE: 2}, "one that is back is not forgotten"
