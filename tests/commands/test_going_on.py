"""What continues a run that has ended early, and what has changed since it began when it is continued."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dart.cli import main
from dart.commands import running, train
from dart.commands.changes import MOST_OF_VALUE, changes
from dart.commands.look.status import StatusOptions, status
from dart.commands.look.why import why
from dart.commands.running import JobRun
from dart.config import load
from dart.coordinator.ending import Interrupted
from dart.coordinator.run import Run
from dart.coordinator.summary import Summary
from dart.errors import UserError
from dart.inspection.condition import go_on
from dart.job import Evaluate, Train
from dart.rundir import RunDirectory
from dart.store.database import Database, sqlite_url
from dart.store.lock import Hold
from dart.store.records import RunKind, RunState

MINIWOB = Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml"


def made(directory: Path) -> RunDirectory:
    """A run that began, and was interrupted."""
    wanted = JobRun(load(MINIWOB), RunDirectory.at(directory), Train())

    async def begin() -> None:
        async with await wanted.directory.open_to_work(create=True) as database:
            await running._begun(wanted, database)
            await database.set_run_state(RunState.INTERRUPTED, 1.0)

    asyncio.run(begin())
    return wanted.directory


def command(said: str) -> str:
    """The one line that is a command."""
    (line,) = [line for line in said.splitlines() if "dart " in line]
    return line


@pytest.mark.parametrize(
    ("started", "continued"),
    [
        ("train CONFIG --set stop.updates=5", "dart train RUN/config.yaml --resume RUN"),
        ("coordinator CONFIG", "dart coordinator RUN/config.yaml --resume RUN"),
        ("coordinator CONFIG --run RUN", "dart coordinator RUN/config.yaml --run RUN"),
        (
            "coordinator CONFIG --run RUN --host 127.0.0.1",
            "dart coordinator RUN/config.yaml --run RUN --host 127.0.0.1",
        ),
        ("train OLD/config.yaml --resume OLD", "dart train OLD/config.yaml --resume OLD"),
        (
            "train OLD/config.yaml --resume OLD --set 'environment.tasks.names=[click test]'",
            "dart train OLD/config.yaml --set 'environment.tasks.names=[click test]' --resume OLD",
        ),
        ("train CONFIG --resume OLD", "dart train CONFIG --resume OLD"),
        (
            "coordinator CONFIG --run RUN --again 'dart launch slurm @run/slurm.yaml --run @run'",
            "dart launch slurm RUN/slurm.yaml --run RUN",
        ),
    ],
)
def test_an_interrupted_run_prints_the_one_command_that_continues_it_as_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, continued: str
) -> None:
    begun: list[JobRun] = []

    def run_held(wanted: JobRun, hold: Hold) -> None:
        begun.append(wanted)

    monkeypatch.setattr(train, "run_held", run_held)
    monkeypatch.setattr(train, "check_before", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    old = made(tmp_path / "an old run")
    names = {"CONFIG": MINIWOB, "OLD": old.path, "RUN": tmp_path / "given"}

    def named(words: str) -> list[str]:
        for name, path in names.items():
            words = words.replace(name, str(path).replace(" ", "\\ "))
        return shlex.split(words)

    assert CliRunner().invoke(main, named(started)).exit_code == 130
    names["RUN"] = begun[0].directory.path
    assert shlex.split(command(begun[0].to_go_on)) == named(continued)
    assert begun[0].to_go_on.splitlines()[-1] == command(begun[0].to_go_on), "on its own line"


def test_every_command_that_speaks_of_the_run_says_the_same_wherever_it_has_been_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ends(Run):
        async def execute(self, launch: Coroutine[Any, Any, None] | None = None) -> Summary:
            assert launch is not None
            launch.close()
            await self.database.set_run_state(RunState.INTERRUPTED, 1.0)
            raise Interrupted

    monkeypatch.setattr(running, "Run", Ends)
    directory = RunDirectory.at(tmp_path / "run")
    again = ("dart", "coordinator", "@run/config.yaml", "--resume", "@run")
    config = load(MINIWOB, ("model.path=builtin:tiny-qwen3vl",))
    assert running.run_in_loop(JobRun(config, directory, Train(), quiet=True, again=again)) is None
    first = capsys.readouterr().out
    assert command(first) == f"dart coordinator {directory.path}/config.yaml --resume {directory.path}"
    assert "start its workers again" in first
    moved = directory.path.rename(tmp_path / "moved")
    for show in (why, status):
        show(StatusOptions(run=moved))
        assert command(capsys.readouterr().out) == f"dart coordinator {moved}/config.yaml --resume {moved}"


@pytest.mark.parametrize(
    "recorded", [None, [], 7, "dart train", ["rm", "-rf", "/"], ["dart"], ["dart", "export", "@run"], {"dart": "train"}]
)
def test_a_run_that_recorded_no_such_command_is_continued_by_dart_train(recorded: object) -> None:
    assert command(go_on(RunKind.TRAINING, Path("r"), recorded)) == "dart train r/config.yaml --resume r"
    assert command(go_on(RunKind.EVALUATION, Path("r"), recorded)) == "dart eval r/config.yaml --resume r"


def test_what_a_run_recorded_stays_words_for_the_shell_and_the_terminal() -> None:
    said = go_on(RunKind.TRAINING, Path("a b"), ["dart", "train", "@run/c.yaml", "--set", "x=$(id)\n\x1b[2J;id"])
    assert shlex.split(command(said)) == ["dart", "train", "a b/c.yaml", "--set", "x=$(id) [2J;id"]


def test_an_evaluation_is_continued_with_its_endpoint_and_its_opponent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dart.commands import evaluate
    from dart.commands.endpoint import EndpointOptions

    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").mkdir()
    endpoint = EndpointOptions("http://127.0.0.1:1/v1", "small", "env:KEY", Path("system.txt"))
    options = evaluate.EvaluateOptions(MINIWOB, endpoint=endpoint, against="before", external_workers=True)
    said = go_on(RunKind.EVALUATION, Path("r"), evaluate._again(options, RunDirectory(Path("r"))))
    assert command(said) == (
        "dart eval r/config.yaml --resume r --endpoint http://127.0.0.1:1/v1 --endpoint-model small "
        f"--endpoint-key env:KEY --endpoint-system {tmp_path}/system.txt --against {tmp_path}/before --external-workers"
    )
    assert "start its workers again" in said


# ---- what has changed ----


def test_each_changed_field_is_one_line_with_both_values() -> None:
    before = {"environment": {"tasks": {"names": ["a", "b"]}, "slots": 4}, "stop": {"updates": None}, "model": None}
    now = {"environment": {"tasks": {"names": ["c"]}, "slots": 4}, "stop": {"updates": 5}, "model": {"path": "ä b"}}
    assert changes(before, now) == [
        "environment.tasks.names: [a, b] → [c]", "stop.updates: null → 5", "model: null → {path: ä b}",
    ]  # fmt: skip
    assert changes(now, now) == []


def test_long_values_are_shown_around_their_first_difference() -> None:
    names = [f"click-{number}" for number in range(200)]
    (line,) = changes({"names": names}, {"names": [*names[:-1], "drag"]})
    assert line == "names: …lick-198, click-199] → …lick-198, drag]"
    (line,) = changes({"names": []}, {"names": names})
    assert line.startswith("names: [] → [click-0, click-1") and line.endswith("…") and len(line) < 2 * MOST_OF_VALUE


def test_secrets_and_the_servers_own_address_are_not_shown() -> None:
    before = {
        "server": {"host": "127.0.0.1", "port": 1, "tokens": {}, "lost_after_seconds": 15.0},
        "x": {"api_key": "sk-1"},
    }
    now = {
        "server": {"host": "0.0.0.0", "port": 2, "tokens": {"env": "file:t"}, "lost_after_seconds": 9.0},
        "x": {"api_key": "sk-2"},
    }
    said = changes(before, now)
    assert said[0] == "server.lost_after_seconds: 15.0 → 9.0" and len(said) == 2 and "sk-" not in said[1]


@pytest.mark.parametrize(("job", "field"), [(Train(), "environment.tasks.names"), (Evaluate(), "environment.slots")])
async def test_a_run_that_is_continued_with_another_config_says_what_changed_since_it_began(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: Train | Evaluate,
    field: str,
) -> None:
    value = "[click-test]" if "names" in field else "3"
    changed = f"{field}={value}"
    wanted = JobRun(load(MINIWOB, (changed,)), RunDirectory(tmp_path), job)
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await running._begun(replace(wanted, config=load(MINIWOB)), database)
        take_up = running._resumed if isinstance(job, Train) else running._continued
        for _ in range(2):  # the second time too: it is the beginning that counts
            await database.set_run_state(RunState.INTERRUPTED, 1.0)
            start = await take_up(wanted, database)
            (line,) = start.changed
            assert line.startswith(f"{field}: ") and line.endswith(f" → {value}")
            assert capsys.readouterr().out == f"changed since the run began:\n  {line}\n"
        await database.set_run_state(RunState.INTERRUPTED, 1.0)
        assert (await take_up(replace(wanted, config=load(MINIWOB)), database)).changed == ()
        assert capsys.readouterr().out == ""


def test_what_changed_is_an_event_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made(tmp_path)

    class Ends(Run):
        async def execute(self, launch: Coroutine[Any, Any, None] | None = None) -> Summary:
            assert launch is not None
            launch.close()
            await self.journal.flush(self.database)
            raise UserError("the end")

    monkeypatch.setattr(running, "Run", Ends)
    config = load(directory.config, ("stop.updates=7",))
    with pytest.raises(UserError, match="the end"):
        running.run_in_loop(JobRun(config, directory, Train(), quiet=True, resume=True))
    (event,) = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert event["event"] == "config_changed" and event["changed"][0].startswith("stop.updates: ")


def test_a_run_that_ends_for_what_the_machine_is_short_of_says_that_and_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def short(_: JobRun, run: Run) -> None:
        await run.address
        raise ExceptionGroup("", [MemoryError()])

    monkeypatch.setattr(running, "_launch", short)
    ended = CliRunner().invoke(main, ["coordinator", str(MINIWOB), "--run", str(tmp_path / "run"), "--quiet"])
    assert ended.exit_code == 1, "it may be started again"
    assert "error: too little memory: end other programs" in ended.output
    assert "; all finished work is kept; continue with this command" in ended.output
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (failed,) = [event["why"] for event in events if event["event"] == "failed"]
    assert failed.startswith("too little memory: ")
