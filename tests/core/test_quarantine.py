"""Tasks that rest because their attempts keep failing while others work."""

from __future__ import annotations

import random

from dart.core.curation.quarantine import CERTAIN, FAILURES, FIRST_SECONDS, MOST_SECONDS, TaskQuarantine
from dart.core.curation.sampling import TaskSampler


def failing(
    quarantine: TaskQuarantine, times: int, now: float, *, certain: bool = False, workers: int = 2, several: bool = True
) -> list[float]:
    """On so many env workers in turn."""
    return [
        quarantine.failed("broken", "no such page", now, worker=f"env-{n % workers}", several=several, certain=certain)
        for n in range(times)
    ]


def test_a_task_rests_when_its_attempts_fail_in_a_row_while_others_finish() -> None:
    quarantine = TaskQuarantine()
    assert failing(quarantine, FAILURES - 1, 5.0) == [0.0] * (FAILURES - 1)
    quarantine.finished("other")
    assert failing(quarantine, 1, 10.0) == [FIRST_SECONDS]
    (resting,) = quarantine.resting(20.0)
    assert (resting.name, resting.seconds_left, resting.why) == ("broken", FIRST_SECONDS - 10.0, "no such page")
    assert quarantine.rests("broken", 10.0 + FIRST_SECONDS - 0.1)
    assert not quarantine.rests("broken", 10.0 + FIRST_SECONDS) and not quarantine.rests("other", 20.0)


def test_nothing_rests_in_an_outage() -> None:
    quarantine = TaskQuarantine()
    quarantine.finished("other")
    assert not any(failing(quarantine, 10 * FAILURES, 0.0, certain=True))
    assert not quarantine.resting(1.0)


def test_what_fails_on_one_of_several_env_workers_may_be_that_workers_fault() -> None:
    quarantine = TaskQuarantine()
    failing(quarantine, 5 * FAILURES, 0.0, workers=1)
    quarantine.finished("other")
    assert not any(failing(quarantine, 5 * FAILURES, 0.0, workers=1))
    assert not quarantine.doubted("broken")
    assert quarantine.failed("broken", "no such page", 0.0, worker="env-1", several=True) == FIRST_SECONDS


def test_a_run_of_one_env_worker_needs_twice_as_many_failures() -> None:
    quarantine = TaskQuarantine()
    failing(quarantine, 2 * FAILURES - 1, 0.0, workers=1, several=False)
    quarantine.finished("other")
    assert not quarantine.doubted("broken")
    assert failing(quarantine, 1, 0.0, workers=1, several=False) == [FIRST_SECONDS]


def test_a_task_is_doubted_until_an_attempt_at_it_finishes() -> None:
    quarantine = TaskQuarantine()
    failing(quarantine, FAILURES - 1, 0.0)
    quarantine.finished("other")
    assert not quarantine.doubted("broken")
    failing(quarantine, 1, 0.0)
    assert quarantine.doubted("broken") and not quarantine.doubted("other")
    assert not quarantine.rests("broken", FIRST_SECONDS + 1.0) and quarantine.doubted("broken")
    quarantine.finished("broken")
    assert not quarantine.doubted("broken")


def test_the_worlds_word_that_a_task_is_wrong_needs_less() -> None:
    quarantine = TaskQuarantine()
    assert failing(quarantine, CERTAIN - 1, 0.0, certain=True) == [0.0] * (CERTAIN - 1)
    quarantine.finished("other")
    assert failing(quarantine, 1, 0.0, certain=True) == [FIRST_SECONDS]


def test_each_rest_is_twice_as_long_and_one_good_attempt_ends_the_row() -> None:
    quarantine, now, rests = TaskQuarantine(), 0.0, list[float]()
    failing(quarantine, FAILURES - 1, now)
    for _ in range(6):
        quarantine.finished("other")
        rests += failing(quarantine, 1, now)
        assert failing(quarantine, 3, now + 1.0) == [0.0] * 3, "attempts from before it began to rest"
        now += rests[-1]
    assert rests == [min(MOST_SECONDS, FIRST_SECONDS * 2**row) for row in range(6)]
    assert rests[-1] == MOST_SECONDS
    quarantine.finished("broken")
    quarantine.finished("other")
    assert not any(failing(quarantine, FAILURES - 1, now))


def test_a_task_that_rests_is_passed_over_unless_all_do() -> None:
    resting: set[str] = {"b"}
    sampler = TaskSampler("s", ["a", "b", "c"], (0, 9), random.Random(0), rests=lambda name: name in resting)
    assert {sampler.next().name for _ in range(30)} == {"a", "c"}
    weights = {"a": 0.25, "b": 1.0}
    rare = TaskSampler("s", ["a", "b"], (0, 9), random.Random(0), weights.__getitem__, rests=resting.__contains__)
    assert {rare.next().name for _ in range(30)} == {"a"}, "although the other comes up more often"
    resting.clear()
    assert {sampler.next().name for _ in range(4)} == {"a", "b", "c"}, "it is soon tried when it comes back"
    resting |= {"a", "b", "c"}
    assert sampler.next().name in resting
