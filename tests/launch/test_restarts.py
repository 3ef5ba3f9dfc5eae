"""What is started again, and what ends the run, when a process of it ends: decisions without Ray."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart.core.fleet.restarts import LASTING_SECONDS
from dart.errors import NOT_READY
from dart.launch.restarts import Action, End, Finish, Restarts, Say, Start, Stop

WORKERS, RANKS = ("env-0", "rollout-0"), ("train-0", "train-1")
KILLED, LOST, WRONG, DONE, UNREACHED = End(-9), End(None), End(2, "wrong"), End(0), End(3)


def running(most: int = 3) -> Restarts:
    """A run of which every process is up."""
    run = Restarts(WORKERS, RANKS, most)
    assert run.begin(0.0) == [Start(("coordinator",))]
    assert run.listening(1.0, moved=False) == [Start(WORKERS), Start(RANKS)]
    return run


def without_words(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Say)]


def starts(actions: list[Action]) -> list[tuple[str, ...]]:
    return [action.names for action in actions if isinstance(action, Start)]


# ---- a worker ----


@pytest.mark.parametrize("end", [KILLED, LOST, UNREACHED, End(1)])
def test_a_worker_that_is_lost_is_started_again_alone(end: End) -> None:
    assert without_words(running().ended("env-0", end, 5.0)) == [Start(("env-0",), 2.0)]


def test_a_worker_that_keeps_failing_ends_the_run_with_its_last_words() -> None:
    run = running(most=2)
    assert starts(run.ended("env-0", KILLED, 5.0)) == starts(run.ended("env-0", KILLED, 9.0)) == [("env-0",)]
    [finish] = run.ended("env-0", End(1, "no memory"), 12.0)
    assert finish == Finish(1, "env-0 failed 3 times in a row; the last time it ended with code 1 (no memory)")


def test_failures_are_counted_anew_after_a_long_life() -> None:
    run, now = running(most=1), 5.0
    for _ in range(5):
        assert starts(run.ended("env-0", KILLED, now)) == [("env-0",)]
        now += LASTING_SECONDS + 10


def test_one_that_never_became_ready_has_not_worked_however_long_it_took() -> None:
    run, now = running(most=2), 5.0
    for delay in (2.0, 4.0):
        assert without_words(run.ended("rollout-0", End(NOT_READY), now)) == [Start(("rollout-0",), delay)]
        now += LASTING_SECONDS + 10
    [finish] = run.ended("rollout-0", End(NOT_READY), now)
    assert isinstance(finish, Finish) and finish.message.startswith("rollout-0 failed 3 times in a row")


@pytest.mark.parametrize("name", ["env-0", "train-1"])
def test_wrong_input_at_the_first_start_ends_the_run(name: str) -> None:
    assert running().ended(name, WRONG, 5.0) == [Finish(2, "wrong")]


def test_code_2_of_a_worker_that_was_started_again_is_a_failure() -> None:
    run = running()
    run.ended("rollout-0", LOST, 5.0)
    assert starts(run.ended("rollout-0", WRONG, 9.0)) == [("rollout-0",)]


def test_code_2_of_a_worker_that_outlived_a_coordinator_is_a_failure() -> None:
    """It prepares again, and may find the former engine's memory not free yet: its input has been right once."""
    run = running()
    run.ended("coordinator", LOST, 5.0)
    for rank in RANKS:
        run.ended(rank, DONE, 6.0)
    run.listening(20.0, moved=False)
    assert starts(run.ended("rollout-0", WRONG, 30.0)) == [("rollout-0",)]


# ---- the coordinator and the ranks ----


def test_wrong_input_before_the_coordinator_listens_ends_the_run() -> None:
    run = Restarts(WORKERS, RANKS, 3)
    run.begin(0.0)
    assert run.ended("coordinator", WRONG, 1.0) == [Finish(2, "wrong")]


@pytest.mark.parametrize("end", [KILLED, LOST, End(2, "the trainer is lost")])
def test_a_lost_coordinator_takes_the_ranks_with_it_and_both_are_started_again(end: End) -> None:
    run = running()
    assert without_words(run.ended("coordinator", end, 5.0)) == [Stop(RANKS)]
    assert run.ended("train-0", DONE, 6.0) == []
    assert run.ended("train-1", KILLED, 7.0) == [Start(("coordinator",), 2.0)]
    assert run.listening(9.0, moved=False) == [Start(RANKS)]


def test_a_lost_rank_takes_the_coordinator_and_the_other_ranks_with_it() -> None:
    run = running()
    assert without_words(run.ended("train-1", LOST, 5.0)) == [Stop(("coordinator", "train-0"))]
    assert run.ended("train-0", KILLED, 6.0) == []
    assert run.ended("coordinator", End(130), 7.0) == [Start(("coordinator",), 2.0)]


def test_one_loss_that_shows_as_several_ends_is_one_failure() -> None:
    run = running(most=1)
    run.ended("train-1", LOST, 5.0)
    run.ended("coordinator", WRONG, 5.1)
    assert run.ended("train-0", LOST, 5.2) == [Start(("coordinator",), 2.0)]
    run.listening(8.0, moved=False)
    assert isinstance(run.ended("train-0", LOST, 9.0)[0], Finish)


def crash(run: Restarts, now: float, end: End) -> list[Action]:
    """The coordinator ends so, is started again, and listens again."""
    actions = run.ended("coordinator", end, now)
    if not isinstance(actions[0], Finish):
        for rank in RANKS:
            run.ended(rank, DONE, now + 1)
        run.listening(now + 9, moved=False)
    return actions


def test_a_run_that_makes_no_new_checkpoint_is_given_up_however_long_each_try_takes() -> None:
    run, now, saved = running(most=2), 0.0, set[str]()
    for number in range(6):
        now += LASTING_SECONDS + 100
        saved.add(f"v{number:06d}")
        assert starts(crash(run, now, End(-9, checkpoints=frozenset(saved)))) == []
        assert run._core.count == 1
    for count in (2, 3):
        now += LASTING_SECONDS + 100
        saved.pop()  # `checkpoint.keep` allows no more
        last = crash(run, now, End(75, "no update for an hour", frozenset(saved)))
        assert run._core.count == count
    assert last == [Finish(1, "coordinator failed 3 times in a row; the last time it ended with code 75 (no update "
                              "for an hour)")]  # fmt: skip


def test_nodes_that_are_lost_again_and_again_do_not_end_a_run_that_works_in_between() -> None:
    run, now = running(most=1), 0.0
    for _ in range(5):
        now += LASTING_SECONDS + 100
        assert not isinstance(crash(run, now, LOST)[0], Finish)


def test_ranks_that_were_sent_goodbye_wait_for_the_end_of_their_coordinator() -> None:
    run = running()
    assert run.ended("train-0", DONE, 5.0) == run.ended("train-1", DONE, 5.0) == []
    assert run.ended("coordinator", DONE, 6.0) == [Finish(0)]


def test_workers_that_were_sent_goodbye_come_back_with_the_coordinator() -> None:
    run = running()
    assert run.ended("env-0", DONE, 5.0) == []
    run.ended("coordinator", WRONG, 5.1)
    assert run.ended("rollout-0", UNREACHED, 5.2) == []
    for rank in RANKS:
        run.ended(rank, DONE, 5.3)
    assert run.listening(9.0, moved=False) == [Start(WORKERS), Start(RANKS)]


def test_a_worker_that_is_slow_to_say_goodbye_comes_back_too() -> None:
    run = running()
    run.ended("coordinator", WRONG, 5.0)
    for rank in RANKS:
        run.ended(rank, DONE, 5.3)
    run.listening(9.0, moved=False)
    assert run.ended("rollout-0", DONE, 10.0) == [Start(("rollout-0",))]
    assert run.ended("rollout-0", DONE, 20.0) == []


def test_a_coordinator_that_moved_is_dialled_anew() -> None:
    run = running()
    run.ended("coordinator", LOST, 5.0)
    run.ended("env-0", UNREACHED, 5.0)
    for rank in RANKS:
        run.ended(rank, KILLED, 5.3)
    assert run.listening(9.0, moved=True) == [Stop(("rollout-0",)), Start(("env-0",)), Start(RANKS)]
    assert run.ended("rollout-0", DONE, 10.0) == [Start(("rollout-0",))]


def test_an_interrupted_coordinator_ends_the_run() -> None:
    assert running().ended("coordinator", End(130), 5.0) == [Finish(130, "the coordinator was interrupted")]


CODES = st.sampled_from([None, -9, 0, 1, 2, 3, 130])
HISTORIES = st.lists(st.tuples(st.integers(0, 99), CODES, st.floats(0.1, 2000)), max_size=60)


@given(HISTORIES)
def test_nothing_runs_twice_and_the_run_never_stands_still(history: list[tuple[int, int | None, float]]) -> None:
    """Actions are carried out at once: a coordinator that is started listens, what is stopped ends."""
    run, up, now = Restarts(WORKERS, RANKS, 3), set[str](), 0.0
    todo = run.begin(now)
    for number, code, seconds in history:
        while todo:
            match todo.pop(0):
                case Finish():
                    return
                case Start(names):
                    assert not up & set(names), "started twice"
                    up |= set(names)
                    if names == ("coordinator",):
                        todo += run.listening(now, moved=number % 2 == 0)
                case Stop(names):
                    for name in names:
                        up.remove(name)
                        todo += run.ended(name, End(-15), now)
        assert "coordinator" in up, "nothing leads the run"
        now += seconds
        name = sorted(up)[number % len(up)]
        up.remove(name)
        todo = run.ended(name, End(code), now)
