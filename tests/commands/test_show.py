"""`dart show`, `dart runs` and `dart status --watch` on runs that are there already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dashboards.made import execute, small_run
from dashboards.made_run import Shape

from dart.cli import main
from dart.commands.look.status import _document
from dart.core.progress import Counts
from dart.core.status import Figures, Status
from dart.rundir import RunDirectory

HOSTILE = "\x1b[31m[bold]evil[/bold]\x07"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    made = small_run(tmp_path_factory.mktemp("made"), Shape(trajectories=40, steps=3, tasks=3, width=160, height=100))
    execute(
        made,
        ("update trajectories set instruction = ? where id = 'g000001-2'", (HOSTILE,)),
        ("update steps set text = ? where trajectory_id = 'g000001-2'", (f"Thought: {HOSTILE}\nAction: x",)),
    )
    return made


def dart(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_a_trajectory_is_shown_step_by_step(run: RunDirectory) -> None:
    told = json.loads(dart("show", "g000002-1", "--run", run.path, "--json").output)
    shown = dart("show", "g000002-1", "--run", run.path)
    assert shown.exit_code == 0
    for number, step in enumerate(told["steps"], 1):
        assert f"step {number} of {len(told['steps'])}: {step['label']}" in shown.output
        assert step["thought"] in shown.output
    assert f"reward {told['row']['reward']:g}" in shown.output and told["row"]["fate"] in shown.output
    one = dart("show", "g000002-1", "--run", run.path, "--step", 1)
    assert "step 1 of" in one.output and "step 2 of" not in one.output


def test_without_a_name_it_is_the_newest(run: RunDirectory) -> None:
    assert json.loads(dart("show", "--run", run.path, "--json").output)["row"]["finished"] == max(
        json.loads(dart("show", f"g{group:06d}-{number}", "--run", run.path, "--json").output)["row"]["finished"]
        for group in range(5)
        for number in range(1, 9)
    )


@pytest.mark.filterwarnings("ignore:Image.Image.getdata is deprecated")
def test_pictures_are_drawn_when_asked_for(run: RunDirectory) -> None:
    pytest.importorskip("textual_image")
    plain, drawn = (
        dart("show", "g000002-1", "--run", run.path),
        dart("show", "g000002-1", "--run", run.path, "--images"),
    )
    assert len(drawn.output.splitlines()) >= len(plain.output.splitlines()) + 10


def test_what_a_model_wrote_moves_no_cursor(run: RunDirectory) -> None:
    shown = dart("show", "g000001-2", "--run", run.path).output
    assert "\x1b" not in shown and "\x07" not in shown and "[bold]evil[/bold]" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("no-such",), "no-such"),
        (("g000002-1", "--step", "99"), "--step 99: g000002-1 has steps 1 to"),
    ],
)
def test_what_is_not_there_is_named(run: RunDirectory, words: tuple[str, ...], told: str) -> None:
    shown = dart("show", *words, "--run", run.path)
    assert shown.exit_code == 2 and told in shown.output


def test_runs_are_listed_with_their_state_and_success(run: RunDirectory) -> None:
    (row,) = json.loads(dart("runs", run.path.parent, "--json").output)
    shown = dart("runs", run.path.parent).output
    assert row["state"] in shown and f"{row['success_rate']:.1%}" in shown and str(run.path) in shown


def test_a_narrow_terminal_shows_the_whole_name_of_a_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dart.commands.look.status.WIDEST", 80)
    lines = dart("runs", run.path.parent).output.splitlines()
    column = lines[0].index("run ")
    width = lines[0].index("updates") - column
    assert str(run.path) in "".join(line[column : column + width].strip() for line in lines[1:])


def test_a_long_answer_is_cut_with_a_word(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dart("show", "g000001-1", "--run", run.path).output
    monkeypatch.setattr("dart.commands.look.show.MOST_TEXT", 10)
    assert "more characters: `dart view` shows all" in dart("show", "g000001-1", "--run", run.path).output
    assert "more characters" not in whole


def test_programs_read_one_document_of_a_live_run_and_of_a_past_one(run: RunDirectory) -> None:
    past = json.loads(dart("status", run.path, "--json").output)
    live = _document(Status(run.name, "training", Figures(Counts(updates=0))))
    assert live.keys() <= past.keys()
    assert (live["state"], live["updates"], live["success_rate"]) == ("training", 0, None), "zeros are not left out"
    assert past["state"] == "interrupted" and past["updates"] > 0 and past["figures"]["counts"]["env_steps"] > 0


def test_a_run_that_is_over_is_not_watched(run: RunDirectory) -> None:
    shown = dart("status", run.path, "--watch")
    assert shown.exit_code == 0 and "interrupted" in shown.output
    both = dart("status", run.path, "--watch", "--json")
    assert both.exit_code == 2 and "leave one of them out" in both.output
