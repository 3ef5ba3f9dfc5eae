"""`dart why` and `dart status` of a run that does not answer: from its database alone."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from dart.cli import main
from dart.commands.look.status import Found, Past, StatusOptions, status, watch
from dart.commands.look.why import why
from dart.core.json_text import JSON, to_json
from dart.core.progress import Counts
from dart.core.status import Figures, Stall, Status, Usage
from dart.inspection.opening import RunFiles
from dart.inspection.wording import details, quiet_line, stall_lines
from dart.rundir import RunDirectory
from dart.store.records import Event, RunState

OLD = Path(__file__).parents[1] / "store" / "schema_0002.sql"
HUNG = {
    "kind": "trainer",
    "waits": "update 3",
    "waits_for": "train-0 (rank 0), which has not answered train_batch for 700 s",
    "seconds": 702.0,
    "culprit": "train-0 (rank 0)",
    "advice": "look at its log",
}
RESETS = {"kind": "step", "waits": "sampling (no environment answers)", "waits_for": "env-0", "seconds": 61.0,
          "culprit": "env-0", "failure": "env-0: \x1b[31mno disk", "advice": "look at its log"}  # fmt: skip


async def left_behind(
    directory: Path, events: Sequence[tuple[str, dict[str, JSON]]], state: RunState | None = None
) -> Path:
    """A run directory with these events; no state: its process was killed."""
    async with await RunDirectory(directory).open_to_work(create=True) as database:
        await database.start_run("run-1", "test", {}, started=1.0)
        rows = [Event(number, 1000.0 + number, kind, to_json(told)) for number, (kind, told) in enumerate(events, 1)]
        await database.append_events(rows)
        if state is not None:
            await database.set_run_state(state, 2000.0)
    return directory


@pytest.mark.parametrize("command", ["status RUN", "why RUN", "show --run RUN", "train CONFIG --resume RUN"])
def test_a_run_that_ended_before_it_began_is_one_message(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart.commands.train.check_before", lambda *_: None)
    config = Path(__file__).parents[2] / "configs" / "ladder_demo.yaml"

    async def began() -> None:
        await (await RunDirectory(tmp_path).open_to_work(create=True)).close()

    asyncio.run(began())
    arguments = command.replace("RUN", str(tmp_path)).replace("CONFIG", str(config)).split()
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert "holds no run: it" in done.output
    with RunDirectory(tmp_path).lock():
        begins = CliRunner().invoke(main, ["show", "--run", str(tmp_path)])
    assert "holds no run: it is about to begin: look again" in begins.output


def told(directory: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool = False) -> str:
    why(StatusOptions(run=directory, as_json=as_json))
    return capsys.readouterr().out


async def in_thread(directory: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool = False) -> str:
    return await asyncio.to_thread(told, directory, capsys, as_json=as_json)


async def test_a_process_that_was_killed_while_an_update_hung(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[tuple[str, dict[str, JSON]]] = [
        ("phase", {"phase": "training"}), ("update", {"update": 2}), ("stalled", RESETS),
        ("moving", {"kind": "step", "culprit": "env-0"}), ("stalled", HUNG),
    ]  # fmt: skip
    said = await in_thread(await left_behind(tmp_path, events), capsys)
    assert said.startswith("run-1: interrupted while it was training\nits process ended without recording why")
    assert (
        "stalled for 11:42: update 3 waits for train-0 (rank 0), which has not answered train_batch for 700 s" in said
    )
    assert "sampling" not in said, "that stall was over"
    assert "the last update was at" in said and "the last event, stalled, was at" in said and "--resume" in said


async def test_a_run_that_failed_says_what_it_said_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[tuple[str, dict[str, JSON]]] = [
        ("phase", {"phase": "training"}), ("stalled", RESETS), ("attempt_failed", {"why": "env-0: no disk"}),
        ("failed", {"why": "32 attempts in a row failed"}), ("phase", {"phase": "failed"}),
    ]  # fmt: skip
    directory = await left_behind(tmp_path, events, RunState.FAILED)
    said = await in_thread(directory, capsys)
    assert "failed while it was training\nit ended because: 32 attempts in a row failed" in said
    assert "its last failure: env-0: [31mno disk" in said, "no worker's words move the cursor"
    assert "an attempt failed at" in said
    document = json.loads(await in_thread(directory, capsys, as_json=True))
    assert (document["state"], document["why"]) == ("failed", "32 attempts in a row failed")
    assert [stall["culprit"] for stall in document["stalls"]] == ["env-0"]


async def test_what_stopped_an_earlier_process_of_the_run_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[tuple[str, dict[str, JSON]]] = [
        ("phase", {"phase": "training"}), ("stalled", HUNG), ("attempt_failed", {"why": "no disk"}),
        ("phase", {"phase": "interrupted"}), ("phase", {"phase": "starting", "begins": True}),
        ("phase", {"phase": "training"}), ("update", {"update": 3}),
    ]  # fmt: skip
    said = await in_thread(await left_behind(tmp_path, events, RunState.INTERRUPTED), capsys)
    assert said.startswith("run-1: interrupted while it was training")
    assert "stalled for" not in said and "an attempt failed" not in said


async def test_a_finished_run_has_nothing_to_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[tuple[str, dict[str, JSON]]] = [("stalled", HUNG), ("phase", {"phase": "finished"})]
    said = await in_thread(await left_behind(tmp_path, events, RunState.FINISHED), capsys)
    assert said.startswith("run-1: finished\n") and "stalled for" not in said and "--resume" not in said


def test_a_run_of_an_older_dart_is_told_of_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path)
    with closing(sqlite3.connect(run.database)) as connection:
        connection.executescript(OLD.read_text(encoding="utf-8"))
    before = run.database.read_bytes()
    for show in (status, why):
        show(StatusOptions(run.path))
        assert "old" in capsys.readouterr().out
    assert run.database.read_bytes() == before


async def test_a_coordinator_that_does_not_answer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(await left_behind(tmp_path, [("phase", {"phase": "training"})]))
    async with await run.open_to_work() as database:
        await database.set_control_address("127.0.0.1:1")
    with run.lock():
        said = await in_thread(run.path, capsys)
        assert said.startswith(
            "run-1: running while it was training\nits coordinator at 127.0.0.1:1 does not answer\nthe last event"
        )
        document = json.loads(await in_thread(run.path, capsys, as_json=True))
        assert document["silent_coordinator"] == "127.0.0.1:1"
        for show in (status, watch):
            await asyncio.to_thread(show, StatusOptions(run.path))
            said = capsys.readouterr().out
            assert said.startswith("run-1: running") and "its coordinator at 127.0.0.1:1 does not answer" in said
        await asyncio.to_thread(status, StatusOptions(run.path, as_json=True))
        assert json.loads(capsys.readouterr().out)["silent_coordinator"] == "127.0.0.1:1"
    assert "does not answer" not in await in_thread(run.path, capsys)


async def test_the_newest_run_is_the_one_that_began_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (3, 1, 2):  # the last to be written to is not the last that began
        run = RunDirectory(tmp_path / "runs" / f"run-{number}")
        run.path.mkdir(parents=True)
        await left_behind(run.path, [], RunState.FINISHED)
        run.config.write_text("")
        os.utime(run.config, (number, number))
    monkeypatch.chdir(tmp_path)
    found = [RunDirectory.all_under(Path("runs")), RunDirectory.all_below(tmp_path)]
    assert [[run.name for run in runs] for runs in found] == [["run-3", "run-2", "run-1"]] * 2
    asked: list[Path | None] = []

    async def find(options: StatusOptions, read: Callable[[RunFiles], Awaitable[Past]]) -> Found[Past]:
        asked.append(options.run)
        async with await RunFiles.open(RunDirectory.chosen(options.run)) as files:
            return Found(None, await read(files))

    monkeypatch.setattr("dart.commands.look.status.find", find)
    await asyncio.to_thread(watch, StatusOptions())
    assert asked == [Path("runs/run-3")] * 2, "a run that begins meanwhile is another one"


def test_a_stall_on_lines() -> None:
    stall = Stall.from_json(RESETS)
    assert list(stall_lines(stall)) == [
        "stalled for 01:01: sampling (no environment answers) waits for env-0",
        "  its last failure: env-0: [31mno disk",
        "  what to do: look at its log",
    ]
    paused = Stall("paused", "sampling", "a person", 5.0, "a person", deliberate=True)
    assert list(stall_lines(paused)) == ["waiting for 00:05: sampling waits for a person"]
    assert quiet_line({"step": 2.2, "episode": 40.0}) == "last episode 40 s ago, last step 2 s ago"


def test_the_status_says_how_many_tokens_are_trained_on() -> None:
    usage = Usage(trained_tokens_per_minute=120_000.0)
    assert any("(2,000 tokens/s)" in line for line in details(Status("run", "training", Figures(usage=usage))))


def test_the_status_says_how_much_of_the_prompts_was_cached() -> None:
    lines = list(details(Status("run", "training", Figures(Counts(prompt_tokens=4000, cached_tokens=2520)))))
    assert lines[1:] == ["prompts: 63% of their tokens were in a replica's prefix cache"]
    assert not any("prompts" in line for line in details(Status("run", "training")))


def test_the_status_says_which_rules_reading_took() -> None:
    counts = Counts(unparsable=1, reading_rules={"one-line": 2, "quo\x1btes": 12})
    lines = list(details(Status("run", "training", Figures(counts))))
    assert lines[-2:] == ["unparsable 1", "steps read by a rule: quotes 12, one-line 2"]
    assert not any("by a rule" in line for line in details(Status("run", "training")))
