"""The run's counters: what each event counts, and how a resumed run goes on counting."""

from __future__ import annotations

import dataclasses
import json
from array import array
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart.core.curation.batches import ReleasedGroup
from dart.core.fates import PENDING, TRAINED, cause_of, dropped
from dart.core.json_text import JSON, to_json
from dart.core.progress import Counts, Progress, StalenessCounts, StoredCounts
from dart.core.types import Generation, Step, Task, Termination, Trajectory, VersionSpan, plain_fields


def rolled_out(
    task: str = "click", *, success: bool = True, steps: int = 1, seconds: float = 1.0, unparsable: bool = False
) -> Trajectory:
    """Each step has a prompt of three tokens and a response of two."""
    generation = Generation(array("i", [1, 2, 3]), array("i", [4, 5]), (-0.5, -0.5), (VersionSpan(0, 0, 2),), "text")
    termination = Termination.UNPARSABLE if unparsable else Termination.FINISHED
    made = tuple(Step(index, (), generation, None) for index in range(steps))
    return Trajectory(
        "t", "g", Task("miniwob", task), "do", made, termination, float(success), success, 9, 100.0, 100.0 + seconds
    )


def test_a_finished_trajectory_counts_itself_its_steps_and_its_success() -> None:
    progress = Progress(window=2)
    progress.trajectory_finished(rolled_out(success=True, steps=3))
    progress.trajectory_finished(rolled_out("drag", success=False, steps=2, unparsable=True))
    assert (progress.counts.trajectories, progress.counts.env_steps, progress.counts.unparsable) == (2, 5, 1)
    assert (progress.success_rate, progress.window_full) == (0.5, True)
    assert progress.success_by_task == {"click": 1.0, "drag": 0.0}
    progress.trajectory_finished(rolled_out(success=False))
    assert progress.success_rate == 0.0, "the window holds the last two"


def test_steps_are_counted_by_the_rules_that_reading_them_took() -> None:
    progress = Progress(1)
    first, *rest = rolled_out(steps=3).steps
    sloppy = (replace(first, reading_rules="quotes one-line"), replace(first, reading_rules="quotes"), *rest)
    progress.trajectory_finished(replace(rolled_out(), steps=sloppy))
    progress.trajectory_finished(rolled_out())
    assert progress.counts.reading_rules == {"quotes": 2, "one-line": 1}
    resumed = Progress(1)
    resumed.restore(StoredCounts(2, 4, 0, 0, 0, {}), Counts.from_json(progress.counts.to_json()))
    assert resumed.counts.reading_rules == {"quotes": 2, "one-line": 1}


def test_prompts_of_which_nobody_says_what_was_cached_are_left_out() -> None:
    progress = Progress(1)
    progress.trajectory_finished(rolled_out(steps=4))
    assert progress.counts.prefix_cached is None and progress.counts.to_json()["prefix_cached"] is None
    first, second, *rest = rolled_out(steps=4).steps
    nothing, most = (replace(first.generation, cached_tokens=tokens) for tokens in (0, 2))
    steps = (replace(first, generation=nothing), replace(second, generation=most), *rest)
    progress.trajectory_finished(replace(rolled_out(), steps=steps))
    assert (progress.counts.prompt_tokens, progress.counts.cached_tokens) == (6, 2)
    assert progress.counts.to_json()["prefix_cached"] == 0.3333
    resumed = Progress(1)
    resumed.restore(StoredCounts(2, 8, 0, 0, 0, {}), Counts.from_json(progress.counts.to_json()))
    assert resumed.counts.prefix_cached == pytest.approx(1 / 3)


def test_success_goes_on_where_an_earlier_process_ended() -> None:
    resumed = Progress(3)
    resumed.restore(StoredCounts(5, 10, 0, 0, 0, {}), None, [("a", False), ("a", True), ("b", True), ("b", True)])
    assert resumed.success_rate == 1.0 and resumed.window_full
    assert resumed.success_by_task == {"a": 0.5, "b": 1.0}
    resumed.trajectory_finished(replace(rolled_out(), success=False))
    assert resumed.success_rate == pytest.approx(2 / 3)


def test_an_update_counts_its_steps_tokens_fates_and_staleness() -> None:
    progress = Progress(1)
    group = ReleasedGroup.evenly("g", (rolled_out(steps=2), rolled_out(steps=1)), (1.0, -1.0))
    progress.version_made(1, seconds=4.0)
    progress.batch_consumed([group], staleness=[0, 3])
    counts = progress.counts
    assert (counts.updates, counts.version, counts.trained_steps, counts.trained_tokens) == (1, 1, 3, 15)
    assert counts.fates == {"trained": 2}
    assert (counts.staleness.mean, counts.staleness.max, counts.staleness.trajectories) == (1.5, 3, 2)


def test_what_was_dropped_pooled_failed_and_synced_is_counted() -> None:
    progress = Progress(1)
    progress.dropped("dropped: stale", 4)
    progress.dropped("dropped: stale", 2)
    progress.success_pooled()
    progress.attempt_failed()
    progress.weights_synced()
    counts = progress.counts
    assert counts.fates == {"dropped: stale": 6}
    assert (counts.pooled, counts.infrastructure_failures, counts.weight_syncs) == (1, 1, 1)


def test_counters_have_no_other_door_than_the_events() -> None:
    progress = Progress(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        progress.counts.trajectories = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        progress.counts = Counts()  # type: ignore[misc]
    before = progress.counts
    progress.dropped("dropped: stale", 1)
    assert before.fates == {}, "a record that somebody holds does not change"


def test_slowest_recent_times() -> None:
    progress = Progress(1)
    assert (progress.slowest_trajectory, progress.slowest_update) == (0.0, 0.0)
    for seconds in (3.0, 480.0, 2.0):
        progress.trajectory_finished(rolled_out(seconds=seconds))
    progress.version_made(1, seconds=7.0)
    progress.version_made(2, seconds=None)
    assert (progress.slowest_trajectory, progress.slowest_update) == (480.0, 7.0)
    for _ in range(64):
        progress.trajectory_finished(rolled_out(seconds=5.0))
    assert progress.slowest_trajectory == 5.0, "old ones are forgotten"


def test_a_resumed_run_takes_exact_counts_from_the_database_and_the_rest_from_the_last_update() -> None:
    logged = Counts(9, 9, 90, 900, 18, 5, 2, 3, 400, 8000, {"trained": 80}, StalenessCounts(40, 2, 80))
    stored = StoredCounts(100, 1000, 4, 6, 200, {"trained": 40, "dropped: stale": 8})
    progress = Progress(1)
    progress.resumed(update=5, version=5)
    progress.restore(stored, logged)
    counts = progress.counts
    assert (counts.updates, counts.version) == (5, 5), "of the checkpoint"
    assert (counts.trajectories, counts.env_steps, counts.unparsable, counts.pooled) == (100, 1000, 4, 6)
    assert counts.fates == stored.fates and counts.trained_steps == 200
    assert counts.trained_tokens == 4000, "half of the steps, so about half of the tokens"
    assert (counts.weight_syncs, counts.infrastructure_failures) == (18, 5)
    assert counts.staleness == StalenessCounts(20, 2, 40), "of those that are still trained on"


def test_imitation_that_is_resumed_counts_on_from_its_last_update() -> None:
    logged = Counts(10, 10, weight_syncs=18, trained_steps=400, trained_tokens=8000, fates={"trained": 80})
    progress = Progress(1)
    progress.resumed(update=5, version=5)
    progress.restore_imitation(logged)
    assert progress.counts == Counts(
        5, 5, weight_syncs=18, trained_steps=200, trained_tokens=4000, fates={"trained": 40}
    )
    progress.restore_imitation(None)
    assert progress.counts == Counts(5, 5)


def test_a_run_that_ended_before_its_first_update_is_resumed_too() -> None:
    progress = Progress(1)
    progress.restore(StoredCounts(3, 6, 0, 0, 0, {}), None)
    assert progress.counts == Counts(trajectories=3, env_steps=6)


def test_whole_numbers_are_whole() -> None:
    @dataclass(frozen=True, slots=True)
    class More(Counts):
        hours: float = 0.5
        last_task: str = "a"
        full: bool = True
        retries: int = 3

    assert More().whole() == Counts().whole() | {"retries": 3}
    assert More.from_json({"hours": 2, "last_task": 4, "full": 1, "retries": 5}) == More(retries=5)


whole = {name: st.integers(0, 10**6) for name in plain_fields(Counts)}


@given(st.builds(Counts, **whole, fates=st.dictionaries(st.text(max_size=9), st.integers(0, 99))))
def test_counts_survive_the_journal(counts: Counts) -> None:
    assert Counts.from_json(json.loads(to_json(counts.to_json()))) == counts


def test_counts_of_an_older_process_may_lack_a_counter() -> None:
    assert Counts.from_json({"updates": 3, "fates": {"trained": 8}}) == Counts(updates=3, fates={"trained": 8})


@given(st.text())
def test_a_fate_says_why_a_trajectory_was_dropped(cause: str) -> None:
    assert cause_of(dropped(cause)) == cause


@pytest.mark.parametrize("fate", [PENDING, TRAINED, "evaluated", "dropped", "dropped by mistake"])
def test_other_fates_have_no_cause(fate: str) -> None:
    assert cause_of(fate) is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_null(number: float) -> None:
    value: JSON = {"loss": number, "nested": [{"x": number}, 1.5], "pair": (number, "a")}
    assert json.loads(to_json(value)) == {"loss": None, "nested": [{"x": None}, 1.5], "pair": [None, "a"]}
