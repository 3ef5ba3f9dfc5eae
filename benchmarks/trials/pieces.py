"""One training run in pieces: `dart train`, interrupted after some minutes, then `--resume`, until it has finished.

A piece ends as after Ctrl-C: the weights are saved if that takes less than three seconds, and everything sampled is in
the run's database anyway. So whatever is killed at whatever moment, this process included, the next call goes on: with
the newest checkpoint, and with all groups that were sampled since. `stop` counts over all pieces. Beside the run stands
which code each of its pieces began with (`made_by`).
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from benchmarks.trials import sources
from benchmarks.trials.sources import Code
from dart.coordinator.summary import write_json
from dart.errors import INTERRUPTED, UserError
from dart.processes.logs import last_line
from dart.rundir import RunDirectory
from dart.store.lock import is_held
from dart.store.records import GroupKind

ENDING_SECONDS = 120.0
"""A piece that has not ended this long after its interruption is killed."""
LOOK_SECONDS = 60.0
"""Between two looks whether a run has what is wanted of it."""
MOST_PIECES = 100
MOST_FAILURES = 2
"""Pieces in a row that may end with an error, or without having added anything."""
ORIGIN, PIECES, LOG = "origin.json", "pieces.json", "output.log"
_INTERRUPTED_WITH_PARENT = f"""
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {int(signal.SIGINT)})  # PR_SET_PDEATHSIG
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run to make: `overrides` of the config, everything of it under `folder`."""

    folder: Path
    config: Path
    overrides: tuple[str, ...]
    origin: Mapping[str, object]
    """What the run belongs to: another one's pieces are not continued."""


def train(
    run: Run,
    piece_seconds: float | None,
    goes_on: Callable[[], bool] = lambda: True,
    over: Callable[[RunDirectory], bool] | None = None,
) -> RunDirectory | None:
    """Make pieces until the run has finished; its directory, or None if `goes_on()` no longer held before a piece.

    `over`: is asked once a minute, and ends the run as if its last update were done.

    Raises UserError if pieces fail, if another process works on the run, or if its pieces are another run's.
    """
    _take_up(run)
    failures, why = 0, ""
    for _ in range(MOST_PIECES):
        if (begun := _newest(run.folder)) and begun.summary.is_file():
            return begun
        if failures > MOST_FAILURES:
            raise UserError(f"{why}: {last_line(run.folder / LOG) or 'it said nothing'} ({run.folder} is kept)")
        if not goes_on():
            return None
        _note_code(run.folder)
        before = _reached(begun)
        code = _piece(_command(run, begun), run.folder, piece_seconds, over)
        if code not in (0, INTERRUPTED):
            failures, why = failures + 1, f"exit code {code}"
        elif _reached(_newest(run.folder)).is_beyond(before):
            failures = 0
        else:
            failures, why = failures + 1, "the last piece added neither a trajectory nor an update"
    raise UserError(f"{run.folder} has not finished in {MOST_PIECES} pieces: make them longer, or look at {LOG} there")


def _take_up(run: Run) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    origin, path = json.loads(json.dumps({**run.origin, "overrides": run.overrides})), run.folder / ORIGIN
    if not path.exists():
        write_json(path, origin)
    elif (there := json.loads(path.read_text(encoding="utf-8"))) != origin:
        other = sorted(name for name in origin if there.get(name) != origin[name])
        raise UserError(
            f"{run.folder} was begun with another {', '.join(other)}: remove it to begin anew, or restore what it was "
            "begun with"
        )
    if (begun := _newest(run.folder)) is not None:
        _wait_until_free(begun)


def _wait_until_free(run: RunDirectory) -> None:
    """An earlier piece may still be ending, if the process that made it was killed. Raises UserError."""
    late = time.monotonic() + ENDING_SECONDS
    while is_held(run.lock_file):
        if time.monotonic() > late:
            raise UserError(f"another process works on {run.path}: wait until it has ended")
        time.sleep(0.5)


def _newest(folder: Path) -> RunDirectory | None:
    """The run's directory, once a run has been recorded in its database."""
    found = [RunDirectory(path.parent) for path in sorted(folder.glob("*/run.db")) if _has_run(path)]
    return found[-1] if found else None


def _has_run(database: Path) -> bool:
    """False if the first piece was killed before it had recorded the run: then there is nothing to resume."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            return bool(connection.execute("select count(*) from runs").fetchone()[0])
        except sqlite3.OperationalError:
            return False


@dataclass(frozen=True, slots=True)
class _Reached:
    """How far a run has come. `newest`: when its newest trajectory finished."""

    newest: float = 0.0
    updates: int = 0

    def is_beyond(self, other: _Reached) -> bool:
        return self.newest > other.newest or self.updates > other.updates


def _reached(run: RunDirectory | None) -> _Reached:
    """Successes that were only copied into the run's pool do not count. Raises UserError for a broken database."""
    if run is None:
        return _Reached()
    trajectories = (
        "select max(trajectories.finished) from trajectories join groups on groups.id = trajectories.group_id "
        "where groups.kind != ?"
    )
    with contextlib.closing(sqlite3.connect(f"file:{run.database}?mode=ro", uri=True)) as connection:
        try:
            (newest,) = connection.execute(trajectories, (GroupKind.COLLECTED.value,)).fetchone()
            (updates,) = connection.execute("select count(*) from events where kind = 'update'").fetchone()
        except sqlite3.Error as error:
            raise UserError(f"{run.database} cannot be read ({error}): look at {LOG} beside its folder") from None
    return _Reached(newest or 0.0, updates)


def _note_code(folder: Path) -> None:
    """Add the code that makes the next piece to what is kept of the run."""
    write_json(folder / PIECES, {"pieces": [*made_by(folder), sources.current()]})


def made_by(folder: Path) -> list[Code]:
    """The code that each piece of the run in this folder began with."""
    path = folder / PIECES
    made: list[Code] = json.loads(path.read_text(encoding="utf-8"))["pieces"] if path.exists() else []
    return made


def _command(run: Run, begun: RunDirectory | None) -> list[str]:
    command = [sys.executable, "-m", "dart", "train", str(run.config), "--quiet", *as_sets(run.overrides)]
    command += as_sets((f"run.directory={run.folder}", "dashboard.enabled=false"))
    return [*command, "--resume", str(begun.path)] if begun else command


def as_sets(overrides: Sequence[str]) -> list[str]:
    return [part for one in overrides for part in ("--set", one)]


def tied(command: Sequence[str]) -> list[str]:
    """The command, which gets a SIGINT when its parent ends, even if by SIGKILL."""
    return [sys.executable, "-c", _INTERRUPTED_WITH_PARENT, *command]


def _drain(run: RunDirectory, output: BinaryIO) -> bool:
    """End its training as if its last update were done. Returns False if it does not train just now."""
    command = [sys.executable, "-m", "dart", "control", "drain", str(run.path)]
    return subprocess.run(command, stdout=output, stderr=output, check=False).returncode == 0


def _piece(
    command: Sequence[str], folder: Path, seconds: float | None, over: Callable[[RunDirectory], bool] | None
) -> int:
    """Run the command, interrupt it after `seconds`, or drain it when it is `over`; its exit code."""
    with (
        (folder / LOG).open("ab") as output,
        subprocess.Popen(
            tied(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        ends = math.inf if seconds is None else time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, LOOK_SECONDS))
            if over is not None and (begun := _newest(folder)) is not None and over(begun):
                over = None if _drain(begun, output) else over
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Interrupted while it was still starting, it may end with any code.
            return 0 if process.wait(ENDING_SECONDS) == 0 else INTERRUPTED
        process.kill()
        process.wait()
    return INTERRUPTED  # nothing that was stored is lost
