"""The runner of experiments: pieces that may be killed, what is kept of a run, and what is found in the end."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from trial_samples import LADDER, after, fabricate, record

from benchmarks.trials import findings, pages, pieces, records, showing, sources, sweep
from benchmarks.trials.pieces import Run
from benchmarks.trials.protocol import FOLDER, Protocol, load
from benchmarks.trials.records import MOST_POINTS, Clock, Episode, Point, curve, thinned
from benchmarks.trials.sweep import Patience, Plan
from dart.errors import UserError
from dart.rundir import RunDirectory

MARKS = {"protocol_sha256": "p", "config_sha256": "c", "base_sha256": "b"}
PIECE = """
import json, signal, sqlite3, sys, time
from pathlib import Path
from typing import Any
folder, needed = Path(sys.argv[1]) / "run", int(sys.argv[2])
resumed = "--resume" in sys.argv
assert resumed == (folder / "run.db").exists()
folder.mkdir(exist_ok=True)
if not resumed:
    # Whole or not at all: an interruption may come at any moment.
    with sqlite3.connect(folder / "new.db") as database:
        database.executescript('''
            drop table if exists groups; create table groups (id text, kind text);
            insert into groups values ('sampled', 'training'), ('copied', 'collected');
            create table if not exists trajectories (group_id text, finished real);
            create table if not exists events (kind text);
            create table if not exists runs (id text); insert into runs values ('run');
        ''')
    database.close()
    (folder / "new.db").rename(folder / "run.db")
database = sqlite3.connect(folder / "run.db")
database.execute("insert into trajectories values ('sampled', ?)", (time.time(),))
database.commit()
with (folder / "pieces").open("a") as file:
    file.write("x")
if len((folder / "pieces").read_text()) >= needed:
    (folder / "summary.json").write_text("{}")
    sys.exit(0)
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
(folder / "ready").touch()
time.sleep(60)
sys.exit(3)
"""


@pytest.fixture
def train_needs(monkeypatch: pytest.MonkeyPatch) -> object:
    """Replaces `dart train` by a process that finishes in its n-th piece, and else runs until it is interrupted."""

    def set_needed(needed: int, code: str = PIECE) -> None:
        def command(run: Run, begun: object) -> list[str]:
            more = ["--resume"] if begun else []
            return [sys.executable, "-c", code, str(run.folder), str(needed), *more]

        monkeypatch.setattr(pieces, "_command", command)

    return set_needed


# ---- pieces ----


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much other work may not even start a process in the second that a piece has here."""
    monkeypatch.setattr(pieces, "MOST_FAILURES", 50)


@pytest.mark.usefixtures("busy")
def test_a_run_is_resumed_piece_by_piece(tmp_path: Path, train_needs: object) -> None:
    train_needs(3)
    made = pieces.train(Run(tmp_path / "run", Path("c.yaml"), ("a=1",), MARKS), 1.0)
    assert made is not None and (made.path / "pieces").read_text() == "xxx"
    again = pieces.train(Run(tmp_path / "run", Path("c.yaml"), ("a=1",), MARKS), 1.0)
    assert again == made and (made.path / "pieces").read_text() == "xxx", "a finished run is not made again"


def test_a_run_that_has_what_is_wanted_of_it_is_drained(
    tmp_path: Path, train_needs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its only piece, which would have had no end; it is asked after until it could be drained."""
    goes_on = "while not (folder / 'drained').exists(): time.sleep(0.05)"
    train_needs(99, PIECE.replace("time.sleep(60)", f"{goes_on}\n(folder / 'summary.json').touch()\nsys.exit(0)"))
    asked: list[Path] = []

    def has_arrived(run: RunDirectory) -> bool:
        asked.append(run.path)
        return len(asked) >= 2

    def drain(run: RunDirectory, output: object) -> bool:
        if len(asked) == 3:
            (run.path / "drained").touch()
        return len(asked) == 3  # it was still starting before

    monkeypatch.setattr(pieces, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(pieces, "_drain", drain)
    made = pieces.train(Run(tmp_path / "run", Path("c.yaml"), ("a=1",), MARKS), None, over=has_arrived)
    assert made is not None and asked == [made.path] * 3 and (made.path / "pieces").read_text() == "x"


def test_a_run_that_was_killed_before_it_was_recorded_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.db").touch()
    assert pieces._newest(tmp_path) is None
    with sqlite3.connect(tmp_path / "run" / "run.db") as database:
        database.execute("create table runs (id text)")
    assert pieces._newest(tmp_path) is None
    with sqlite3.connect(tmp_path / "run" / "run.db") as database:
        database.execute("insert into runs values ('run')")
    assert pieces._newest(tmp_path) is not None


@pytest.mark.usefixtures("busy")
def test_it_stops_between_pieces_when_asked(tmp_path: Path, train_needs: object) -> None:
    train_needs(3)
    calls = iter([True, False])
    run = Run(tmp_path / "run", Path("c.yaml"), (), MARKS)
    assert pieces.train(run, 1.0, lambda: next(calls)) is None
    made = pieces.train(run, 1.0)
    assert made is not None and (made.path / "pieces").read_text() == "xxx", "the first piece still counts"


def test_another_runs_pieces_are_not_continued(tmp_path: Path, train_needs: object) -> None:
    train_needs(1)
    pieces.train(Run(tmp_path / "run", Path("c.yaml"), ("a=1",), MARKS), 50.0)
    with pytest.raises(UserError, match="was begun with another overrides"):
        pieces.train(Run(tmp_path / "run", Path("c.yaml"), ("a=2",), MARKS), 50.0)
    with pytest.raises(UserError, match="was begun with another base_sha256"):
        pieces.train(Run(tmp_path / "run", Path("c.yaml"), ("a=1",), MARKS | {"base_sha256": "x"}), 50.0)


def test_a_run_that_keeps_failing_is_reported(tmp_path: Path, train_needs: object) -> None:
    train_needs(1, "print('no browser'); raise SystemExit(2)")
    with pytest.raises(UserError, match="exit code 2: no browser"):
        pieces.train(Run(tmp_path / "run", Path("c.yaml"), (), MARKS), 50.0)
    assert (tmp_path / "run" / pieces.LOG).read_text().count("no browser") == pieces.MOST_FAILURES + 1


ENDS = PIECE.replace("time.sleep(60)", "sys.exit(0)")
"""It ends at once, without having finished the run."""
ADDS = "\"insert into trajectories values ('sampled', ?)\", (time.time(),)"


@pytest.mark.parametrize(
    ("adds", "good"),
    [("trajectories values ('copied', 2e9)", 0), ("trajectories values ('sampled', 1.0)", 1)],
    ids=["successes from elsewhere", "nothing newer"],
)
def test_pieces_that_add_nothing_are_failures(adds: str, good: int, tmp_path: Path, train_needs: object) -> None:
    """Even if they end well. The very first may have added something."""
    train_needs(9, ENDS.replace(ADDS, f'"insert into {adds}"'))
    run = Run(tmp_path / "run", Path("c.yaml"), (), MARKS)
    with pytest.raises(UserError, match=r"the last piece added neither a trajectory nor an update: .* is kept"):
        pieces.train(run, 50.0)
    assert len((run.folder / "run" / "pieces").read_text()) == good + pieces.MOST_FAILURES + 1


@pytest.mark.parametrize("adds", [ADDS, "\"insert into events values ('update')\""], ids=["trajectory", "update"])
def test_pieces_that_add_a_trajectory_or_an_update_are_none(adds: str, tmp_path: Path, train_needs: object) -> None:
    train_needs(6, ENDS.replace(ADDS, adds))
    made = pieces.train(Run(tmp_path / "run", Path("c.yaml"), (), MARKS), 50.0)
    assert made is not None and (made.path / "pieces").read_text() == "xxxxxx"


def test_how_far_a_run_has_come_is_read_from_its_database(tmp_path: Path) -> None:
    run = asyncio.run(fabricate(tmp_path, [("a", True, 130.0), ("b", False, 510.0)], {}))
    assert pieces._reached(run) == pieces._Reached(newest=510.0, updates=1)
    with sqlite3.connect(run.database) as database:
        database.execute("update groups set kind = 'collected' where task_name = 'b'")
    assert pieces._reached(run) == pieces._Reached(newest=130.0, updates=1)
    run.database.write_bytes(b"no database")
    with pytest.raises(UserError, match=r"run.db cannot be read"):
        pieces._reached(run)


def test_the_code_of_every_piece_is_kept(tmp_path: Path, train_needs: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run is unfinished, too."""
    commits, calls = iter("abc"), iter([True, False])
    monkeypatch.setattr(sources, "current", lambda: {"commit": next(commits), "changed": []})
    train_needs(3, ENDS)
    run = Run(tmp_path / "run", Path("c.yaml"), (), MARKS)
    assert pieces.made_by(run.folder) == []
    assert pieces.train(run, 50.0, lambda: next(calls)) is None
    assert pieces.made_by(run.folder) == [{"commit": "a", "changed": []}]
    pieces.train(run, 50.0)
    assert [made["commit"] for made in pieces.made_by(run.folder)] == ["a", "b", "c"]


def test_a_killed_runner_interrupts_its_piece(tmp_path: Path) -> None:
    """So no run goes on unseen, holding the directory that the next runner wants to continue."""
    runner = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from benchmarks.trials import pieces
        pieces._command = lambda run, begun: [sys.executable, "-c", {PIECE!r}, str(run.folder), "9"]
        pieces.train(pieces.Run(Path({str(tmp_path / "run")!r}), Path("c"), (), {{}}), 50.0)
    """)
    process = subprocess.Popen([sys.executable, "-c", runner])
    while not (tmp_path / "run" / "run" / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    late = time.monotonic() + 45  # it would run for 60 s
    while any(Path(f"/proc/{child}/stat").exists() for child in children):
        assert time.monotonic() < late, "the piece outlived its runner"
        time.sleep(0.05)
    assert len(children) == 1


# ---- what is kept of a run ----


def test_training_time_goes_on_over_pieces() -> None:
    clock = Clock([(100.0, None, None), (160.0, 60.0, 1), (200.0, 100.0, 2), (900.0, None, None), (950.0, 150.0, 3)])
    assert clock.at(50.0) == (0.0, 0)
    assert clock.at(130.0) == (30.0, 0)
    assert clock.at(160.0) == (60.0, 1)
    assert clock.at(920.0) == (120.0, 2), "what came between the pieces is no training"
    assert clock.at(960.0) == (160.0, 3)


async def test_training_roll_outs_alone_are_kept(tmp_path: Path) -> None:
    run = await fabricate(
        tmp_path, [("b", True, 510.0), ("a", False, 130.0), ("a", True, 170.0)], {"success_after": None, "updates": 1}
    )
    found = await records._episodes(run, ["a", "b"])
    assert found == [Episode(30.0, 0, 3, 0, 0), Episode(70.0, 0, 3, 1, 1), Episode(70.0, 1, 3, 1, 1)]
    assert await records._starts(run) == 2, "training began at 100 s, and again at 500 s"


def test_a_record_says_how_often_training_was_started(tmp_path: Path) -> None:
    run = asyncio.run(fabricate(tmp_path, [("a", True, 130.0)], {"success_after": None, "updates": 1}))
    assert records.read(run, with_episodes=False).items() >= {"starts": 2, "last_update_seconds": 60.0}.items()
    run.config.write_text("environment: {tasks: {names: [a]}}", encoding="utf-8")
    assert records.so_far(run) == {"tasks": ["a"], "episodes": records.read(run, with_episodes=True)["episodes"]}
    assert "episodes" not in records.read(run, with_episodes=False)


def test_a_record_is_read_back(tmp_path: Path) -> None:
    sweep.write_json(tmp_path / "full-0.json", record("full", 0, {"easy": 1, "medium": 0.5, "hard": 0.25}, MARKS))
    read = records.load(tmp_path / "full-0.json")
    assert read["episodes"][41] == Episode(41.0, 1, 10, 1, 4) and read["curve"][0] == Point(160, 15.0, 1, 0.0)


def test_the_curve_is_a_mean_over_tasks() -> None:
    """One task has three times the roll-outs of the other, and counts no more."""
    episodes = [Episode(float(n), 0 if n % 4 else 1, 5, int(n % 4 > 0), 0) for n in range(80)]
    points = curve(episodes, smoothing=8)
    assert points[0].env_steps == 5 * 13, "it begins when both tasks have had four"
    assert {point.success for point in points} == {0.5}
    assert curve([]) == thinned([]) == []


def test_a_thinned_curve_keeps_its_ends() -> None:
    points = [Point(5 * n, float(n), n // 10, 0.123456) for n in range(1000)]
    found = thinned(points)
    assert len(found) <= MOST_POINTS and (found[0].env_steps, found[-1].env_steps) == (0, 4995)
    assert found[0].success == 0.1235
    assert [point.seconds for point in thinned(points[:20])] == [point.seconds for point in points[:20]]


# ---- arms × seeds ----


def plan_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> Plan:
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sweep, "UNFINISHED", tmp_path / "unfinished")
    return Plan("learning/x", Path("c.yaml"), {"full": ("a=1",), "none": ("a=2",)}, (0, 1), MARKS, **more)


def keep(plan: Plan, arm: str, seed: int, levels: dict[str, float], **more: object) -> None:
    plan.results.mkdir(parents=True, exist_ok=True)
    sweep.write_json(plan.record(arm, seed), record(arm, seed, levels, MARKS, **more))


def test_seeds_are_the_outer_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_in(tmp_path, monkeypatch)
    assert sweep.missing(plan) == [("full", 0), ("none", 0), ("full", 1), ("none", 1)]
    keep(plan, "none", 0, {"easy": 1, "medium": 1, "hard": 1})
    assert sweep.missing(plan) == [("full", 0), ("full", 1), ("none", 1)]
    assert {arm: list(made) for arm, made in sweep.finished(plan).items()} == {"none": [0]}


def test_results_of_another_protocol_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_in(tmp_path, monkeypatch)
    keep(plan, "full", 0, {"easy": 1, "medium": 1, "hard": 1}, protocol_sha256="other")
    with pytest.raises(UserError, match="was made with another protocol"):
        sweep.run_missing(plan)


def test_finished_runs_become_records_and_failed_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_needs: object, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_in(tmp_path, monkeypatch, piece_seconds=50.0, jobs=2)
    train_needs(1, PIECE.replace("signal.signal", "sys.exit(9) if 'none-1' in sys.argv[1] else signal.signal")
                .replace("if len(", "if 'none-1' not in sys.argv[1] and len("))  # fmt: skip
    monkeypatch.setattr(records, "read", lambda run, **_: {"updates": 3, "env_steps": 12, "train_seconds": 1.0})
    sweep.run_missing(plan)
    assert sweep.missing(plan) == [("none", 1)]
    kept = json.loads(plan.record("full", 1).read_text())
    assert kept["overrides"] == ["a=1", "run.seed=1"] and kept["base_sha256"] == "b" and kept["updates"] == 3
    assert kept["pieces"] == [sources.current()]
    assert not plan.unfinished("full", 1).exists() and plan.unfinished("none", 1).exists()
    assert "none, seed 1: exit code 9" in capsys.readouterr().out


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = Patience(minutes=1.0)
    assert patience.goes_on()
    patience.began -= 61
    assert not patience.goes_on()
    endless = Patience()
    assert endless.goes_on()
    endless.stop()
    assert not endless.goes_on()


# ---- findings ----

PROTOCOL = load(FOLDER / "ablation.yaml", Protocol)
SUCCESS = {"full": [0.60, 0.66, 0.57, 0.63, 0.64], "none": [0.20, 0.31, 0.22, 0.20, 0.27],
           "without-number": [0.55, 0.66, 0.60, 0.58, 0.66], "without-length": [0.30, 0.32, 0.35, 0.28, 0.31],
           "without-pool": [0.33, 0.37, 0.31, 0.34, 0.35]}  # fmt: skip


def runs(success: dict[str, list[float]] = SUCCESS) -> findings.Runs:
    made = {}
    for arm, values in success.items():
        made[arm] = {
            seed: record(arm, seed, {"easy": 1.0, "medium": value + 0.1, "hard": value - 0.1}, MARKS)
            for seed, value in enumerate(values)
        }
    return made


def test_success_is_a_mean_over_the_tasks_of_the_levels() -> None:
    both = after({"easy": 1.0, "medium": 0.6, "hard": 0.2}, greedy=0.1)
    sampled, greedy = PROTOCOL.primary
    assert findings.success(both, sampled, PROTOCOL) == pytest.approx(0.4)
    assert findings.success(both, greedy, PROTOCOL) == pytest.approx(0.5)
    assert len(LADDER) == 21


def test_full_is_compared_with_each_arm_within_one_family() -> None:
    found = {(one.endpoint, one.arm): one for one in findings.findings(runs(), PROTOCOL)}
    none = found["medium and hard, sampled", "none"]
    assert none.difference.mean == pytest.approx(0.38) and none.difference.n == 5 and none.primary
    assert none.p is not None and none.p_holm is not None and none.p < none.p_holm <= 8 * none.p
    number = found["medium and hard, sampled", "without-number"]
    assert number.p is not None and number.p > 0.3 and number.p_holm == 1.0
    assert number.smallest is not None and 0.05 < number.smallest < 0.2
    easy = found["easy, sampled", "none"]
    assert not easy.primary and easy.p_holm is None
    assert len(found) == 4 * (len(PROTOCOL.primary) + len(PROTOCOL.secondary))


def test_an_incomplete_experiment_is_corrected_for_the_whole_family() -> None:
    only = {arm: SUCCESS[arm] for arm in ("full", "none")}
    found = [one for one in findings.findings(runs(only), PROTOCOL) if one.primary]
    assert [one.arm for one in found] == ["none", "none"]
    assert all(one.p is not None and one.p_holm == pytest.approx(8 * one.p) for one in found)
    results = findings.as_json(runs(only), PROTOCOL, [("without-pool", 0)])
    assert results["complete"] is False and results["missing"] == ["without-pool-0"]


def test_the_report_names_restarted_runs_and_what_made_them() -> None:
    made = runs({"full": [0.6, 0.7], "none": [0.2, 0.3]})
    assert findings.notes(made) == []
    made["none"][1]["starts"] = 3
    made["full"][0]["pieces"] += [{"commit": "d", "changed": ["dart/x.py"]}]
    commits, changed, restarted = findings.notes(made)
    assert commits == "the 4 runs were made by 2 commits: c (in 4 of them), d (in 1 of them)"
    assert changed == "1 of the 4 runs were made with changed files: full-0 (dart/x.py)"
    assert restarted == "training was started more than once in 1 of the 4 runs: none-1 (3 starts)"
    found: Any = json.loads(json.dumps(findings.as_json(made, PROTOCOL, []) | {"base": None}))
    _, rows = pages.arms(found)
    assert [row[0] for row in rows[-3:]] == [f"note: {one}" for one in (commits, changed, restarted)]


def test_the_share_of_stale_trajectories_is_of_all_sampled() -> None:
    made = runs({"full": [0.6, 0.7]})
    made["full"][0]["dropped"] = {"stale": 16, "all succeeded": 40}
    (row,) = findings.arm_rows(made, PROTOCOL)
    assert row.stale.mean == pytest.approx((16 / 80 + 0) / 2), "of 80 trajectories each"
    imitated = made["full"][0] | {"trajectories": 0, "dropped": {}}
    assert findings.stale(imitated) == 0.0, "of a run without roll-outs"


def test_numbers_for_people() -> None:
    assert pages.percent({"mean": 0.5, "low": None, "high": None, "n": 1}) == "50.0%"
    assert pages.points({"mean": 0.15, "low": -0.485, "high": 0.785, "n": 2}) == "+15.0 (-48.5 to +78.5)"
    assert (pages.p_value(None), pages.p_value(0.0002), pages.p_value(0.02)) == ("", "< 0.001", "0.020")


def test_pages_have_the_same_numbers_and_say_what_is_missing() -> None:
    found: Any = json.loads(json.dumps(findings.as_json(runs(), PROTOCOL, [("without-pool", 5)])))
    head, rows = pages.below(found, "full")
    assert len(rows) == 6 and all(len(row) == len(head) for row in rows)
    assert rows[0][:2] == ["full, 5 runs", "62.0% (57.6% to 66.4%)"]
    assert head[1:3] == ("medium and hard, sampled", "below full by") and rows[0][2] == "", "the whole comes first"
    assert rows[-2][0] == "none, 5 runs" and rows[-2][2] == "38 points (34 to 42), p < 0.001"
    assert rows[-1][0] == "**incomplete: 1 runs are missing**"
    assert pages.below(found, "none")[1] == [], "which nothing is compared with"


def test_every_run_is_in_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = {
        arm: {
            seed: records.Record(
                **one,
            )
            for seed, one in of.items()
        }
        for arm, of in runs().items()
    }
    for of in made.values():
        for one in of.values():
            one["curve"] = curve([Episode(*episode) for episode in one["episodes"]])
    picture = showing.draw(tmp_path / "x" / "picture.png", made, PROTOCOL, lambda point: point.env_steps, "steps")
    assert picture.stat().st_size > 10_000
