"""`dart track`: sends a run to experiment trackers, while it lasts or afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from dart.config import Tracking
from dart.errors import UserError
from dart.inspection.inspector import Inspector
from dart.inspection.runs import masked
from dart.processes.settings import ending_signals, watch_parent
from dart.rundir import RunDirectory
from dart.store.records import RunRecord, RunState
from dart.trackers.base import KINDS, Tracked, Tracker, begins_anew, make_tracker
from dart.trackers.following import Following, follow, tell_outcome

LOOK_SECONDS = 20.0
"""Between two looks at the run. One that finds something new reads all of its curves, which takes a long run's
database a third of a second."""
LAST_WORDS_SECONDS = 300.0
"""How long `dart train` waits at its end for what a tracker has still to send."""


@dataclass(frozen=True, slots=True)
class TrackOptions:
    """The command line of `dart track`. `to` and `project`: as the run's config says where they are not given."""

    run: Path | None = None
    to: tuple[str, ...] = ()
    project: str | None = None
    follow: bool = False
    parent_watch: bool = False


@dataclass(slots=True)
class _Sent:
    """One tracker of the run. `path`: where `at` is kept. `failed`: why it gets nothing more from this process."""

    kind: str
    path: Path
    at: Following
    tracker: Tracker | None
    count: int = 0
    failed: str = ""


def track(options: TrackOptions) -> None:
    """Send what the trackers have not been told yet. Raises UserError where a tracker fails."""
    directory = RunDirectory.chosen(options.run)
    asyncio.run(_track(options, directory))


async def _track(options: TrackOptions, directory: RunDirectory) -> None:
    inspector = await Inspector.open(directory)
    try:
        record = await inspector.files.record()
        tracking = Tracking.model_validate(record.config.get("tracking") or {})
        kinds = tuple(dict.fromkeys(options.to or tracking.to))
        if not kinds:
            raise UserError(f"no tracker is named: use --to with {', '.join(KINDS)}, or set tracking.to in the config")
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise UserError(f"tracker {unknown[0]!r} is unknown: use {', '.join(KINDS)}")
        trackers = [_begun(kind, options.project or tracking.project, inspector, record) for kind in kinds]
        for sent in trackers:
            _tell_failure(sent, options)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, stop.set)
        if options.parent_watch:
            watch_parent(loop, stop.set)
        await _send(inspector, trackers, tracking, stop, options)
    finally:
        await inspector.close()
    for sent in trackers:
        click.echo(f"{sent.kind}: {sent.count} updates and evaluations sent")
    if failed := [f"tracker {sent.kind} failed: {sent.failed}" for sent in trackers if sent.failed]:
        raise UserError("\n".join(failed) + "\nthe run itself is not affected; `dart track RUN` continues from here")


def _begun(kind: str, project: str, inspector: Inspector, record: RunRecord) -> _Sent:
    directory = inspector.files.directory
    folder = (directory.trackers / kind).absolute()
    path = directory.trackers / f"{kind}.json"
    try:
        at = Following.read(path, record.id, record.started)
    except (OSError, ValueError, TypeError) as error:
        return _Sent(kind, path, Following(), None, failed=f"{path} cannot be read: {error}")
    if begins_anew(kind):
        at = Following(id=at.id)
    tracked = Tracked(project, at.id, directory.name, masked(record.config), folder, at.over)
    try:
        return _Sent(kind, path, at, make_tracker(kind, tracked))
    except UserError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001  a tracker's library raises whatever it likes
        why = f"it cannot start: {error}: check its settings"
    return _Sent(kind, path, at, None, failed=why)


def _tell_failure(sent: _Sent, options: TrackOptions) -> None:
    if sent.failed and options.follow:  # else it is told in a moment, at the end
        click.echo(f"tracker {sent.kind} failed: {sent.failed}", err=True)


async def _send(
    inspector: Inspector, trackers: list[_Sent], tracking: Tracking, stop: asyncio.Event, options: TrackOptions
) -> None:
    state: str = RunState.RUNNING
    while True:
        over = False
        try:
            state = inspector.files.directory.state(await inspector.files.record())
            for sent in trackers:
                await _one(inspector, sent, tracking, options)
            over = state != RunState.RUNNING
        except UserError as error:  # the run cannot be read: its database may be back in a moment
            if not options.follow or stop.is_set():
                raise
            click.echo(f"{error}: it is tried again", err=True)
        if over or not options.follow or stop.is_set() or all(sent.failed for sent in trackers):
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_SECONDS)
    for sent in trackers:
        if sent.tracker is not None and not sent.failed:
            try:
                sent.tracker.close(state)
            except Exception as error:  # noqa: BLE001  as below
                sent.failed = f"{type(error).__name__}: {error}"


async def _one(inspector: Inspector, sent: _Sent, tracking: Tracking, options: TrackOptions) -> None:
    """A tracker's failure is told once; it gets nothing more from this process. Raises UserError if the run cannot be
    read."""
    if sent.tracker is None or sent.failed:
        return
    try:
        sent.count += await follow(inspector, sent.tracker, sent.at, tracking.pictures, tracking.pictures_every_updates)
        if not options.parent_watch:  # `dart train` has the outcome sent once its learning curve is drawn
            await tell_outcome(inspector, sent.tracker, sent.at)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a tracker's library raises whatever it likes
        sent.failed = f"{type(error).__name__}: {error}"
        _tell_failure(sent, options)
    sent.at.write(sent.path)


def last_words(directory: RunDirectory, to: tuple[str, ...]) -> None:
    """Send the trackers how the run ended. What goes wrong is printed, and does not fail the run."""
    click.echo(f"sending the outcome to {', '.join(to)} (Ctrl-C skips it)")
    command = [sys.executable, "-m", "dart", "track", str(directory.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LAST_WORDS_SECONDS, check=False)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        click.echo(f"the trackers have not been sent everything: `dart track {directory.path}` sends the rest")
        return
    if done.returncode:
        click.echo(f"\n{done.stderr}".rpartition("\nerror: ")[2].strip() or "a tracker failed", err=True)
