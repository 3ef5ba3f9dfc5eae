"""The coordinator is killed between two durable steps, each in turn, or has an error or a delay there, and goes on:
nothing is lost, nothing doubled."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_processes import killed_run
from sqlalchemy import create_engine

from benchmarks.stores.servers import PostgreSQL
from dart import manifest
from dart.config import Run
from dart.rundir import RunDirectory
from dart.screenshots.directory import file_name
from dart.store.blobs import files_at
from dart.store.database import sqlite_url
from dart.store.elsewhere.copies import copies

FAILPOINTS = [
    "screenshots-put:20",
    "group-opened:6",
    "trajectory-stored:20",
    "group-closed:5",
    "batch-trained:3",
    "batch-consumed:3",
    "folder-written:2",
    "folder-sealed:2",
    "folder-aside:1",
    "checkpoint-saved:2",
    "checkpoint-recorded:2",
    "checkpoint-dropped:1",
    "screenshots-forgotten:2",
    "screenshot-aside:3",
    "screenshot-write:40",
]
SWEPT = ("screenshots-forgotten", "screenshot-aside")
"""Only a directory's screenshots are removed; nor is one written by `screenshot-write` elsewhere."""
GOES_ON = {
    "folder-written": "checkpoint_failed", "folder-sealed": "checkpoint_failed", "folder-aside": "checkpoint_failed",
    "screenshots-forgotten": "housekeeping_failed", "screenshot-aside": "housekeeping_failed",
}  # fmt: skip
"""Where an error costs only a checkpoint or a round of tidying → the event. Without its last checkpoint a run ends with
the cause, too."""


def test_every_failpoint_is_tried() -> None:
    code = [path.read_text(encoding="utf-8") for path in (killed_run.ROOT / "dart").rglob("*.py")]
    there = {name for text in code for name in re.findall(r'^ +failpoint\("([^"]+)"\)$', text, re.MULTILINE)}
    assert there == {failpoint.partition(":")[0] for failpoint in FAILPOINTS}


def trained_groups(lines: list[dict[str, Any]]) -> dict[int, list[str]]:
    """Update → the groups that it was last made with. A resumed run has forgotten what came after its checkpoint."""
    made: dict[int, list[str]] = {}
    for line in lines:
        if "resumed" in line:
            made = {update: groups for update, groups in made.items() if update <= line["resumed"]}
        if "trained" in line:
            made[line["trained"]] = line["groups"]
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.path.mkdir()
    return made


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_killed_here_the_run_goes_on(run: RunDirectory, failpoint: str) -> None:
    killed_and_continued(run, failpoint)


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_an_error_that_returns_here_costs_no_more_than_its_process(run: RunDirectory, failpoint: str) -> None:
    """Each process is slow there, too, and fails there from that visit on, every time; the last one has no faults."""
    name, _, visit = failpoint.partition(":")
    first_saved_unrecorded(run, name)
    last, more, event = 0, 60 if name.startswith(SWEPT) else 8, GOES_ON.get(name, "failed")
    for _ in range(2):
        made = killed_run.process(run, last + more, f"{name}:1-=delay:0.01,{name}:{visit}-=fail:EIO")
        ends = [1] if event == "failed" else [0, 1] if event == "checkpoint_failed" else [0]
        assert made.returncode in ends, made.stdout[-2000:] + made.stderr[-2000:]
        told = [why for (why,) in query(run, f"SELECT json FROM events WHERE kind = '{event}'")]
        assert any(f"failpoint {name}" in why for why in told), "the cause is named"
        if not made.returncode:  # it went on all the same, to its end
            return check(run, killed_run.told(run), json.loads(made.stdout.splitlines()[-1])["trained"])
        last = max((line["trained"] for line in killed_run.told(run) if "trained" in line), default=0)
    went_on_to(run, last + 2)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_run_whose_last_transactions_a_power_failure_took_goes_on(run: RunDirectory, share: float) -> None:
    """The disk has that share of SQLite's log; the checkpoints, which are forced onto it, may be newer."""
    killed = killed_run.process(run, 12, "batch-trained:7", killed_run.KEEPS_LOG)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    log = run.database.with_name(f"{run.database.name}-wal")
    os.truncate(log, int(log.stat().st_size * share))
    ((stored,),) = query(run, "SELECT count(*) FROM trajectories WHERE pooled_from = ''")
    confirmed = sum("stored" in line for line in killed_run.told(run))
    assert stored < confirmed, "the log that was cut had some of them"
    went_on_to(run, 9, powered=False)


@pytest.mark.parametrize(
    "failpoint", [name for name in FAILPOINTS if not name.startswith((*SWEPT, "screenshot-write"))]
)
def test_killed_here_a_run_in_postgresql_and_s3_goes_on(
    run: RunDirectory, failpoint: str, postgresql_server: PostgreSQL, s3_url: str
) -> None:
    """Two runs of one name in one database: the other one stays as it is."""
    elsewhere = Run(database=postgresql_server.url, blobs=s3_url)
    other = RunDirectory(run.path.with_name("other") / "run")
    other.path.mkdir(parents=True)
    for one in (run, other):
        one.settle(killed_run.settings(1).model_copy(update={"run": elsewhere}))
    assert killed_run.process(other, 1).returncode == 0
    before = query(other, "SELECT id, fate FROM trajectories ORDER BY id")
    killed_and_continued(run, failpoint)
    kept = sorted(folder.name for folder in run.checkpoints.iterdir())
    assert kept[-1] in copies(f"{s3_url}/{run.place.key}"), "the last checkpoint was copied before the run ended"
    assert query(other, "SELECT id, fate FROM trajectories ORDER BY id") == before != []


def killed_and_continued(run: RunDirectory, failpoint: str) -> None:
    first_saved_unrecorded(run, failpoint)
    killed = killed_run.process(run, 60 if failpoint.startswith(SWEPT) else 8, failpoint)
    assert killed.returncode == -signal.SIGKILL, killed.stdout[-2000:] + killed.stderr[-2000:]
    last = max((line["trained"] for line in killed_run.told(run) if "trained" in line), default=0)
    went_on_to(run, last + 2)


def first_saved_unrecorded(run: RunDirectory, failpoint: str) -> None:
    if failpoint.startswith("folder-aside"):
        # A checkpoint is replaced where it was saved and not recorded: the run goes on before it, and makes it again.
        assert killed_run.process(run, 8, "checkpoint-saved:2").returncode == -signal.SIGKILL


def went_on_to(run: RunDirectory, updates: int, *, powered: bool = True) -> None:
    """Another process of the run ends it, and what there is then is what there has to be. `powered`: what was confirmed
    has to be there, too."""
    ((stored,),) = query(run, "SELECT count(*) FROM trajectories WHERE pooled_from = ''")
    ((saved,),) = query(run, "SELECT coalesce(max(version), 0) FROM checkpoints WHERE kept")
    went_on = killed_run.process(run, updates)
    assert went_on.returncode == 0, went_on.stdout[-2000:] + went_on.stderr[-2000:]
    summary = json.loads(went_on.stdout.splitlines()[-1])
    assert summary["updates"] == updates
    lines = killed_run.told(run)
    resumed = max(number for number, line in enumerate(lines) if "resumed" in line)
    assert lines[resumed]["resumed"] == saved, "no checkpoint that was recorded is lost"
    assert summary["trajectories"] == stored + sum("stored" in line for line in lines[resumed:]), "each counted once"
    check(run, lines, summary["trained"], powered=powered)


def query(run: RunDirectory, text: str) -> list[Any]:
    engine = create_engine(run.place.url() or sqlite_url(run.database))
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(text)]
    finally:
        engine.dispose()


def check(run: RunDirectory, lines: list[dict[str, Any]], trained: int, *, powered: bool = True) -> None:
    rows = partial(query, run)
    if not run.place.database:
        assert rows("PRAGMA integrity_check") == [("ok",)]
        assert rows("PRAGMA foreign_key_check") == []

    there = Counter(name for (name,) in rows("SELECT id FROM trajectories WHERE pooled_from = ''"))
    confirmed = Counter(line["stored"] for line in lines if "stored" in line)
    if powered:
        assert confirmed.keys() <= there.keys(), "nothing that was confirmed is lost"
        assert set(confirmed.values()) == {1}, "no trajectory was made again"

    consumed: dict[int, list[str]] = {}
    for update, group in rows("SELECT consumed_by_update, id FROM groups WHERE state = 'consumed' ORDER BY id"):
        consumed.setdefault(update, []).append(group)
    assert consumed == trained_groups(lines), "each update is recorded with what it trained on, once"
    assert [v for (v,) in rows('SELECT "update" FROM versions ORDER BY version')] == sorted(consumed)
    assert rows("SELECT count(*) FROM trajectories WHERE fate = 'trained'") == [(trained,)]

    sizes = "SELECT g.id, g.planned, count(t.id) FROM groups g LEFT JOIN trajectories t ON t.group_id = g.id AND "
    sizes += "t.pooled_from = '' WHERE g.state != 'open' GROUP BY g.id"
    assert all(planned >= number for _, planned, number in rows(sizes))
    numbers = sorted(int(group[1:]) for (group,) in rows("SELECT id FROM groups"))
    assert numbers == list(range(1, len(numbers) + 1)), "no group is missing"

    screenshots = files_at(run.screenshots)
    kept = rows("SELECT DISTINCT s.sha256 FROM screenshots s JOIN trajectories t ON t.id = s.trajectory_id")
    assert kept and all(screenshots.holds(file_name(digest)) for (digest,) in kept)
    assert rows("SELECT count(*) FROM screenshots s JOIN trajectories t ON t.id = s.trajectory_id "
                "WHERE NOT t.screenshots_kept") == [(0,)]  # fmt: skip
    for (path,) in rows("SELECT path FROM checkpoints WHERE kept"):
        assert manifest.problem(run.checkpoint(path)) is None
    kept_folders = {Path(path).name for (path,) in rows("SELECT path FROM checkpoints WHERE kept")}
    assert {folder.name for folder in run.checkpoints.iterdir()} == kept_folders, "nothing else is left"
