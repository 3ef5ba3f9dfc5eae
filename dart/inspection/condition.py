"""What a run is doing now, and why it waits or has ended: from its coordinator if that answers, else from what it left.

A run whose process ended says nothing any more; its last events say which stalls were not over, and what failed last.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from dart.core.json_text import JSON, read_object
from dart.core.status import Figures, Stall, Status
from dart.errors import UserError
from dart.inspection.opening import RunFiles, shown
from dart.inspection.records import RunStatus
from dart.inspection.wording import plain, quarantine_lines, stall_lines
from dart.rundir import HERE, RunDirectory
from dart.store.reader import select_last_sequence, select_newest
from dart.store.records import Event, RunKind, RunRecord, RunState, event_from_row
from dart.v1 import control_pb2 as cpb
from dart.v1 import control_pb2_grpc
from dart.wire.channel import TOKEN_ENVIRONMENT, Dial, token_in
from dart.wire.status import status_from_proto

TIMEOUT_SECONDS, STRANGER_SECONDS = 5.0, 1.0
"""For an answer of a coordinator: of this user's run, and of another user's."""
MOST_CREDENTIAL = 64 << 10
"""Bytes of a token's or a certificate's file."""
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")
"""gRPC would take other forms, too, such as unix:PATH."""
MOST_FAILURES = 3
CONTINUING = ("train", "coordinator", "launch", "eval")
"""The commands of dart that continue a run."""
MOST_OF_WORD = 4096
MOST_EVENTS = 1000
"""Stall events that are searched, newest first, for stalls that were not over."""
MOST_OF_EVENT = 8192
"""Characters of one."""


# ---- a live run ----


async def ask(dial: Dial, seconds: float = TIMEOUT_SECONDS) -> cpb.GetStatusResponse | None:
    """A coordinator's status, or None when it does not answer. Raises UserError when it refuses the token."""
    async with dial.channel() as channel:
        try:
            answer: cpb.GetStatusResponse = await control_pb2_grpc.ControlServiceStub(channel).GetStatus(
                cpb.GetStatusRequest(), timeout=seconds, metadata=dial.metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise UserError(
                    f"coordinator {dial.address} refused the token: set DART_TOKEN to the control token"
                    + ("" if dial.token else ", and name the coordinator with --address if its run is another user's")
                ) from None
            return None
        return answer


def check_one(run: Path | None, address: str | None) -> None:
    """Raises UserError where a command line names both a run directory and the address of a coordinator."""
    if run is not None and address is not None:
        raise UserError(f"{run} and --address {address} may be two runs: leave one of them out")


def no_answer(address: str) -> str:
    return f"its coordinator at {address} does not answer"


async def ask_run(
    directory: RunDirectory, record: RunRecord, tls_ca: Path | None = None
) -> cpb.GetStatusResponse | None:
    """`ask` for a running run's coordinator."""
    return await ask(reach(directory, record, tls_ca), TIMEOUT_SECONDS if directory.is_own else STRANGER_SECONDS)


def reach(directory: RunDirectory, record: RunRecord, tls_ca: Path | None = None) -> Dial:
    """How to reach the run's coordinator. Raises UserError where its address or its certificate cannot be used.

    The run's database names the address, so what it is told depends on whose run it is: DART_TOKEN goes only to a run
    of this user's, and files are read as `RunDirectory.read_trusted` says. Without `tls_ca`, the coordinator's own
    certificate is trusted.
    """
    address = str(record.control_address)
    if not _ADDRESS.fullmatch(address):
        raise UserError(f"run {record.id}: its coordinator's address is {address[:100]!r}, and not HOST:PORT")
    server = record.config.get("server", {})
    authority: Path | bytes | None = tls_ca
    if tls_ca is None and (certificate := server.get("tls_certificate")):
        try:
            authority = directory.read_trusted(Path(certificate), MOST_CREDENTIAL)
        except OSError as error:
            raise UserError(
                f"server.tls_certificate of run {record.id}: {certificate} is not read ({error.strerror}): name the "
                "coordinator's certificate with --tls-ca, and its address with --address"
            ) from None
    token = _own_token(directory, server.get("tokens", {}).get("control", ""))
    if token is None and directory.is_own:
        token = os.environ.get(TOKEN_ENVIRONMENT)
    return Dial(address, token, authority)


def _own_token(directory: RunDirectory, source: str) -> str | None:
    """The run's control token, if it is kept in a file that may be used here."""
    kind, _, name = source.partition(":")
    if kind != "file":
        return None
    try:
        return token_in(directory.read_trusted(Path(name), MOST_CREDENTIAL), source, "server.tokens.control")
    except (OSError, ValueError, UserError):
        return None


async def dial_of(files: RunFiles, tls_ca: Path | None = None) -> Dial:
    """`reach`, for a run that must be running. Raises UserError if it has ended."""
    record = await files.record()
    if (state := files.directory.state(record)) != RunState.RUNNING:
        raise UserError(f"run {record.id} is {state}: only one that is running can be controlled")
    if not record.control_address:
        raise UserError(f"run {record.id} is still starting: try again in a moment")
    return reach(files.directory, record, tls_ca)


async def condition(files: RunFiles) -> RunStatus:
    """What the run is doing, or how it ended; `why` says so where its coordinator cannot be asked. Raises UserError if
    the database cannot be read."""
    record = await files.record()
    state = files.directory.state(record)
    refused: tuple[str, ...] = ()
    if state == RunState.RUNNING and record.control_address:
        try:
            answer = await ask_run(files.directory, record)
        except UserError as error:
            answer, refused = None, (str(error),)
        if answer is not None:
            status = status_from_proto(answer)
            lines = [line for stall in status.stalls for line in stall_lines(stall)]
            return RunStatus(True, status, (*lines, *quarantine_lines(status.quarantined)))
        refused = refused or (no_answer(record.control_address),)
    ended = await how_it_ended(files)
    figures = await last_figures(files) or Figures()
    # A process that was killed recorded no end: its last event is the nearest to one.
    last = time.time() if state == RunState.RUNNING else ended.last_event and ended.last_event.unix_seconds
    elapsed = max(0.0, (record.finished or last or record.started) - record.started)
    status = Status(record.id, str(state), figures, elapsed_seconds=elapsed, stalls=ended.stalls)
    why = () if state == RunState.FINISHED else tuple(map(shown, ended.lines()))
    return RunStatus(False, status, (*refused, *why))


# ---- a run that has ended ----


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that no process works on, and what its events say about its end."""

    directory: Path
    record: RunRecord
    state: str
    phase: str = ""
    """The last phase in which it worked."""
    why: str = ""
    """What ended it, if it could still record that."""
    stalls: tuple[Stall, ...] = ()
    """The stalls that were not over."""
    failures: tuple[tuple[float, str], ...] = ()
    """(Unix seconds, reason) of the last failed attempts, newest first."""
    last_event: Event | None = None
    last_update: Event | None = None

    def lines(self) -> Iterator[str]:
        """What `dart why` prints: the run's name and state, then the rest."""
        yield f"{self.record.id}: {self.state}" + (f" while it was {self.phase}" if self.phase else "")
        if self.why:
            yield f"it ended because: {plain(self.why, 2000)}"
        elif self.state == RunState.INTERRUPTED and self.record.finished is None:
            yield (
                "its process ended without recording why: it was killed, the machine ran out of memory, or it was "
                "switched off; the system's log may say (dmesg, journalctl)"
            )
        elif self.state == RunState.INTERRUPTED:
            yield "it was stopped by Ctrl-C or a signal"
        for stall in self.stalls:
            yield from stall_lines(stall)
        for when, words in self.failures:
            yield f"an attempt failed at {clock(when)}: {plain(words)}"
        if self.last_update is not None:
            yield f"the last update was at {clock(self.last_update.unix_seconds)}"
        if self.last_event is not None:
            yield f"the last event, {plain(self.last_event.kind)}, was at {clock(self.last_event.unix_seconds)}"
        if self.state in (RunState.INTERRUPTED, RunState.FAILED):
            yield from go_on(self.record.kind, self.directory, self.record.config.get("again")).splitlines()

    def to_json(self) -> dict[str, JSON]:
        return {
            "run": self.record.id,
            "state": str(self.state),
            "phase": self.phase,
            "why": self.why,
            "stalls": [asdict(stall) for stall in self.stalls],
            "failures": [{"unix_seconds": when, "why": words} for when, words in self.failures],
            "last_event_unix_seconds": self.last_event.unix_seconds if self.last_event else None,
            "last_update_unix_seconds": self.last_update.unix_seconds if self.last_update else None,
        }


async def how_it_ended(files: RunFiles) -> Ended:
    """What the run's last process left; stalls and failures of the processes before it say nothing about its end."""
    record = await files.record()
    entered = _short(await newest_events(files, "phase", MOST_EVENTS))
    phases = [str(read_object(event.json)["phase"]) for event in entered[:2]]
    began = next((event.sequence for event in entered if read_object(event.json).get("begins")), 0)
    state = files.directory.state(record)
    ended = await newest_events(files, "failed") if state == RunState.FAILED else []
    stalled = _short(await newest_events(files, "stalled", MOST_EVENTS, after=began))
    moving = _short(await newest_events(files, "moving", MOST_EVENTS, after=began))
    unfinished = state != RunState.FINISHED
    failed = await newest_events(files, "attempt_failed", MOST_FAILURES, after=began) if unfinished else []
    updates, final = await newest_events(files, "update"), await newest_events(files)
    worked = [phase for phase in phases if phase not in set(RunState)]
    return Ended(
        files.directory.path,
        record,
        state,
        worked[0] if worked and unfinished else "",
        str(read_object(ended[0].json)["why"]) if ended else "",
        _still(stalled, moving) if unfinished else (),
        tuple((event.unix_seconds, str(read_object(event.json).get("why", ""))) for event in failed),
        final[0] if final else None,
        updates[0] if updates else None,
    )


async def newest_events(files: RunFiles, kind: str = "", limit: int = 1, after: int = 0) -> list[Event]:
    """The last events of a kind, or of all kinds, newest first. `after`: only those with a higher sequence number."""
    return [event_from_row(row) for row in await files.rows(select_newest(files.run_id, kind, limit, after))]


def _short(events: list[Event]) -> list[Event]:
    """Those that dart may have written: a thousand of any length would take long to read."""
    return [event for event in events if len(event.json) <= MOST_OF_EVENT]


async def last_figures(files: RunFiles) -> Figures | None:
    """The run's figures as of its last update; None before the first."""
    updates = await newest_events(files, "update")
    return Figures.from_json(read_object(updates[0].json)) if updates else None


async def last_sequence(files: RunFiles) -> int:
    """Sequence number of the newest event; 0 if there is none."""
    return int((await files.rows(select_last_sequence(files.run_id)))[0]["last"])


def go_on(kind: RunKind, directory: Path, again: object = ()) -> str:
    """What to do with a run that did not finish: a line, and the command that continues it on a line of its own.

    `again`: the words of that command as the run recorded them. Runs of earlier releases have none.
    """
    if kind is RunKind.COLLECTION:
        return f"what it collected can still be used: curation.pool.sources=[{directory}], or sft.sources"
    words = [plain(str(word), MOST_OF_WORD) for word in again] if isinstance(again, list | tuple) else []
    if words[:1] != ["dart"] or words[1:2] not in [[name] for name in CONTINUING]:
        words = ["dart", "eval" if kind is RunKind.EVALUATION else "train", f"{HERE}/config.yaml", "--resume", HERE]
    workers = ", and start its workers again" if words[1] == "coordinator" or "--external-workers" in words else ""
    return f"continue with this command{workers}:\n{RunDirectory(directory).command(words)}"


def _still(stalled: Sequence[Event], moving: Sequence[Event]) -> tuple[Stall, ...]:
    """The stalls that have not ended, newest first; both lists are newest first."""
    over: dict[tuple[str, str], int] = {}
    for event in moving:
        over.setdefault(Stall.from_json(read_object(event.json)).name, event.sequence)
    found: dict[tuple[str, str], Stall] = {}
    for event in stalled:
        stall = Stall.from_json(read_object(event.json))
        if over.get(stall.name, 0) < event.sequence:
            found.setdefault(stall.name, stall)
    return tuple(found.values())


def clock(unix_seconds: float) -> str:
    """This machine's time, with its zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(unix_seconds))
