"""The database: what is written comes back, from another process too."""

from __future__ import annotations

import asyncio
import itertools
import math
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from store_samples import TASK, fates, image, trajectory
from store_servers import Stores
from test_store_action_json import actions, texts

from dart.core.curation.planning import Result
from dart.core.progress import StoredCounts
from dart.core.types import Generation, Image, Step, StepEntropy, Task, Termination, Trajectory, VersionSpan
from dart.errors import UserError
from dart.store import tables as t
from dart.store.blobs import BlobCorrupt, BlobMissing, files_at
from dart.store.database import Database, sqlite_url
from dart.store.reader import chunks
from dart.store.records import CheckpointRecord, Event, GroupKind, GroupState, RunState, SyncRecord, TaskHistory

WON, LOST = Result(True, 1.0), Result(False, 0.0)


@pytest.fixture
async def database(stores: Stores) -> AsyncIterator[Database]:
    async with await stores.open() as made:
        await made.start_run("run-1", "demo", {"seed": 1}, started=1.0)
        yield made


def without_bytes(whole: Trajectory) -> Trajectory:
    def bare(step: Step) -> Step:
        return replace(step, images=tuple(replace(one, data=b"") for one in step.images))

    last = whole.last_image and replace(whole.last_image, data=b"")
    return replace(whole, steps=tuple(bare(step) for step in whole.steps), last_image=last)


# ---- trajectories ----

seconds = st.floats(0, 4e9)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=6).map(lambda ids: array("I", ids))
images = st.builds(
    Image.of, st.binary(min_size=1, max_size=30), st.sampled_from(["image/png", "image/webp"]), *[st.integers(1, 9)] * 2
)
generations = st.builds(
    Generation,
    token_ids,
    token_ids,
    st.lists(st.floats(max_value=0, allow_nan=False, width=32), max_size=6).map(lambda values: array("f", values)),
    st.lists(st.builds(VersionSpan, *[st.integers(0, 2**62)] * 3), max_size=3).map(tuple),
    texts,
    st.booleans(),
)
steps = st.builds(
    Step, st.just(0), st.lists(images, max_size=3).map(tuple), generations, st.none() | actions, *[texts] * 4
)
trajectories = st.builds(
    Trajectory,
    id=st.just(""),
    group_id=st.just("group-1"),
    task=st.builds(Task, texts, texts, st.integers(0, 2**63 - 1)),
    instruction=texts,
    steps=st.lists(steps, max_size=4).map(lambda made: tuple(replace(s, index=i) for i, s in enumerate(made))),
    termination=st.sampled_from(Termination),
    reward=st.floats(0, 1),
    success=st.booleans(),
    step_limit=st.integers(1, 100),
    started=seconds,
    finished=seconds,
    evidence_json=texts,
    pooled_from=texts,
    goal_images=st.integers(0, 16),
    state_judged=st.booleans(),
    state_reward=st.floats(0, 1),
    state_success=st.booleans(),
    last_image=st.none() | images,
)


def test_any_trajectory_comes_back_equal(stores: Stores) -> None:
    with asyncio.Runner() as runner:

        async def start() -> Database:
            database = await stores.open()
            await database.start_run("run-1", "demo", {}, started=1.0)
            await database.open_group("group-1", TASK, 8, 1.0)
            return database

        database = runner.run(start())

        names = map(str, itertools.count())

        @settings(max_examples=60, deadline=None)
        @given(trajectories, st.integers(1, 9))
        def check(nameless: Trajectory, attempt: int) -> None:
            whole = replace(nameless, id=next(names))

            async def there_and_back() -> None:
                await database.add_trajectory(whole, attempt)
                bare = await database.trajectory(whole.id)
                full = await database.trajectory(whole.id, with_images=True)
                assert bare and bare.trajectory == without_bytes(whole)
                assert full and replace(full.trajectory, last_image=whole.last_image) == whole
                assert whole.last_image is None or database.blobs.get(whole.last_image.sha256) == whole.last_image.data
                assert (full.attempt, full.advantages, full.fate) == (attempt, (), "pending")

            runner.run(there_and_back())

        check()
        runner.run(database.close())


async def test_a_trajectory_needs_its_group_and_comes_once(database: Database) -> None:
    with pytest.raises(IntegrityError):
        await database.add_trajectory(trajectory("t-1", "nowhere"))
    assert await database.trajectory("t-1") is None
    await database.open_group("group-1", TASK, 8, 1.0)
    await database.add_trajectory(trajectory("t-1", "group-1"))
    with pytest.raises(IntegrityError):
        await database.add_trajectory(trajectory("t-1", "group-1"))
    assert await fates(database) == {"pending": 1}


async def test_a_trajectory_whose_screenshot_nobody_has_is_refused(database: Database) -> None:
    await database.open_group("group-1", TASK, 8, 1.0)
    bare = without_bytes(trajectory("t-1", "group-1"))
    with pytest.raises(BlobMissing):
        await database.add_trajectory(bare)
    assert await database.trajectory("t-1") is None
    database.blobs.put_many(image(f"t-1-{index}") for index in range(3))
    await database.add_trajectory(bare)
    stored = await database.trajectory("t-1", with_images=True)
    assert stored and stored.trajectory == trajectory("t-1", "group-1")


async def test_a_corrupt_screenshot_is_told_when_it_is_asked_for(database: Database, stores: Stores) -> None:
    await database.open_group("group-1", TASK, 8, 1.0)
    await database.add_trajectory(trajectory("t-1", "group-1"))
    digest = image("t-1-0").sha256.hex()
    files_at(stores.blobs).write(f"{digest[:2]}/{digest}", b"x")
    assert await database.trajectory("t-1")
    with pytest.raises(BlobCorrupt, match=digest):
        await database.trajectory("t-1", with_images=True)


async def test_pages_are_newest_first_and_leave_nothing_out(database: Database) -> None:
    other = Task("miniwob", "enter-text", 1)
    for group, task in (("group-1", TASK), ("group-2", other)):
        await database.open_group(group, task, 8, 1.0)
    for number in range(12):  # several finish at the same time
        group, task = (("group-1", TASK), ("group-2", other))[number % 3 == 0]
        await database.add_trajectory(trajectory(f"t-{number:02}", group, task, finished=float(number // 4)))
    expected = [f"t-{number:02}" for number in reversed(range(12))]
    seen: list[str] = []
    while page := await database.list_trajectories(limit=5, before=seen[-1] if seen else ""):
        seen += [row.id for row in page]
    assert seen == expected
    texts_only = await database.list_trajectories("enter-text")
    assert [row.id for row in texts_only] == ["t-09", "t-06", "t-03", "t-00"]
    assert (texts_only[0].task, texts_only[0].steps, texts_only[0].group_id) == (other, 3, "group-2")
    with pytest.raises(UserError, match="page token 'x'"):
        await database.list_trajectories(before="x")


# ---- groups ----


async def fill(database: Database, group: str, opened_at: float, count: int = 2) -> list[str]:
    await database.open_group(group, TASK, 8, opened_at)
    names = [f"{group}/{number}" for number in range(count)]
    for number, name in enumerate(names):
        await database.add_trajectory(trajectory(name, group, finished=float(number)))
    return names


async def test_a_resumed_run_finds_what_no_update_has_had(database: Database, stores: Stores) -> None:
    for position, group in enumerate(["open", "released", "dropped", "consumed"]):
        names = await fill(database, group, float(position))
        if group != "open":
            state = GroupState.DROPPED if group == "dropped" else GroupState.RELEASED
            advantages = dict(zip(names, ((1.5, 0.1, -2.0), (-1.5,) * 3), strict=True))
            await database.close_group(group, state, f"{state}: why", f"{state}: cause", advantages, 9.0)
    await database.consume_groups(["consumed"], 7)

    async with await stores.open(create=False) as resumed:
        waiting = await resumed.unfinished_groups()
        assert [(group.id, group.state) for group in waiting] == [("open", "open"), ("released", "released")]
        assert [(await resumed.with_images(stored)).trajectory for stored in waiting[1].trajectories] == [
            trajectory(f"released/{number}", "released", finished=float(number)) for number in range(2)
        ]
        assert [stored.advantages for stored in waiting[1].trajectories] == [(1.5, 0.1, -2.0), (-1.5,) * 3]
        assert (waiting[1].task, waiting[1].planned, waiting[1].closed) == (TASK, 8, 9.0)
        assert (waiting[0].closed, waiting[0].detail, waiting[0].consumed_by_update) == (None, "pending", None)
        (consumed,) = await resumed.unfinished_groups([GroupState.CONSUMED])
        assert (consumed.consumed_by_update, consumed.detail) == (7, "trained")
        assert await fates(resumed) == {"pending": 2, "released: cause": 2, "dropped: cause": 2, "trained": 2}


async def test_no_group_is_trained_on_twice(database: Database) -> None:
    for group in ("group-1", "group-2"):
        await fill(database, group, 1.0)
    await database.close_group("group-1", GroupState.RELEASED, "1 of 2 succeeded", "pending", {}, 2.0)
    with pytest.raises(ValueError, match="only 1 of 2"):
        await database.consume_groups(["group-1", "group-2"], 1)
    assert len(await database.unfinished_groups([GroupState.RELEASED])) == 1
    await database.consume_groups(["group-1"], 1)
    with pytest.raises(ValueError, match="only 0 of 1"):
        await database.consume_groups(["group-1"], 2)
    with pytest.raises(ValueError, match="neither open nor released"):
        await database.close_group("group-1", GroupState.DROPPED, "dropped: stale: 5", "dropped: stale", {}, 3.0)


async def test_a_stale_group_keeps_its_advantages_and_a_dropped_trajectory_its_fate(database: Database) -> None:
    for group in ("stale", "used"):
        names = await fill(database, group, 1.0, count=3)
        fates = {names[2]: "dropped: too long"}
        await database.close_group(
            group, GroupState.RELEASED, "mixed", "pending", {names[0]: (0.5, 0.25, 0.0)}, 2.0, fates=fates
        )
    await database.close_group("stale", GroupState.DROPPED, "dropped: stale: 5", "dropped: stale", {}, 3.0)
    await database.consume_groups(["used"], 1)
    expected = {
        "stale/0": ((0.5, 0.25, 0.0), "dropped: stale"),
        "stale/2": ((), "dropped: too long"),
        "used/0": ((0.5, 0.25, 0.0), "trained"),
        "used/2": ((), "dropped: too long"),
    }
    for name, (advantages, fate) in expected.items():
        stored = await database.trajectory(name)
        assert stored and (stored.advantages, stored.fate) == (advantages, fate)


async def test_more_groups_than_one_query_takes(database: Database) -> None:
    for number in range(520):
        await database.open_group(f"group-{number:03}", TASK, 1, float(number))
    for number in (0, 250, 519):
        await database.add_trajectory(trajectory(f"t-{number}", f"group-{number:03}"))
    waiting = await database.unfinished_groups()
    assert [number for number, group in enumerate(waiting) if group.trajectories] == [0, 250, 519]


# ---- the rest of a run ----


async def test_a_run_and_its_states(database: Database, stores: Stores) -> None:
    await database.set_control_address("127.0.0.1:9")
    run = await database.run()
    assert (run.id, run.name, run.config, run.state) == ("run-1", "demo", {"seed": 1}, RunState.RUNNING)
    assert (run.control_address, run.started, run.finished) == ("127.0.0.1:9", 1.0, None)
    await database.set_run_state(RunState.INTERRUPTED, 5.0)
    assert (await database.run()).state == RunState.INTERRUPTED
    async with await stores.open() as resumed:
        await resumed.resume_run()
        run = await resumed.run()
        assert (run.state, run.control_address, run.finished) == (RunState.RUNNING, None, None)
        assert run.config == {"seed": 1}
        await resumed.resume_run({"server": {"port": 1}})
        assert (await resumed.run()).config == {"seed": 1, "server": {"port": 1}}
        await resumed.finish_run({"success_after": math.nan, "updates": 3}, 6.0)
    run = await database.run()
    assert (run.state, run.summary, run.finished) == (RunState.FINISHED, {"success_after": None, "updates": 3}, 6.0)


async def test_runs_of_one_database_are_kept_apart(database: Database, stores: Stores) -> None:
    await database.append_events([Event(1, 1.0, "update", "{}")])
    await fill(database, "group-1", 1.0)
    await database.start_run("run-2", "later", {}, started=2.0)
    await fill(database, "group-2", 1.0, count=1)
    assert await database.events_since(0) == []
    assert await fates(database) == {"pending": 1}
    assert [run.id for run in await database.runs()] == ["run-2", "run-1"]
    async with await stores.open() as reader:
        assert reader.run_id == "run-2"
        reader._run_id = "run-1"
        assert await fates(reader) == {"pending": 2}


async def test_histories_are_of_training_rollouts_alone(database: Database) -> None:
    async def add(name: str, group: str, *, success: bool, steps: int, finished: float) -> None:
        one = trajectory(name, group, finished=finished, steps=steps)
        await database.add_trajectory(replace(one, success=success, reward=float(success)))

    await database.open_group("g1", TASK, 4, 1.0, plan="N 4: no roll-out yet")
    await database.open_group("e1", TASK, 8, 1.0, kind=GroupKind.EVALUATION)
    await database.open_group("c1", TASK, 8, 1.0, kind=GroupKind.COLLECTED)
    for number, (success, steps) in enumerate([(True, 3), (True, 1), (False, 2), (True, 2)]):
        await add(f"t{number}", "g1", success=success, steps=steps, finished=10.0 + number)
    await add("held-out", "e1", success=True, steps=3, finished=30.0)
    await add("oracle", "c1", success=True, steps=3, finished=5.0)
    copy = replace(trajectory("copy", "g1", finished=40.0), pooled_from="t1")
    reason = "3 of 4 succeeded"
    await database.close_group(
        "g1", GroupState.RELEASED, reason, "pending", {"copy": (1.0, 1.0, 1.0)}, 41.0, pooled=copy
    )
    assert await database.totals() == StoredCounts(4, 8, 0, 1, 0, {})
    assert await database.recent_outcomes(3) == [(TASK.name, True), (TASK.name, False), (TASK.name, True)]
    assert len(await database.recent_outcomes(100)) == 4
    await database.consume_groups(["g1"], 7)
    totals = await database.totals()
    assert (totals.fates, totals.trained_steps) == ({"trained": 5}, 8 + 3)
    assert await database.release_again(7) == 0
    assert await database.release_again(6) == 1
    assert (await database.totals()).fates == {}
    (history,) = await database.task_histories(window=3)
    assert history == TaskHistory("click-color", 3, (WON, LOST, WON), (3, 1, 2))
    (whole,) = await database.task_histories(window=9)
    assert whole.results == (WON, WON, LOST, WON), "the oracle's success is none of this policy's"
    assert whole.lengths == (3, 3, 1, 2), "but it says how long the task takes"
    assert [(s.trajectory_id, s.uses) for s in await database.newest_successes(2)] == [("t1", 1), ("t3", 0)]
    assert [s.trajectory_id for s in await database.newest_successes(9)] == ["oracle", "t0", "t1", "t3"]
    (group,) = await database.unfinished_groups((GroupState.RELEASED,))
    assert group.plan == "N 4: no roll-out yet" and group.kind is GroupKind.TRAINING
    assert [one.trajectory.pooled_from for one in group.trajectories] == ["", "", "", "", "t1"]


async def test_readers_keep_few_pages_in_memory(tmp_path: Path) -> None:
    async with await Database.open(sqlite_url(tmp_path / "dart.db"), tmp_path / "blobs") as database:
        kilobytes = await database.read(lambda connection: connection.exec_driver_sql("PRAGMA cache_size").scalar())
    assert kilobytes == -256


async def test_versions_and_syncs(database: Database) -> None:
    await database.add_version(1, 1, {"loss": 0.5}, 1.0)
    await database.add_version(2, 2, {"loss": math.inf}, 2.0)
    await database.add_version(2, 2, {"loss": 0.25}, 3.0)  # made again after a resume
    syncs = [SyncRecord(2, f"rollout-{number}", 1.0, 2.0 + number, 0.5, 10**10) for number in range(2)]
    for sync in reversed(syncs):
        await database.add_sync(sync)
    c = t.versions.c
    made = select(c.version, c.update, c.metrics_json).order_by(c.version)
    rows = await database.read(lambda connection: connection.execute(made).all())
    assert [tuple(row) for row in rows] == [(1, 1, '{"loss": 0.5}'), (2, 2, '{"loss": 0.25}')]
    kept = select(*(t.syncs.c[name] for name in SyncRecord.__slots__)).order_by(t.syncs.c.finished)
    rows = await database.read(lambda connection: connection.execute(kept).all())
    assert [SyncRecord(*row) for row in rows] == syncs


async def test_what_is_cancelled_while_it_waits_for_its_turn_is_written(database: Database) -> None:
    events = [Event(number, float(number), "update", "{}") for number in range(1, 101)]
    writes = [asyncio.create_task(database.append_events([event])) for event in events]
    await asyncio.sleep(0)
    for write in writes:
        write.cancel()
    await asyncio.gather(*writes, return_exceptions=True)
    await database.append_events([Event(101, 101.0, "update", "{}")])
    assert await database.last_sequence() == 101
    assert len(await database.events_since(1)) == 101


async def test_checkpoints(database: Database) -> None:
    assert await database.checkpoints() == []
    first, second = CheckpointRecord("v1", 1, 1.0), CheckpointRecord("v2", 2, 2.0, 0.75)
    await database.add_checkpoint(first)
    await database.add_checkpoint(second)
    assert await database.checkpoints() == [second, first]
    await database.drop_checkpoint("v2")
    assert await database.checkpoints() == [first]
    await database.add_checkpoint(second)
    assert await database.checkpoints() == [second, first]


async def test_events_are_watched_from_a_point(database: Database) -> None:
    assert await database.last_sequence() == 0
    events = [Event(number, float(number), "update", f'{{"n": {number}}}') for number in range(1, 6)]
    await database.append_events(events[:3])
    await database.append_events(events[3:])
    await database.append_events([])
    assert await database.events_since(3) == events[2:]
    assert await database.events_since(0, limit=2) == events[:2]
    await database.append_events([Event(6, 6.0, "group", "{}")])
    assert await database.newest_events("update") == events[-1:]
    assert await database.newest_events("update", 3) == events[:1:-1]
    assert await database.newest_events("evaluation") == []
    assert await database.last_sequence() == 6


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 511, 512, 513, 1_500])
def test_ids_are_asked_for_in_lists_of_few_lengths(number: int) -> None:
    ids = [f"g{n}" for n in range(number)]
    lists = chunks(ids)
    assert list(dict.fromkeys(one for some in lists for one in some)) == ids
    assert {len(some) for some in lists} <= {1 << power for power in range(10)}


async def test_entropies_are_those_of_the_last_update_and_of_stored_trajectories(database: Database) -> None:
    await database.open_group("g1", TASK, 2, 1.0)
    await database.add_trajectory(trajectory("t1", "g1"))

    def seen(name: str, index: int, entropy: float) -> StepEntropy:
        return StepEntropy(name, index, entropy, entropy > 0.5, b"\x00\x3c")

    await database.add_entropies(4, [seen("t1", 0, 0.2), seen("t1", 1, 0.9), seen("unknown", 0, 1.0)])
    await database.add_entropies(5, [])
    await database.add_entropies(7, [seen("t1", 0, 0.7)])
    rows = await database.read(lambda connection: connection.execute(select(t.step_entropies)).all())
    assert rows == [("t1", 0, 7, 0.7, True, b"\x00\x3c")]
