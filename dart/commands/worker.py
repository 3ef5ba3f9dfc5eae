"""`dart worker`: one worker process."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import logging
import os
import re
import signal
import socket
import time
from pathlib import Path

from dart import failpoints
from dart.errors import UserError
from dart.malloc import keep_memory
from dart.processes.secrets import AUTHORITY, token_file
from dart.processes.settings import ending_signals, watch_parent
from dart.shortage import check_threads, ready_threads
from dart.wire.channel import TOKEN_ENVIRONMENT, Dial, read_token
from dart.wire.role import WorkerRole, goodbye
from dart.wire.worker import STOPPED, WorkerOptions, serve

Tls = tuple[Path | None, Path | None, Path | None]
"""(certificate authority, certificate, its key)."""
COORDINATOR_SECONDS = 600.0
"""How long a worker waits for a coordinator to begin: a cluster may start it last."""
LOOK_SECONDS = 0.5
FINISHED = goodbye("finished")
"""After this goodbye no worker is needed any more."""
NOT_FINISHED = 75
"""EX_TEMPFAIL: the exit code for every other goodbye, with --until-finished."""
ROLES = {
    "env": ("dart.workers.env.role", "EnvRole", "pip install 'dart-gui-rl[env-browser]'"),
    "rollout": ("dart.workers.rollout.role", "RolloutRole", "pip install 'dart-gui-rl[rollout,cpu]' (or gpu)"),
    "train": ("dart.workers.train.role", "TrainRole", "pip install 'dart-gui-rl[train,cpu]' (or gpu)"),
}


def run_worker(
    role: str,
    address: str | None,
    run: Path | None,
    worker_id: str | None,
    tls: Tls,
    *,
    until_finished: bool = False,
    ending_seconds: float | None = None,
) -> None:
    """Serve one role until goodbye. Raises UserError for anything that the user can fix.

    `until_finished`: a goodbye of a run that will be continued raises UserError, too.

    `ending_seconds`: it ends when standard input closes, and this much later at the latest; None: it does not.

    `run`: the run's directory, which this machine sees, has the coordinator's address and this role's token.
    """
    if (address is None) == (run is None):
        raise UserError("name either the coordinator with --coordinator HOST:PORT, or its run with --run RUN, not both")
    if role not in ROLES:
        raise UserError(f"--role {role!r} is not a role: use {', '.join(ROLES)}")
    if run is not None and _is_finished(run):  # a worker that missed the goodbye and is started again
        print(f"run {run} is finished: no worker is needed")
        return
    failpoints.role = role
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.enable()
    keep_memory()
    options = WorkerOptions(
        dial=_dial_of_run(role, run, tls) if run is not None else _dial(address or "", tls),
        worker_id=worker_id or f"{socket.gethostname()}-{role}-{os.getpid()}",
        # The address may be that of a coordinator that has ended. The next one reads a checkpoint before it listens.
        first_seconds=COORDINATOR_SECONDS if run is not None or until_finished else None,
        address_now=None if run is None else lambda: _told_address(run),
    )
    work = _load(role)
    if work.world_size > 1:
        options.worker_id = f"{options.worker_id}-{work.rank}"
    work.preload()
    import uvloop

    reason = uvloop.run(_serve(work, options, ending_seconds))
    if ending_seconds is not None and reason == STOPPED:  # by a signal: whoever started this worker may start it again
        raise SystemExit(128 + signal.SIGTERM)
    if until_finished and reason != FINISHED:
        raise UserError(f"--until-finished: {reason}: start this worker again to continue", exit_code=NOT_FINISHED)


def _dial(address: str, tls: Tls) -> Dial:
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}", address):
        raise UserError(f"--coordinator {address!r} is not HOST:PORT, for example 127.0.0.1:50051")
    return Dial(address, os.environ.pop(TOKEN_ENVIRONMENT, None), *tls)


def _dial_of_run(role: str, run: Path, tls: Tls) -> Dial:
    """As the coordinator leaves it in its directory, which is waited for. What the user gave takes precedence."""
    from dart.rundir import RunDirectory

    directory, until = RunDirectory(run), time.monotonic() + COORDINATOR_SECONDS
    while not directory.address.is_file():
        if time.monotonic() > until:
            raise UserError(
                f"--run {run}: no coordinator wrote its address there within {COORDINATOR_SECONDS:g} s: start it with "
                "`dart coordinator CONFIG --run RUN`, on a file system that this machine sees as well"
            )
        time.sleep(LOOK_SECONDS)
    if directory.secrets.is_dir():
        if TOKEN_ENVIRONMENT not in os.environ:  # the run may have been given tokens, and keep none of its own
            os.environ[TOKEN_ENVIRONMENT] = read_token(f"file:{token_file(directory.secrets, role)}", f"--run {run}")
        authority = directory.secrets / AUTHORITY
        tls = (tls[0] or (authority if authority.is_file() else None), *tls[1:])
    return _dial(directory.told_address(), tls)


def _is_finished(run: Path) -> bool:
    from dart.rundir import RunDirectory

    return RunDirectory(run).summary.is_file()


def _told_address(run: Path) -> str:
    from dart.rundir import RunDirectory

    return RunDirectory(run).told_address()


def _load(role: str) -> WorkerRole:
    module, name, remedy = ROLES[role]
    try:
        made: WorkerRole = getattr(importlib.import_module(module), name)()
    except ImportError as error:
        raise UserError(
            f"--role {role} needs {error.name or error}, which cannot be imported ({error}): {remedy}"
        ) from None
    return made


async def _serve(role: WorkerRole, options: WorkerOptions, ending_seconds: float | None) -> str:
    """Why it ended."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ready_threads(min(32, (os.cpu_count() or 1) + 4), "work"))  # asyncio's own number
    check_threads()
    for number in ending_signals():
        loop.add_signal_handler(number, stop.set)
    if ending_seconds is not None:
        watch_parent(loop, stop.set, ending_seconds)
    reason = await serve(role, options, stop)
    logging.getLogger(__name__).info("ended: %s", reason)
    return reason
