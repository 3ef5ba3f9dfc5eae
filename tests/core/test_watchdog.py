"""When a run is stalled, and who is to blame: histories with the time as an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart.core.culprits import GROUPS, MOST_LOST, Lost, Owed, Scene, explain
from dart.core.fleet.pace import Pace
from dart.core.progress import Counts
from dart.core.status import Figures, Status, WorkerStatus
from dart.core.watchdog import FAILING_SECONDS, Kind, Limits, Overdue, Pulse, Watchdog

LIMITS = Limits(start=60.0, sampling=100.0, update=200.0, weights=150.0, factor=4.0)
TRAINING = Pulse("training", environments=4, sampling=True, busy=True)


def stalls(history: Iterable[tuple[float, Pulse]], limits: Limits = LIMITS) -> list[tuple[float, Kind, str]]:
    """(when, what, who) of everything that a history finds overdue for the first time."""
    dog, found = Watchdog(limits, 0.0), []
    known: set[tuple[Kind, str]] = set()
    for now, pulse in history:
        overdue = dog.look(pulse, now)
        found += [(now, one.kind, one.subject) for one in overdue if (one.kind, one.subject) not in known]
        known = {(one.kind, one.subject) for one in overdue}
    return found


def every(seconds: float, until: float) -> list[float]:
    return [seconds * number for number in range(int(until / seconds) + 1)]


def test_a_start_that_waits_for_a_worker_is_overdue_after_its_bound() -> None:
    history = [(now, Pulse("starting", ready=1 if now >= 30 else 0)) for now in every(10, 120)]
    assert stalls(history) == [(90.0, Kind.START, "")], "60 s after the last worker that came"


def test_a_start_in_which_workers_come_one_by_one_is_none() -> None:
    assert stalls((now, Pulse("starting", ready=int(now // 50))) for now in every(10, 600)) == []


def test_environments_that_answer_nothing_are_overdue() -> None:
    assert stalls((now, TRAINING) for now in every(10, 120)) == [(100.0, Kind.STEP, "")]


def test_episodes_that_never_finish_are_overdue_though_environments_answer() -> None:
    history = ((now, replace(TRAINING, answers=int(now), slowest_trajectory=50.0)) for now in every(10, 300))
    assert stalls(history) == [(200.0, Kind.EPISODE, "")], "four times the slowest"


def test_a_desktop_whose_trajectories_take_eight_minutes_is_no_stall() -> None:
    history = [
        (now, replace(TRAINING, answers=int(now // 30), episodes=int(now // 480), slowest_trajectory=480.0))
        for now in every(5, 4 * 3600)
    ]
    assert stalls(history) == []


def test_before_any_trajectory_the_pace_of_steps_says_how_long_one_may_take() -> None:
    pace = Pace()
    for seconds in (10.0, 20.0, 30.0):
        pace.answered(seconds)
    assert (pace.answers, pace.mean, pace.slowest) == (3, 20.0, 30.0)
    estimate = pace.mean * 30  # steps
    history = ((now, replace(TRAINING, answers=int(now), slowest_trajectory=estimate)) for now in every(100, 3000))
    assert stalls(history) == [(2400.0, Kind.EPISODE, "")]


def test_what_the_world_says_may_take_long_is_no_stall() -> None:
    """An evaluator of fifteen minutes, and boots of twenty while there is nothing else."""
    judging = replace(TRAINING, longest_answer=900.0)
    assert stalls((now, judging) for now in every(10, 1000)) == [(900.0, Kind.STEP, "")]
    booting = replace(TRAINING, busy=False, longest_answer=900.0, longest_boot=1200.0)
    assert stalls((now, booting) for now in every(10, 3000)) == [(2100.0, Kind.STEP, "")]
    starting = Pulse("starting", longest_boot=1200.0)
    assert stalls((now, starting) for now in every(10, 1300)) == [(1200.0, Kind.START, "")]
    failing = replace(judging, failures=8)
    assert stalls((now, failing) for now in every(10, 1000)) == [(FAILING_SECONDS, Kind.STEP, "")]


def test_a_world_whose_every_attempt_fails_is_told_sooner() -> None:
    history = [(now, replace(TRAINING, failures=int(now))) for now in every(1, 120)]
    (first, *rest) = stalls(history)
    assert first == (FAILING_SECONDS, Kind.STEP, "") and not rest


def test_one_environment_that_fails_while_others_work_is_no_stall() -> None:
    working = replace(TRAINING, failures=3)
    assert stalls((now, replace(working, answers=int(now), episodes=int(now))) for now in every(9, 900)) == []


def test_an_update_that_hangs_is_overdue_and_one_that_is_only_slow_is_not() -> None:
    hung = replace(TRAINING, trainer="training", updates=3, held_back="the trainer is behind", busy=False)
    quick = replace(hung, slowest_update=5.0)
    assert stalls((now, quick) for now in every(10, 250)) == [(200.0, Kind.TRAINER, "")]
    slow = replace(hung, slowest_update=100.0)
    assert stalls((now, slow) for now in every(10, 390)) == []
    assert stalls((now, slow) for now in every(10, 410)) == [(400.0, Kind.TRAINER, "")]


def test_a_first_update_may_take_as_many_times_longer_as_later_ones() -> None:
    first = replace(TRAINING, trainer="training", held_back="the trainer is behind", busy=False)
    assert stalls((now, first) for now in every(10, 790)) == []
    assert stalls((now, first) for now in every(10, 810)) == [(800.0, Kind.TRAINER, "")]


def test_updates_that_end_are_progress_though_the_trainer_never_rests() -> None:
    busy = replace(TRAINING, trainer="training", slowest_update=1.0)
    history = [
        (now, replace(busy, updates=int(now // 190), answers=int(now), episodes=int(now))) for now in every(10, 3600)
    ]
    assert stalls(history) == []


def test_a_replica_that_never_loads_weights_is_named() -> None:
    moving = replace(TRAINING, sampling=False)
    history = [
        (now, replace(moving, version=1 + int(now // 50), versions={"a": int(now // 50), "b": 0}))
        for now in every(10, 170)
    ]
    assert stalls(history) == [(150.0, Kind.WEIGHTS, "b")], "a is always one behind, and always moves on"


def test_a_replica_whose_turn_has_not_come_is_no_stall() -> None:
    """Of eight replicas one gets weights every 60 s, the oldest first: each waits for 480 s, and the bound is 150."""
    busy = replace(TRAINING, sampling=False, episodes=0)
    history = []
    for now in every(10, 3600):
        turns = int(now // 60)
        versions = {f"r{n}": (turns - n + 7) // 8 for n in range(8)}
        history.append((now, replace(busy, updates=int(now), version=2 + turns // 8, versions=versions)))
    assert stalls(history) == []
    without_r3 = [(now, replace(pulse, versions=pulse.versions | {"r3": 0})) for now, pulse in history]
    ((when, kind, who),) = stalls(without_r3)
    assert (kind, who) == (Kind.WEIGHTS, "r3") and 420 <= when <= 600, "all others have had one meanwhile"


def test_sampling_that_waits_for_weights_is_not_held_by_the_trainer() -> None:
    held = replace(TRAINING, busy=False, held_back="the update and its weights are waited for", version=3)
    behind = [(now, replace(held, versions={"a": 3, "b": 2})) for now in every(10, 140)]
    assert stalls(behind) == []


def test_weights_that_reach_no_replica_are_the_trainers() -> None:
    idle = replace(TRAINING, sampling=False, version=3)
    joined = [
        (now, replace(idle, versions={"a": 2, "b": 1} | ({"c": 0} if now > 60 else {}))) for now in every(10, 160)
    ]
    assert stalls(joined) == [(150.0, Kind.WEIGHTS, "")]
    back = [(now, replace(idle, versions={"a": 3 if now > 200 else 2, "b": 1})) for now in every(10, 340)]
    assert stalls(back) == [(150.0, Kind.WEIGHTS, "")], "b gets its own time once weights arrive again"
    alone = [(now, replace(idle, versions={"a": 2})) for now in every(10, 160)]
    assert stalls(alone) == [(150.0, Kind.WEIGHTS, "a")], "a single replica may be at fault itself"


def test_old_weights_are_no_stall_of_their_own_while_the_trainer_hangs() -> None:
    hung = replace(TRAINING, sampling=False, trainer="saving", version=1, versions={"a": 0, "b": 0}, slowest_update=1.0)
    found = stalls(((now, hung) for now in every(10, 500)), replace(LIMITS, weights=LIMITS.update))
    assert [kind for _, kind, _ in found] == [Kind.TRAINER]


def test_a_replica_that_is_lost_is_no_stall_of_its_weights() -> None:
    moving = replace(TRAINING, sampling=False, version=2)
    history = [(now, replace(moving, versions={"b": 0} if now < 100 else {})) for now in every(10, 300)]
    assert stalls(history) == []


def test_a_pause_is_told_and_is_the_only_thing_told() -> None:
    paused = replace(TRAINING, paused=True, busy=False, held_back="the run is paused")
    assert stalls((now, paused) for now in every(10, 500)) == [(100.0, Kind.PAUSED, "")]


def test_what_waited_while_the_run_was_paused_starts_anew() -> None:
    paused = replace(TRAINING, paused=True, busy=False, held_back="the run is paused")
    history = [(now, paused if now < 90 else TRAINING) for now in every(10, 250)]
    assert stalls(history) == [(180.0, Kind.STEP, "")], "100 s after the last look at a paused run"


def test_a_pause_is_no_time_without_an_update() -> None:
    batches = replace(TRAINING, trajectories_per_update=8)
    paused = replace(batches, paused=True, busy=False, held_back="the run is paused")
    history = [
        (now, replace(paused if 100 <= now < 2000 else batches, answers=int(now), episodes=min(20, int(now // 5))))
        for now in every(5, 2000)
    ]
    went_on = [
        (2000 + now, replace(batches, answers=2000 + int(now), episodes=20 + int(now // 5))) for now in every(5, 400)
    ]
    ((first, kind, _), *_) = [one for one in stalls([*history, *went_on]) if one[1] is not Kind.PAUSED]
    assert (first, kind) == (2195.0, Kind.BATCH), "200 s after the last look at a paused run"


def test_sampling_that_waits_for_a_trainer_without_work_is_told() -> None:
    held = replace(TRAINING, busy=False, held_back="an update is due")
    assert stalls((now, held) for now in every(10, 150)) == [(100.0, Kind.HELD, "")]


def test_trajectories_that_are_all_dropped_are_told() -> None:
    batches = replace(TRAINING, trajectories_per_update=8)
    history = [(now, replace(batches, answers=int(now), episodes=int(now // 5))) for now in every(5, 300)]
    assert stalls(history) == [(200.0, Kind.BATCH, "")], "long enough, and more than four batches of eight"
    evaluated = [(now, replace(one, phase="evaluating", trajectories_per_update=0)) for now, one in history]
    assert stalls(evaluated) == []
    then = [
        (300 + now, replace(batches, answers=300 + int(now), episodes=60 + int(now // 50))) for now in every(5, 400)
    ]
    assert stalls([*evaluated, *then]) == [], "episodes of the evaluation do not count"
    few = [(now, replace(batches, answers=int(now), episodes=int(now // 50))) for now in every(5, 1000)]
    assert stalls(few) == []


def test_a_new_phase_starts_every_clock_anew() -> None:
    history = [(now, replace(TRAINING, phase="evaluating" if now < 95 else "training")) for now in every(5, 190)]
    assert stalls(history) == []


def test_how_long_each_kind_of_progress_is_ago() -> None:
    dog = Watchdog(LIMITS, 0.0)
    dog.look(replace(TRAINING, answers=5), 10.0)
    dog.look(replace(TRAINING, answers=6, updates=1), 20.0)
    dog.look(replace(TRAINING, answers=6, updates=1), 30.0)
    assert dog.quiet(35.0) == {"step": 15.0, "update": 15.0}


@given(st.lists(st.tuples(st.floats(0.1, 50.0), st.booleans(), st.booleans(), st.booleans()), max_size=60))
def test_nothing_is_overdue_that_moved_within_its_bound(steps: list[tuple[float, bool, bool, bool]]) -> None:
    dog, now = Watchdog(LIMITS, 0.0), 0.0
    pulse = replace(TRAINING, trainer="training", slowest_update=1.0)
    moved = {Kind.STEP: 0.0, Kind.EPISODE: 0.0, Kind.TRAINER: 0.0}
    dog.look(pulse, now)
    bounds = {Kind.STEP: 100.0, Kind.EPISODE: 100.0, Kind.TRAINER: 200.0}
    for seconds, step, episode, update in steps:
        now += seconds
        pulse = replace(pulse, answers=pulse.answers + step, episodes=pulse.episodes + episode,
                        updates=pulse.updates + update)  # fmt: skip
        for kind, did in ((Kind.STEP, step), (Kind.EPISODE, episode), (Kind.TRAINER, update)):
            moved[kind] = now if did else moved[kind]
        overdue = {one.kind: one.seconds for one in dog.look(pulse, now)}
        expected = {kind for kind, at in moved.items() if now - at >= bounds[kind]}
        if Kind.STEP in expected:
            expected.discard(Kind.EPISODE)  # it is why
        assert set(overdue) == expected


# ---- culprits ----


def worker(name: str, role: str, state: str = "ready", version: int = 0) -> WorkerStatus:
    return WorkerStatus(name, role, state, 4, 0, version, 0.5, "")


ENV, REPLICA, RANK = worker("env-0", "env"), worker("rollout-0", "rollout"), worker("train-0", "train")
WANTED = {"env": 1, "rollout": 2, "train": 1}


def scene(*workers: WorkerStatus, **facts: Owed) -> Scene:
    counts = Counts(updates=11, version=11, fates={"trained": 8, "dropped: all failed": 90})
    doing = {"env": "4 queued: the replicas are full"}
    status = Status("run", "training", Figures(counts), workers=workers, doing=doing)
    return Scene(status, WANTED, {name.replace("_", "-"): owed for name, owed in facts.items()})


def test_a_world_whose_every_boot_fails_is_named_with_its_last_failure() -> None:
    bare = replace(ENV, slots=0)
    boots = Owed("env-0", last_failure="booting an environment failed: OSError: no address left")
    for kind in (Kind.START, Kind.STEP):
        stall = explain(Overdue(kind, 312.0), scene(bare, REPLICA, REPLICA, RANK, env_0=boots))
        assert stall.waits_for == "1 of 1 env workers (env-0 dialled in but has no environment ready)"
        assert (stall.culprit, stall.failure) == ("env", "booting an environment failed: OSError: no address left")


def test_environments_that_are_renewed_for_ever_are_named() -> None:
    there = scene(ENV, REPLICA, REPLICA, RANK)
    there = replace(there, status=replace(there.status, doing={"env": "4 renewing"}))
    stall = explain(Overdue(Kind.STEP, 312.0), there)
    assert (stall.waits_for, stall.culprit) == ("environments, which are 4 renewing", "the environments")


def test_a_hung_rank_is_named_with_its_command() -> None:
    stall = explain(
        Overdue(Kind.TRAINER, 312.0),
        scene(ENV, REPLICA, RANK, train_0=Owed("train-0 (rank 0)", "train_batch", 310.0, 0, "out of memory")),
    )
    assert stall.waits == "update 12" and stall.culprit == "train-0 (rank 0)"
    assert stall.waits_for == "train-0 (rank 0), which has not answered train_batch for 310 s"
    assert stall.failure == "out of memory" and "--resume" in stall.advice and not stall.deliberate


def test_a_missing_role_is_named_with_how_many_of_how_many() -> None:
    starting = worker("rollout-1", "rollout", "starting")
    stall = explain(Overdue(Kind.START, 600.0), scene(ENV, REPLICA, starting, RANK))
    assert stall.waits_for == "1 of 2 rollout workers (rollout-1 dialled in but is still preparing)"
    assert stall.culprit == "rollout"
    stall = explain(Overdue(Kind.START, 600.0), scene(ENV, REPLICA, worker("rollout-1", "rollout")))
    assert stall.waits_for == "1 of 1 train workers (not dialled in)"
    assert "dart worker --role train --coordinator" in stall.advice


def test_a_lost_worker_is_told_with_why() -> None:
    lost = Lost()
    lost.left("env", "env-0", "silent for 15 s")
    stall = explain(Overdue(Kind.STEP, 100.0), replace(scene(REPLICA, RANK), lost=lost))
    assert stall.waits_for.startswith("1 of 1 env workers") and stall.failure == "env-0 is lost: silent for 15 s"


def test_of_lost_workers_those_of_the_missing_role_are_told_and_the_newest_few() -> None:
    lost = Lost()
    for number in range(5):
        lost.left("env", f"env-{number}", "preempted")
    made = replace(scene(ENV, REPLICA, RANK), lost=lost)
    assert explain(Overdue(Kind.START, 600.0), made).failure == "", "no replica was lost, and one is missing"
    lost.left("rollout", "env-4", "silent for 15 s")
    assert explain(Overdue(Kind.START, 600.0), made).failure == "env-4 is lost: silent for 15 s"
    lost.joined("rollout", "env-4")
    lost.left("env", "env-1", "again")
    assert lost.told(["rollout", "env"]) == (
        "env-1 is lost: again; env-4 is lost: preempted; env-3 is lost: preempted; 2 more env workers were lost before"
    )


def test_no_more_lost_workers_are_remembered_than_are_of_use() -> None:
    lost = Lost()
    lost.left("rollout", "rollout-0", "silent for 15 s")
    for number in range(10 * MOST_LOST):
        lost.left("env", f"env-{number}", "preempted")
    assert sum(map(len, lost._why.values())) == MOST_LOST + 1
    assert lost.told(["rollout"]) == "rollout-0 is lost: silent for 15 s"
    assert lost.told(["env"]).endswith(f"; at least {MOST_LOST - 3} more env workers were lost before")


def test_the_env_worker_whose_attempts_all_fail_is_named_with_its_words() -> None:
    fails = Owed("env-0", "", 0.0, 9, "env-0: the desktop cannot be reset: no space left on device")
    stall = explain(Overdue(Kind.STEP, 100.0), scene(ENV, REPLICA, RANK, env_0=fails))
    assert stall.culprit == "env-0" and stall.failure.endswith("no space left on device")
    assert stall.waits_for == "a successful attempt: the last 9 on env-0 all failed"


def test_the_oldest_debt_of_sampling_is_named() -> None:
    made = scene(ENV, REPLICA, RANK, env_0=Owed("env-0", "act", 20.0), rollout_0=Owed("rollout-0", "generate", 300.0),
                 train_0=Owed("train-0 (rank 0)", "train_batch", 900.0))  # fmt: skip
    stall = explain(Overdue(Kind.EPISODE, 320.0), made)
    assert stall.waits_for == "rollout-0, which has not answered generate for 300 s"


def test_without_a_culprit_the_queue_is_told() -> None:
    stall = explain(Overdue(Kind.EPISODE, 320.0), scene(ENV, REPLICA, RANK))
    assert stall.waits_for == "replicas: the environments are 4 queued: the replicas are full"


def test_a_replica_with_old_weights_is_told_with_its_last_failure() -> None:
    owed = Owed("rollout-0", "receive_weights", 90.0, 0, "rollout-0: connection refused")
    old = replace(REPLICA, weight_version=7)
    stall = explain(Overdue(Kind.WEIGHTS, 150.0, "rollout-0"), scene(ENV, old, rollout_0=owed))
    assert stall.waits == "version 11"
    assert stall.waits_for == "replica rollout-0, which has version 7 and has not answered receive_weights for 90 s"
    assert stall.failure == "rollout-0: connection refused"


def test_a_trainer_that_owes_an_answer_is_named_beside_the_replica() -> None:
    owed = Owed("train-0 (rank 0)", "send_weights", 40.0)
    stall = explain(Overdue(Kind.WEIGHTS, 150.0, "rollout-0"), scene(ENV, REPLICA, RANK, train_0=owed))
    assert stall.culprit == "rollout-0, train-0 (rank 0)"
    assert stall.waits_for.endswith("; train-0 (rank 0) has not answered send_weights for 40 s")
    assert stall.name == ("weights", "rollout-0"), "the same whether the trainer sends at the moment or not"
    busy = Owed("train-0 (rank 0)", "train_batch", 40.0)
    alone = explain(Overdue(Kind.WEIGHTS, 150.0, "rollout-0"), scene(ENV, REPLICA, RANK, train_0=busy))
    assert alone.culprit == "rollout-0", "an update is not what it waits for"


def test_weights_that_reach_no_replica_are_told_as_the_trainers() -> None:
    owed = Owed("train-0 (rank 0)", "send_weights", 90.0)
    stall = explain(Overdue(Kind.WEIGHTS, 150.0), scene(ENV, REPLICA, RANK, train_0=owed))
    assert stall.culprit == "train-0 (rank 0)"
    assert stall.waits_for == (
        "train-0 (rank 0), whose weights reach no replica, and which has not answered send_weights for 90 s"
    )


def test_dropped_trajectories_are_told_with_the_commonest_cause() -> None:
    here = scene(ENV, REPLICA, RANK)
    assert "dropped: all failed" in explain(Overdue(Kind.BATCH, 600.0), here).waits_for
    counts = replace(here.status.figures.counts, fates={"dropped: all failed": 1000, "dropped: stale": 40})
    figures = replace(here.status.figures, counts=counts)
    later = replace(here, status=replace(here.status, figures=figures), before={"dropped: all failed": 999})
    stall = explain(Overdue(Kind.BATCH, 600.0), later)
    assert "dropped: stale" in stall.waits_for and "lacks the newest weights" in stall.advice


def test_a_pause_is_deliberate_and_a_deadlock_is_not() -> None:
    assert explain(Overdue(Kind.PAUSED, 100.0), scene()).deliberate
    held = explain(Overdue(Kind.HELD, 100.0), replace(scene(), held_back="an update is due"))
    assert held.waits_for == "the trainer: an update is due" and not held.deliberate


def test_every_kind_of_stall_can_be_explained_without_any_worker() -> None:
    for kind in Kind:
        stall = explain(Overdue(kind, 1.0, "rollout-7"), Scene(Status("run", "training")))
        assert stall.kind == kind and stall.waits and stall.waits_for and stall.advice


@pytest.mark.parametrize(
    ("fates", "culprit", "advice"),
    [
        ({"dropped: all failed": 300, "dropped: stale": 20}, GROUPS, "dart show"),
        ({"dropped: all failed": 20, "dropped: stale": 300}, "curation", "curation.max_staleness"),
        ({"trained": 300}, "curation", "dart show"),
    ],
)
def test_an_update_without_a_batch_says_what_became_of_the_groups(
    fates: dict[str, int], culprit: str, advice: str
) -> None:
    status = Status("run", "training", Figures(Counts(fates=fates)))
    stall = explain(Overdue(Kind.BATCH, 700.0), Scene(status))
    assert stall.culprit == culprit and advice in stall.advice
