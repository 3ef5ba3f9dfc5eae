"""What a run works on is taken away while it goes on: its database locked by a backup, its files removed."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from run_processes import killed_run
from run_processes.told import events

from dart.rundir import RunDirectory
from dart.store.lock import is_held

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 240


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.path.mkdir()
    return made


@pytest.fixture
def process(run: RunDirectory) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on for longer than any of these tests, once it has stored something."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"
    started = subprocess.Popen(
        [sys.executable, killed_run.__file__, str(run.path), "100000"],
        env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait(lambda: stored(run) > 5, started)
        yield started
    finally:
        started.kill()
        started.communicate()


def wait(until: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + HANG_SECONDS
    while not until():
        assert time.monotonic() < give_up, "hang guard"
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)


def stored(run: RunDirectory) -> int:
    told = run.path / "told.jsonl"
    return told.read_text().count('"stored"') if told.exists() else 0


def test_a_removed_database_ends_the_run_and_is_named(run: RunDirectory, process: subprocess.Popen[str]) -> None:
    run.database.unlink()
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert "run.db was removed or replaced during the run" in output
    (failed,) = events(run.metrics, "failed")
    assert "restore the run directory from a copy" in str(failed["why"])


def test_a_removed_lock_is_made_again(run: RunDirectory, process: subprocess.Popen[str]) -> None:
    run.lock_file.unlink()
    assert is_held(run.lock_file), "by its directory"
    wait(run.lock_file.exists, process)
    assert is_held(run.lock_file)


def test_a_backup_that_locks_the_database_is_waited_for(run: RunDirectory, process: subprocess.Popen[str]) -> None:
    with closing(sqlite3.connect(run.database, isolation_level=None, timeout=60)) as backup:
        backup.execute("BEGIN IMMEDIATE")
        wait(lambda: bool(events(run.metrics, "database_locked")), process)
        before = stored(run)
        backup.execute("ROLLBACK")
    wait(lambda: stored(run) > before + 5, process)
    wait(lambda: bool(events(run.metrics, "database_unlocked")), process)
    assert "another process has locked the database for" in str(events(run.metrics, "database_locked")[0]["why"])


def test_descriptors_that_run_out_for_a_while_are_waited_for(run: RunDirectory, process: subprocess.Popen[str]) -> None:
    """As where something else of the process needs them: it may have no more than it has."""
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        wait(lambda: bool(events(run.metrics, "machine_short")), process)
        before = stored(run)
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
    wait(lambda: stored(run) > before + 5, process)
    wait(lambda: bool(events(run.metrics, "machine_recovered")), process)
    why = str(events(run.metrics, "machine_short")[0]["why"])
    assert why == "too many open files: the limit of this process is 3: raise `ulimit -n`"
