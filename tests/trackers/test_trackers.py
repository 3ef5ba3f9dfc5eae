"""Each tracker records a run without a server; what it recorded is read back from its own files."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner, Result
from dashboards.made import event, execute, small_run
from dashboards.made_run import Shape
from pydantic import JsonValue
from tracking.read_back import SWANLAB, read_back

from dart.cli import main
from dart.commands.track import last_words
from dart.config.run import TrackerKind
from dart.errors import UserError
from dart.inspection.inspector import Inspector
from dart.inspection.records import Curves
from dart.inspection.runs import SECRET
from dart.rundir import RunDirectory
from dart.trackers import base, following
from dart.trackers.following import FRAME_WIDTH, FRAMES, Following, sheet

KINDS = ("tensorboard", "wandb", "trackio", "mlflow")
HANG_SECONDS = 180
SUMMARY = {"updates": 5, "success_after": {"greedy": {"mean": 0.75}}}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("TRACKIO_DIR", raising=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return small_run(tmp_path_factory.mktemp("made"), Shape(trajectories=200, steps=4, tasks=3, width=160, height=100))


@pytest.fixture
def run(made: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A finished run of five updates."""
    copied = RunDirectory(Path(shutil.copytree(made.path, tmp_path / made.name)))
    execute(
        copied,
        ("update runs set state = 'finished', finished = 1790001000, summary_json = ?", (json.dumps(SUMMARY),)),
    )
    copied.summary.write_text(json.dumps(SUMMARY))
    result = {"label": "after", "decoding": "greedy", "temperature": 0.0, "mean": 0.75, "low": 0.6, "high": 0.9}
    event(copied, 9_000, "evaluation", json.dumps({**result, "episodes": 40}))
    return copied


def track(run: RunDirectory, *words: str) -> Result:
    """In this process, with what a test has replaced."""
    return CliRunner().invoke(main, ["track", str(run.path), *words])


def tracked(run: RunDirectory, kind: str, python: Path | None = None) -> str:
    """In a process of its own, as the trackers' libraries expect; what it printed."""
    if python is None:
        pytest.importorskip({"tensorboard": "tensorboardX"}.get(kind, kind))
    command = [str(python or sys.executable), "-m", "dart", "track", str(run.path), "--to", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def curves_of(run: RunDirectory) -> Curves:
    inspector = await Inspector.open(run)
    try:
        return await inspector.curves()
    finally:
        await inspector.close()


def test_swanlab_records_a_run_with_an_older_protobuf(run: RunDirectory) -> None:
    """In an environment of its own (`make swanlab`): it wants protobuf below 7, and dart runs with that as well."""
    if not SWANLAB.exists():
        pytest.skip("SwanLab is not installed: run `make swanlab`")
    tracked(run, "swanlab", SWANLAB)
    found = read_back("swanlab", run.path)
    for name, values in wanted(run).items():
        assert found[name] == pytest.approx(values, rel=1e-6), name
    assert list(found["held_out/greedy"].values()) == pytest.approx([0.75])
    version = "from google import protobuf; print(protobuf.__version__)"
    assert subprocess.run([str(SWANLAB), "-c", version], capture_output=True, text=True, check=True).stdout < "7"


def wanted(run: RunDirectory) -> Mapping[str, Mapping[int, float]]:
    """A few of the curves that the dashboard shows."""
    curves = asyncio.run(curves_of(run))
    names = {"run/success_rate": "success_rate", "trainer/loss": "loss", "fates/trained": "fates.trained"}
    return {
        name: dict(zip(curves.updates, curves.series[series], strict=True))  # type: ignore[arg-type]
        for name, series in names.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_recorded_and_read_back(run: RunDirectory, kind: str) -> None:
    tracked(run, kind)
    found = read_back(kind, run.path)
    for name, values in wanted(run).items():
        assert found[name] == pytest.approx(values, rel=1e-6), name
    assert list(found["held_out/greedy"].values()) == pytest.approx([0.75])
    assert json.loads((run.path / "trackers" / f"{kind}.json").read_text())["over"]
    again = 6 if kind == "wandb" else 0  # offline it cannot continue, and its newest folder has to hold the whole run
    assert f"{kind}: {again} updates and evaluations sent" in tracked(run, kind)
    assert read_back(kind, run.path)["run/success_rate"].keys() == found["run/success_rate"].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_any_name_is_recorded(run: RunDirectory, kind: str) -> None:
    names = ("open file (2)", "a+b", "a_b", "what's", "x//y", "/x", "..", "点击", "long " * 100)
    told = {"update": 6, "success_rate": 0.5, "trajectories": 240, "success_by_task": dict.fromkeys(names, 0.5)}
    event(run, 9_001, "update", json.dumps(told))
    event(run, 9_002, "update", json.dumps(told | {"update": 7}))
    assert f"{kind}: 8 updates and evaluations sent" in tracked(run, kind) or kind != "mlflow"
    assert read_back(kind, run.path)["run/success_rate"][7] == 0.5


def test_two_names_do_not_become_one_for_mlflow() -> None:
    mlflow = pytest.importorskip("dart.trackers.mlflow", exc_type=ImportError)
    names = [
        "a+b",
        "a_b",
        "a'b",
        "x//y",
        "x/y",
        "x__y",
        "/x",
        ".",
        "..",
        "/",
        "a" * 300,
        "a" * 301,
        "a b:c-d.e/f",
        "点击",
    ]
    sent = [mlflow.allowed(f"tasks/{name}") for name in names]
    assert len(set(sent)) == len(names) and all(len(name) <= 250 for name in sent)
    for name in ("a_b", "x/y", "a b:c-d.e/f", "点击"):
        assert f"tasks/{name}" in sent


@pytest.mark.parametrize("kind", KINDS)
def test_trajectories_are_shown_as_pictures(run: RunDirectory, kind: str) -> None:
    execute(run, ("update runs set config_json = json_set(config_json, '$.tracking', json(?))",
                  (json.dumps({"pictures": 2, "pictures_every_updates": 5}),)))  # fmt: skip
    tracked(run, kind)
    folder = run.path / "trackers" / kind
    if kind == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(folder))
        read.Reload()
        assert {"trajectories/0", "trajectories/1"} <= set(read.Tags()["images"])
    else:
        assert len(list(folder.rglob("*.png"))) >= 2


def test_only_what_is_new_is_sent(run: RunDirectory) -> None:
    pytest.importorskip("tensorboardX")
    assert "tensorboard: 6 updates and evaluations sent" in track(run, "--to", "tensorboard").output
    event(run, 9_001, "update", json.dumps({"update": 6, "success_rate": 0.5, "trajectories": 240}))
    assert "tensorboard: 1 updates and evaluations sent" in track(run, "--to", "tensorboard").output
    assert read_back("tensorboard", run.path)["run/success_rate"][6] == 0.5


class Recording:
    """A tracker that keeps what it is told. Its server goes away at the update `failing_at`."""

    told: list[tuple[int, Mapping[str, float]]]
    pictured: list[int]
    outcomes: list[Mapping[str, JsonValue]]
    failing_at: int | None

    def __init__(self, tracked: base.Tracked) -> None: ...

    def numbers(self, update: int, values: Mapping[str, float]) -> None:
        if update == self.failing_at:
            raise ConnectionError("the server is gone")
        self.told.append((update, values))

    def pictures(self, update: int, pictures: Any) -> None:
        self.pictured.append(update)

    def outcome(self, summary: Mapping[str, JsonValue], curve: Any) -> None:
        self.outcomes.append(summary)

    def close(self, state: str) -> None: ...


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    """`--to recording`."""
    module = types.ModuleType("recording_tracker")
    module.Recording = Recording  # type: ignore[attr-defined]
    Recording.told, Recording.pictured, Recording.outcomes, Recording.failing_at = [], [], [], None
    monkeypatch.setitem(sys.modules, "recording_tracker", module)
    monkeypatch.setitem(base.KINDS, "recording", base._Kind("recording_tracker", "Recording", ""))
    return Recording


def test_one_that_fails_is_told_once_and_goes_on_later_where_it_was(
    run: RunDirectory, recording: type[Recording]
) -> None:
    pytest.importorskip("tensorboardX")
    recording.failing_at = 3
    done = track(run, "--to", "recording", "--to", "tensorboard")
    assert done.exit_code == 2
    assert "tracker recording failed: ConnectionError: the server is gone" in done.output
    assert "tensorboard: 6 updates and evaluations sent" in done.output, "the others go on"
    assert [update for update, _ in recording.told] == [1, 2]
    recording.failing_at = None
    assert track(run, "--to", "recording").exit_code == 0
    assert [update for update, _ in recording.told] == [1, 2, 3, 4, 5, 5], "the last is the evaluation"


def test_one_that_cannot_start_does_not_keep_the_others_from_it(
    run: RunDirectory, recording: type[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Recording, tracked: base.Tracked) -> None:
        raise ConnectionError("no key")

    module = types.ModuleType("refusing_tracker")
    module.Refusing = type("Refusing", (Recording,), {"__init__": refuse})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "refusing_tracker", module)
    monkeypatch.setitem(base.KINDS, "refusing", base._Kind("refusing_tracker", "Refusing", ""))
    done = track(run, "--to", "refusing", "--to", "recording")
    assert done.exit_code == 2
    assert "tracker refusing failed: it cannot start: no key: check its settings" in done.output
    assert [update for update, _ in recording.told] == [1, 2, 3, 4, 5, 5]


def test_following_outlives_a_database_that_is_away(
    run: RunDirectory, recording: type[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(run, ("update runs set state = 'running'", ()))
    seen, real = [], following.updates_after

    async def away_once(*arguments: Any) -> Any:
        seen.append(arguments)
        if len(seen) == 1:
            raise UserError("the database cannot be read")
        execute(run, ("update runs set state = 'finished'", ()))
        return await real(*arguments)

    monkeypatch.setattr(following, "updates_after", away_once)
    monkeypatch.setattr("dart.commands.track.LOOK_SECONDS", 0.01)
    done = track(run, "--to", "recording", "--follow")
    assert "the database cannot be read: it is tried again" in done.output
    assert [update for update, _ in recording.told] == [1, 2, 3, 4, 5, 5]


def test_a_tracker_that_is_named_twice_is_told_once(run: RunDirectory, recording: type[Recording]) -> None:
    assert track(run, "--to", "recording", "--to", "recording").output.count("recording: 6 updates") == 1
    assert [update for update, _ in recording.told] == [1, 2, 3, 4, 5, 5]


def test_updates_that_a_resumed_run_makes_again_are_sent_again(run: RunDirectory, recording: type[Recording]) -> None:
    pictures = json.dumps({"pictures": 1, "pictures_every_updates": 2})
    execute(run, ("update runs set config_json = json_set(config_json, '$.tracking', json(?))", (pictures,)))
    track(run, "--to", "recording")
    assert recording.pictured == [5]
    recording.told.clear()
    for number, update in enumerate((4, 5)):
        event(run, 9_001 + number, "update", json.dumps({"update": update, "success_rate": 0.125, "trajectories": 240}))
    assert "recording: 2 updates and evaluations sent" in track(run, "--to", "recording").output
    assert [(update, values["run/success_rate"]) for update, values in recording.told] == [(4, 0.125), (5, 0.125)]
    assert recording.pictured == [5, 5], "the policy that went on is shown, too"
    assert "recording: 0 updates and evaluations sent" in track(run, "--to", "recording").output


def test_where_nothing_is_new_the_curves_are_not_read(
    run: RunDirectory, recording: type[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "recording: 6 updates" in track(run, "--to", "recording").output
    with monkeypatch.context() as forbidding:
        forbidding.delattr(Inspector, "curves")
        assert "recording: 0 updates and evaluations sent" in track(run, "--to", "recording").output
    told = {"label": "late", "mean": 0.5, "low": 0.25, "high": 0.75, "episodes": 8}
    event(run, 9_001, "evaluation", json.dumps(told))
    assert "recording: 1 updates and evaluations sent" in track(run, "--to", "recording").output
    assert recording.told[-1][1]["held_out/success"] == 0.5


def test_the_outcome_has_no_secrets(run: RunDirectory, recording: type[Recording]) -> None:
    summary = {"updates": 5, "config": {"rollout": {"environment": {"HF_TOKEN": "hf_1"}}}}
    execute(run, ("update runs set summary_json = ?", (json.dumps(summary),)))
    track(run, "--to", "recording")
    assert recording.outcomes == [{"updates": 5, "config": {"rollout": {"environment": {"HF_TOKEN": SECRET}}}}]


def test_the_cause_is_what_train_prints_at_its_end(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "a warning\nerror: tracker wandb failed: CommError: error: no route\nthe run itself is not affected"
    ended = subprocess.CompletedProcess([], 2, "", told)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    last_words(run, ("wandb",))
    assert capsys.readouterr().err.startswith("tracker wandb failed: CommError: error: no route\nthe run itself")


def test_the_config_knows_every_tracker() -> None:
    assert set(base.KINDS) == set(get_args(TrackerKind))


def test_what_is_wrong_is_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    none = track(run)
    assert none.exit_code == 2 and "no tracker is named: use --to with tensorboard, wandb" in none.output
    odd = track(run, "--to", "tensorbord")
    assert odd.exit_code == 2 and "tracker 'tensorbord' is unknown: use tensorboard" in odd.output
    monkeypatch.setitem(base.KINDS, "absent", base._Kind("no_such_module", "Absent", "pip install absent"))
    absent = track(run, "--to", "absent")
    assert (
        absent.exit_code == 2 and "tracker absent failed: it needs no_such_module: pip install absent" in absent.output
    )


def test_a_sheet_shows_the_first_and_last_steps() -> None:
    if importlib.util.find_spec("PIL") is None:
        pytest.skip("needs Pillow")
    from PIL import Image

    frames = [Image.new("RGB", (640, 480), (number, 0, 0)) for number in range(FRAMES + 5)]
    whole = sheet(frames)
    assert whole.size == (4 * FRAME_WIDTH, 3 * 240)
    assert whole.getpixel((5, 5)) == (0, 0, 0) and whole.getpixel((whole.width - 5, whole.height - 5)) == (16, 0, 0)
    assert sheet(frames[:2]).size == (2 * FRAME_WIDTH, 240)


@pytest.mark.parametrize(
    ("name", "called"), [("demo-20261127-093000", "demo-20261127-093000"), ("baseline", "baseline-")]
)
def test_runs_whose_directories_have_one_name_stay_two(tmp_path: Path, name: str, called: str) -> None:
    """A cluster's release, or `--run runs/baseline`, after the first one was removed."""
    path = tmp_path / "tracker.json"
    first, second = (Following.read(path, name, started).id for started in (1.0, 2.0))
    assert first.startswith(called) and (first == second) == (called == name)
    at = Following.read(path, name, 1.0)
    at.write(path)
    assert Following.read(path, name, 3.0).id == first, "one that is continued keeps its name"
    path.write_text('{"updates": 3}')
    assert Following.read(path, name, 1.0).id == name, "as an older dart called it"


def test_mlflow_knows_how_a_run_ended_however_often_it_is_told(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")

    def status() -> str:
        client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run.trackers / 'mlflow' / 'mlflow.db'}")
        (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
        (found,) = client.search_runs([experiment.experiment_id])
        return str(found.info.status)

    execute(run, ("update runs set state = 'failed'", ()))
    tracked(run, "mlflow")
    assert status() == "FAILED"
    execute(run, ("update runs set state = 'finished'", ()))
    for _ in range(2):
        tracked(run, "mlflow")
        assert status() == "FINISHED"
