"""How an update's samples are divided among ranks."""

from __future__ import annotations

import itertools
import random
import statistics
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dart.core.curation import batches
from dart.core.curation.batches import ReleasedGroup, balance, samples_of
from dart.core.curation.pool import pooled_copy
from dart.core.types import Generation, Image, Sample, Step, Task, Termination, Trajectory, VersionSpan

SCREEN = 10
"""Tokens of a screenshot."""


def cost(samples: Sequence[Sample]) -> float:
    """Of samples that lie trajectory by trajectory and in order."""
    return batches._cost_of(list(batches._chains(samples)))


def trajectory(name: str, steps: int, stride: int = 1, group: str = "g") -> Trajectory:
    """Made of steps that continue the one before, except that the window empties at every `stride`-th step."""
    made: list[Step] = []
    for index in range(steps):
        screen = Image.of(f"{name}/{index}".encode(), "image/png", 28, 28 * SCREEN)
        before = made[-1] if index % stride else None
        past = (*before.generation.prompt_token_ids, *before.generation.token_ids) if before else (1, 2)
        answer = array("I", [1000 + index, 7])
        prompt = array("I", [*past, *[0] * SCREEN, 3])
        images = (*(before.images if before else ()), screen)
        made.append(
            Step(index, images, Generation(prompt, answer, array("f", [-1, -1]), (VersionSpan(0, 0, 2),), ""), None)
        )
    return Trajectory(
        name, group, Task("s", "n"), "do", tuple(made), Termination.FINISHED, 1.0, True, 50, 0.0, 1.0
    )  # fmt: skip


def samples(*trajectories: Trajectory) -> list[Sample]:
    return samples_of([ReleasedGroup.evenly("g", trajectories, [1.0] * len(trajectories))])


def batch(chance: random.Random, count: int) -> list[Sample]:
    """As long as trajectories are, and with strides such that chains are of one step to all."""
    return samples(*(trajectory(f"t{n}", chance.randint(3, 30), chance.choice((1, 3, 50))) for n in range(count)))


def ranks_of(shares: list[list[Sample]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for rank, share in enumerate(shares):
        for sample in share:
            found.setdefault(sample.trajectory_id, set()).add(rank)
    return found


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(1, 9))
def test_no_sample_is_left_out_and_a_trajectory_stays_together(seed: int, count: int, ranks: int) -> None:
    chance = random.Random(seed)
    made = batch(chance, count)
    shares = balance(made, ranks)
    assert len(shares) == ranks
    assert Counter(id(s) for share in shares for s in share) == Counter(map(id, made)), "each of them once"
    if count >= ranks:
        assert all(len(ranks) == 1 for ranks in ranks_of(shares).values())
        assert all(shares)
    for share in shares:
        groups = [name for name, _ in Counter(s.trajectory_id for s in share).items()]
        assert [s.name for s in share] == [s.name for name in groups for s in share if s.trajectory_id == name]
        assert all(a.index < b.index for a, b in itertools.pairwise(share) if a.trajectory_id == b.trajectory_id)
    assert balance(list(made), ranks) == shares


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_fullest_rank_has_little_more_than_the_others(ranks: int) -> None:
    """64 trajectories, the default batch: a few per cent more than the mean at worst."""
    chance = random.Random(ranks)
    over = []
    for _ in range(6):
        loads = [cost(share) for share in balance(batch(chance, 64), ranks)]
        over.append(max(loads) / statistics.mean(loads))
    assert max(over) < 1.05
    assert statistics.mean(over) < 1.02


def test_steps_that_continue_the_one_before_cost_what_the_last_one_costs() -> None:
    together, apart = samples(trajectory("a", 6, stride=50)), samples(trajectory("a", 6, stride=1))
    assert cost(together) == pytest.approx(cost(together[-1:]))
    assert cost(apart) == pytest.approx(6 * cost(apart[:1]))
    # 6 screenshots, 1 token after each, 2 of each response, and 2 at the beginning
    tokens = 6 * SCREEN + 6 + 6 * 2 + 2
    vision = batches.ENCODED_TOKEN * 6 * SCREEN
    assert cost(together) == pytest.approx(tokens + tokens**2 / batches.PAIRS_PER_TOKEN + vision)
    in_blocks = samples(trajectory("a", 6, stride=3))
    assert cost(in_blocks) == pytest.approx(2 * cost(in_blocks[:3]))


def test_another_screenshot_or_another_word_is_no_continuation() -> None:
    first, second = samples(trajectory("a", 2, stride=50))
    other = Image.of(b"other", "image/png", 28, 28 * SCREEN)
    seen = replace(second, images=(other, second.images[1]))
    ids = array("I", second.generation.prompt_token_ids)
    ids[first.tokens - 1] += 1
    said = replace(second, generation=replace(second.generation, prompt_token_ids=ids))
    alone = cost([first]) + cost([second])
    assert cost([first, second]) < alone
    for step in (seen, said, replace(second, trajectory_id="b")):
        assert cost([first, step]) == pytest.approx(alone)


def test_only_where_ranks_would_have_nothing_is_a_trajectory_divided() -> None:
    long, short = trajectory("long", 12, stride=3), trajectory("short", 3, stride=1)
    shares = balance(samples(short, long), 3)
    assert ranks_of(shares)["short"] == {2}
    halves = [[s.index for s in share] for share in shares[:2]]
    assert sorted(halves) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], "between two chains, in the middle"
    assert [len(share) for share in balance(samples(trajectory("one", 9, stride=3)), 4)] == [3, 3, 3, 0]
    assert [len(share) for share in balance(samples(trajectory("one", 9, stride=50)), 4)] == [9, 0, 0, 0], "one chain"
    assert balance([], 2) == [[], []]


def test_a_pooled_success_stays_together_beside_the_one_that_it_copies() -> None:
    success = trajectory("won", 6, stride=3)
    unscored = pooled_copy(success, "g2", version=9, oldest=5)
    assert unscored.pooled_from == "won" and not unscored.steps[0].generation.logprobs
    shares = balance(samples(success, unscored), 2)
    assert [len(share) for share in shares] == [6, 6]
    assert sorted(share[0].trajectory_id for share in shares) == ["g2-pooled", "won"]
    assert all(len(ranks) == 1 for ranks in ranks_of(shares).values())
    assert cost(shares[0]) == cost(shares[1])
