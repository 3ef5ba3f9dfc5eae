"""What the pages are told of a run: from its files alone, whatever state they are in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from dashboards.made import SMALL, evaluate, event, execute, in_postgresql, opened, small_run

from benchmarks.stores.servers import PostgreSQL
from dart.agent.thought import split_thought
from dart.errors import UserError
from dart.inspection.inspector import Inspector, compare
from dart.inspection.opening import NotFound
from dart.inspection.runs import SECRET, masked, rows_of, run_directories
from dart.inspection.trajectories import _evidence
from dart.rundir import RunDirectory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return small_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run(made: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy that the test may change."""
    shutil.copytree(made.path, tmp_path / made.name)
    return RunDirectory(tmp_path / made.name)


async def test_pages_of_trajectories_give_each_once_and_newest_first(made: RunDirectory) -> None:
    async with opened(made) as it:
        seen, after = [], ""
        while True:
            page = await it.trajectories(after=after, limit=50)
            seen += page.rows
            after = page.next
            if not after:
                break
        assert len({row.id for row in seen}) == len(seen) == SMALL.trajectories
        assert [row.finished for row in seen] == sorted((row.finished for row in seen), reverse=True)
        wins = await it.trajectories(success=True, limit=500)
        assert {row.id for row in wins.rows} == {row.id for row in seen if row.success}
        dropped = await it.trajectories(fate="dropped", limit=500)
        assert {row.id for row in dropped.rows} == {row.id for row in seen if row.fate.startswith("dropped: ")}
        with pytest.raises(UserError, match="after: 'nobody' is not a trajectory"):
            await it.trajectories(after="nobody")


async def test_numbers_of_tasks_are_those_of_their_trajectories(made: RunDirectory) -> None:
    async with opened(made) as it:
        everything = (await it.trajectories(limit=500)).rows
        for row in await it.tasks():
            own = [one for one in everything if one.task == row.name]
            assert row.trajectories == len(own)
            assert row.successes == sum(one.success for one in own)
            newest = sorted(own, key=lambda one: (one.finished, one.id))[-32:]
            assert row.recent_success == pytest.approx(sum(one.success for one in newest) / len(newest))
            detail = await it.task(row.suite, row.name)
            assert sum(point.trajectories for point in detail.history) == len(own)
            assert sum(point.successes for point in detail.history) == row.successes
            assert max(p.trajectories for p in detail.history) - min(p.trajectories for p in detail.history) <= 1
        with pytest.raises(NotFound):
            await it.task("made", "unknown")


def configure(run: RunDirectory, path: str, value: object) -> None:
    changed = f"update runs set config_json = json_set(config_json, '$.{path}', json(?))"
    execute(run, (changed, [json.dumps(value)]))


async def test_the_pool_holds_what_its_settings_allow(run: RunDirectory) -> None:
    """Not every success that there ever was."""
    async with opened(run) as it:
        successes = max(row.successes or 0 for row in await it.tasks())
    assert successes > 3
    for settings, most in (({"per_task": 3}, 3), ({"enabled": False}, 0), ({"per_task": 100}, successes)):
        configure(run, "curation.pool", settings)
        async with opened(run) as it:
            rows = await it.tasks()
            assert max(row.pooled for row in rows) == most
            for row in rows:
                assert len((await it.task(row.suite, row.name)).pool) == row.pooled
    execute(run, ("update trajectories set newest_version = -1", ()))
    configure(run, "curation.pool", {"per_task": 3, "max_age": 1})
    async with opened(run) as it:
        assert {row.pooled for row in await it.tasks()} == {0}
    execute(run, ("update trajectories set newest_version = null", ()))
    configure(run, "curation.pool", {"per_task": 3, "max_age": 1000})
    async with opened(run) as it:
        assert max(row.pooled for row in await it.tasks()) == 3, "what no policy sampled counts as version 0"


async def test_a_collection_shows_no_success_because_it_stores_no_failure(run: RunDirectory) -> None:
    execute(run, ("update groups set kind = 'collected'", ()), ("delete from trajectories where not success", ()))
    async with opened(run) as it:
        rows = await it.tasks()
        assert [(row.successes, row.recent_success) for row in rows] == [(None, None)] * len(rows) and rows
        detail = await it.task(rows[0].suite, rows[0].name)
        assert (detail.history, detail.pool) == ((), ())


async def test_deleted_events_are_told_of(run: RunDirectory) -> None:
    async with opened(run) as it:
        assert not [note for note in (await it.overview()).missing if "retention.events" in note]
    configure(run, "retention", {"events": 1})
    async with opened(run) as it:
        (note,) = [note for note in (await it.overview()).missing if "retention.events" in note]
    assert note.startswith("Events older than the newest 1 were deleted")


async def test_a_task_shows_the_plan_of_its_newest_group_and_the_limit_of_its_newest_rollout(run: RunDirectory) -> None:
    execute(
        run,
        ("update groups set planned = 4, plan = 'the newest' where opened = (select max(opened) from groups)", ()),
        ("update trajectories set step_limit = 7 where finished = (select max(finished) from trajectories)", ()),
    )
    async with opened(run) as it:
        newest = (await it.trajectories(limit=1)).rows[0]
        rows = {row.name: (row.rollouts, row.step_limit, row.plan) for row in await it.tasks()}
    assert rows.pop(newest.task) == (4, 7, "the newest")
    assert {row[:2] for row in rows.values()} == {(8, 30)}


async def test_every_page_says_the_same_of_a_run_in_postgresql(
    run: RunDirectory, tmp_path: Path, postgresql_server: PostgreSQL
) -> None:
    evaluate(run, "before-greedy-v0", [True, False])
    evaluate(run, "after-greedy-v9", [True, True], opened=5.0)
    event(run, 9001, "plan", json.dumps({"task": "task-0001", "reason": "N 4: CUDA is out of memory"}))
    (tmp_path / "moved").mkdir()
    moved = await in_postgresql(run, tmp_path / "moved", postgresql_server.url)
    async with opened(run) as here, opened(moved) as there:
        for ask in PAGES:
            page, same = await ask(there), await ask(here)
            assert repr(page).replace(str(moved.path), str(run.path)) == repr(same)


async def _tasks(it: Inspector) -> object:
    rows = await it.tasks()
    return rows, [await it.task(row.suite, row.name) for row in rows]


async def _trajectories(it: Inspector) -> object:
    first = await it.trajectories(limit=3)
    later = await it.trajectories(kind="training", success=False, fate="dropped", after=first.next)
    return first, later, [(await it.trajectory(row.id), await it.group(row.group)) for row in first.rows]


async def _compared(it: Inspector) -> object:
    before, after = await it.sides()
    return before, after, await compare(it, before.evaluation, it, after.evaluation)


PAGES: tuple[Callable[[Inspector], Awaitable[object]], ...] = (
    Inspector.row,
    Inspector.overview,
    Inspector.status,
    Inspector.curves,
    Inspector.timeline,
    lambda it: it.episodes(0.0, float("inf")),
    _tasks,
    _trajectories,
    _compared,
    lambda it: it.events(limit=20),
    lambda it: it.events(kinds=("plan",), text="cuda is OUT", task="task-0001", start=1.0, before=10_000),
    Inspector.pulse,
)


async def test_a_trajectory_has_its_steps_group_and_screenshots(made: RunDirectory) -> None:
    async with opened(made) as it:
        row = (await it.trajectories(limit=1)).rows[0]
        detail = await it.trajectory(row.id)
        assert [step.index for step in detail.steps] == list(range(row.steps))
        assert detail.steps[-1].label.startswith("finish")
        assert detail.steps[0].thought == "step 0."
        assert len(detail.steps[0].logprobs) == len(detail.steps[0].token_ids) == SMALL.tokens
        image = detail.steps[0].image
        assert image is not None
        assert image.held
        data, kind = await it.image(image.sha256)
        assert (kind, data[:4]) == ("image/png", b"\x89PNG")
        group = await it.group(row.group)
        assert row.id in {member.row.id for member in group.members} == {sibling.id for sibling in detail.siblings}
        with pytest.raises(NotFound):
            await it.trajectory("nobody")
        with pytest.raises(NotFound):
            await it.image("../../config.yaml")


async def test_two_evaluations_are_compared_on_their_instances(run: RunDirectory) -> None:
    evaluate(run, "before-greedy-v0", [True] * 10 + [False] * 30)
    evaluate(run, "after-greedy-v9", [False] * 2 + [True] * 36, opened=5.0)
    async with opened(run) as it:
        before, after = await it.sides()
        assert (before.title, before.episodes, before.success) == ("before training, greedy, version 0", 40, 0.25)
        assert after.success == pytest.approx(36 / 38)
        found = await compare(it, before.evaluation, it, after.evaluation)
        assert (found.common, found.only_first, found.only_second) == (38, 2, 28)
        assert found.difference == pytest.approx(36 / 38 - 10 / 38)
        assert found.low < found.difference < found.high
        assert [pair.first_success != pair.second_success for pair in found.pairs[:30]] == [True] * 30
        with pytest.raises(NotFound, match="it has before-greedy-v0, after-greedy-v9"):
            await compare(it, "nothing", it, after.evaluation)


# ---- runs in any state ----


async def test_a_killed_run_says_so_and_how_to_go_on(run: RunDirectory) -> None:
    execute(run, ("update runs set state = 'running'", ()))
    async with opened(run) as it:
        status = await it.status()
        assert not status.live
        assert status.status.phase == "interrupted"
        began = (await it.row()).started
        assert status.status.elapsed_seconds == (await it.events(limit=1)).rows[0].unix_seconds - began > 0
        words = "\n".join(status.why)
        assert "it was killed" in words
        assert "--resume" in words


async def test_a_hung_trainer_and_failing_resets_are_in_the_words_of_the_watchdog(run: RunDirectory) -> None:
    stall = {
        "kind": "update", "waits": "update 4", "waits_for": "the trainer", "since_unix_seconds": 1.0, "seconds": 700.0,
        "culprit": "train", "failure": "CUDA error: device-side assert",
    }  # fmt: skip
    event(run, 9001, "stalled", json.dumps(stall))
    event(run, 9002, "attempt_failed", json.dumps({"trajectory": "g1-1", "attempt": 1, "why": "reset: no browser"}))
    execute(run, ("update runs set state = 'running'", ()))
    async with opened(run) as it:
        words = "\n".join((await it.status()).why)
    assert "CUDA error: device-side assert" in words
    assert "reset: no browser" in words


async def test_bytes_of_an_endpoint_are_no_tokens_of_the_model(run: RunDirectory) -> None:
    async with opened(run) as it:
        first = (await it.trajectories(limit=1)).rows[0].id
        assert (await it.overview()).token_texts and (await it.trajectory(first)).steps[0].token_texts
    execute(run, ("update runs set config_json = json_set(config_json, '$.vocabulary', null)", ()))
    async with opened(run) as it:
        assert not (await it.overview()).token_texts and (await it.trajectory(first)).steps[0].token_texts is None


def test_a_config_is_masked_whatever_its_secrets_are_called_and_look_like() -> None:
    environment = {"kind": "webapps", "options": {"api_key": "abc/def==", "apiToken": "x", "keys": ["ENTER"]}}
    options = environment["options"] | {"url": "https://me:pw@host/x?a=b@c", "headers": {"Authorization": "Bearer x"}}
    environment = environment | {"options": options}
    config = {
        "environment": environment,
        "rollout": {"environment": {"HF_TOKEN": "hf_1", "HTTPS_PROXY": "http://me:pw@proxy"}, "max_tokens": 512},
        "server": {"tls_key": "/etc/tls.key", "tokens": {"control": "env:CONTROL"}, "token": "file:/run/token"},
        "cluster": {"k8s": {"values": {"coordinator": {"environment": {"PGPASSWORD": "pw"}}}}},
    }
    hidden = {
        "environment": environment
        | {
            "options": {
                "api_key": SECRET,
                "apiToken": SECRET,
                "keys": ["ENTER"],
                "url": f"https://{SECRET}@host/x?a=b@c",
                "headers": {"Authorization": SECRET},
            }
        },
        "rollout": {"environment": {"HF_TOKEN": SECRET, "HTTPS_PROXY": SECRET}, "max_tokens": 512},
        "server": config["server"] | {"tls_key": SECRET},
        "cluster": {"k8s": {"values": {"coordinator": {"environment": {"PGPASSWORD": SECRET}}}}},
    }
    assert masked(config) == hidden
    assert masked({"run": "r", "config": config}) == {"run": "r", "config": hidden}, "in a summary"


async def test_neither_the_config_nor_the_summary_shows_a_secret(run: RunDirectory) -> None:
    lines = ["export HF_TOKEN=hf_1", "module load cuda/12.8"]
    config = {"rollout": {"environment": {"HF_TOKEN": "hf_1"}}, "cluster": {"slurm": {"setup": lines}}}
    told = (json.dumps(config), json.dumps({"config": config, "updates": 3}))
    execute(run, ("update runs set config_json = ?, summary_json = ?", told))
    async with opened(run) as it:
        overview = await it.overview()
    assert overview.summary == {"config": overview.config, "updates": 3}
    assert overview.config == {
        "rollout": {"environment": {"HF_TOKEN": SECRET}},
        "cluster": {"slurm": {"setup": [f"export HF_TOKEN={SECRET}", "module load cuda/12.8"]}},
    }


async def test_missing_screenshots_are_told(run: RunDirectory) -> None:
    async with opened(run) as it:
        there = [one for row in (await it.trajectories(limit=2)).rows for one in (await it.trajectory(row.id)).steps]
    kept = [step.image.sha256 for step in there if step.image]
    execute(run, (f"delete from screenshots where hex(sha256) not in ({', '.join('?' * len(kept))})",
                  [name.upper() for name in kept]))  # fmt: skip
    for file in [one for one in run.blobs.rglob("*") if one.is_file()]:
        file.unlink()
    async with opened(run) as it:
        (note,) = [note for note in (await it.overview()).missing if "looked for" in note]
        lost, _, looked_for = note.split()[:3]
        assert int(lost) == int(looked_for) < 200
    shutil.rmtree(run.blobs)
    async with opened(run) as it:
        assert any("screenshot" in note for note in (await it.overview()).missing)
        detail = await it.trajectory((await it.trajectories(limit=1)).rows[0].id)
        image = detail.steps[0].image
        assert image is not None
        assert not image.held
        with pytest.raises(NotFound, match="was removed"):
            await it.image(image.sha256)


async def test_a_run_is_read_while_another_process_writes_it(run: RunDirectory) -> None:
    writer = (
        "import sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('begin immediate')\n"
        "c.execute(\"update trajectories set instruction = 'changed'\")\n"
        "print('writing', flush=True)\n"
        "sys.stdin.readline()\n"
        "c.execute('commit')\n"
    )
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", writer, str(run.database)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    async with opened(run) as it:
        assert (await it.trajectories(limit=1)).rows[0].instruction != "changed"
        process.communicate("\n")
        assert (await it.trajectories(limit=1)).rows[0].instruction == "changed"


async def test_a_directory_that_cannot_be_written_to_is_read_and_left_alone(run: RunDirectory) -> None:
    index = f"{run.database.name}-shm"  # SQLite's own, made anew by whoever opens the database
    files = [file for file in run.path.rglob("*") if file.is_file() and file.name != index]
    before = {file: file.stat().st_mtime_ns for file in files}
    run.path.chmod(0o555)
    try:
        async with opened(run) as it:
            assert len((await it.trajectories(limit=500)).rows) == SMALL.trajectories
    finally:
        run.path.chmod(0o755)
    assert {file: file.stat().st_mtime_ns for file in before} == before


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is not a dart database, or is damaged"), (b"x" * 5000, "is not a dart database, or is damaged")],
)
async def test_what_is_no_database_is_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.database.write_bytes(content)
    with pytest.raises(UserError, match=words):
        await Inspector.open(run)
    (row,) = await rows_of(run_directories([tmp_path]))
    assert words in row.problem


async def test_one_damaged_run_does_not_hide_the_others(run: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "damaged")
    execute(RunDirectory(tmp_path / "damaged"), ("update runs set config_json = '{'", ()))
    rows = {row.id: row.problem for row in await rows_of(run_directories([tmp_path]))}
    assert rows[run.name] == ""
    assert "is damaged" in rows["damaged"]


async def test_the_timeline_shows_workers_syncs_and_updates(run: RunDirectory) -> None:
    told = [
        ("worker", {"worker": "rollout-7", "state": "ready", "slots": 16, "role": "rollout"}),
        ("sync_started", {"replica": "rollout-7", "version": 9}),
        ("sync", {"replica": "rollout-7", "version": 9, "seconds": 1.0, "pause_seconds": 0.1}),
        ("left_out", {"replicas": ["rollout-7", "gpu-3"], "reason": "version 10 could not be sent"}),
        ("update", {"update": 90, "version": 90, "trainer": {"round_trip_seconds": 30.0}}),
        ("checkpoint", {"version": 90, "path": "v90"}),
    ]
    for number, (kind, data) in enumerate(told):
        event(run, 9_000 + number, kind, json.dumps(data))
    async with opened(run) as it:
        lanes = {lane.worker: lane for lane in (await it.timeline()).lanes}
        (told_of,) = (await it.events(kinds=("left_out",))).rows
    assert told_of.text == "rollout-7, gpu-3 take no weights: version 10 could not be sent"
    assert [span.state for span in lanes["rollout-7"].spans] == ["ready", "syncing", "ready"]
    marks = [(mark.kind, mark.text) for mark in lanes["rollout-7"].marks]
    assert marks == [("version", "version 9"), ("left out", "version 10 could not be sent")]
    assert [mark.kind for mark in lanes["gpu-3"].marks] == ["left out"]
    (training,) = [span for span in lanes["trainer"].spans if span.detail == "update 90"]
    assert training.state == "training" and training.end is not None and training.end - training.start == 30.0
    assert {"version", "checkpoint"} <= {mark.kind for mark in lanes["trainer"].marks}


async def test_a_step_shows_what_selection_saw_of_it(run: RunDirectory) -> None:
    async with opened(run) as it:
        trained = (await it.trajectories(fate="trained", limit=1)).rows[0]
        steps = (await it.trajectory(trained.id)).steps
        assert [step.selected for step in steps] == [False, *[True] * (len(steps) - 1)]
        for step in steps:
            assert len(step.token_entropies) == len(step.token_ids)
            assert step.entropy == pytest.approx(sum(step.token_entropies) / len(step.token_entropies), abs=1e-3)
        dropped = (await it.trajectories(fate="dropped", limit=1)).rows[0]
        for step in (await it.trajectory(dropped.id)).steps:
            assert (step.entropy, step.selected, step.token_entropies) == (None, None, ())


async def test_episodes_are_packed_into_as_few_lanes_as_ran_at_once(run: RunDirectory) -> None:
    times = {"1": (10.0, 20.0), "2": (12.0, 15.0), "3": (15.0, 30.0), "4": (21.0, 25.0)}
    move = "update trajectories set started = ?, finished = ? where id = ?"
    execute(run, *((move, (*span, f"g000001-{name}")) for name, span in times.items()))
    async with opened(run) as it:
        found = await it.episodes(5.0, 100.0)
        lanes = [[span.detail.split(":")[0] for span in lane.spans] for lane in found.lanes]
        assert lanes == [["g000001-1", "g000001-4"], ["g000001-2", "g000001-3"]] and found.count == 4
        assert {span.state for lane in found.lanes for span in lane.spans} <= {"success", "failure"}
        assert [len(lane.spans) for lane in (await it.episodes(22.0, 24.0)).lanes] == [1, 1]
        everything = await it.episodes(0.0, float("inf"))
        assert everything.count == SMALL.trajectories


async def test_too_many_episodes_are_counted_and_not_shown(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dart.inspection.timeline.MOST_EPISODES", 50)
    async with opened(run) as it:
        found = await it.episodes(0.0, float("inf"))
    assert (found.count, found.lanes) == (SMALL.trajectories, ())


@pytest.mark.parametrize("text", ["no JSON", "[" * 65_536, "NaN{"])
def test_evidence_that_is_not_json_is_shown_as_it_is(text: str) -> None:
    assert _evidence(text) == {"evidence": text}


def test_dividing_a_text_takes_time_in_proportion_to_it() -> None:
    assert split_thought("\n" * 1_000_000 + "  Action: wait()") == ("", "Action: wait()")
    assert split_thought("Thought: here\n\n\tAction: wait()") == ("here", "Action: wait()")
