"""Programs of the user's on this machine, such as those that revert a machine or a device."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping

from dart.worlds import limited
from dart.worlds.contract import EnvironmentFailure

MOST_SAID = 500
"""Bytes of a program's errors that a message has."""


def checked(field: str, command: str, choices: str, nothing: str = "") -> str:
    """A command line of the config, as it is. `choices`: what may be written; `nothing`: what names nothing to do.

    Raises ValueError if it names nothing, or if its quotes do not match.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{field} {command!r} cannot be split into words ({error}): correct its quotes") from None
    if not words or command == nothing:
        raise ValueError(f"{field} {command!r} names nothing to do: write {choices}")
    return command


async def run_here(
    command: str, values: Mapping[str, str], seconds: float, field: str, failure: type[EnvironmentFailure]
) -> None:
    """Run a command line without a shell; `{name}` in its words stands for `values[name]`.

    What it leaves running in the background is left alone, and not waited for, unless it takes longer than `seconds`:
    then all of it is killed. The command itself does not outlive the worker. Raises `failure`, naming `field`, if it
    cannot be started, takes too long, or fails.
    """
    words = [_filled(word, values) for word in shlex.split(command)]
    if shutil.which(words[0]) is None:
        raise failure(f"{field}: {words[0]} cannot be started: it is no program of this machine")
    tied = (sys.executable, "-I", "-S", limited.__file__, str(os.getpid()), "0", "0")
    # Files and no pipes: a pipe stays open for as long as anything that the command has started.
    with tempfile.TemporaryFile() as errors:
        # In a session of its own, because the worker's process group ends with the worker.
        process = await asyncio.create_subprocess_exec(
            *tied, *words, stdin=DEVNULL, stdout=DEVNULL, stderr=errors, start_new_session=True
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(end_session, process)
            try:
                async with asyncio.timeout(seconds):
                    await process.wait()
            except TimeoutError:
                raise failure(f"{field} took longer than {seconds:g} s") from None
            undo.pop_all()
        if process.returncode:
            errors.seek(max(0, os.fstat(errors.fileno()).st_size - MOST_SAID))
            said = errors.read(MOST_SAID).decode(errors="replace").strip()
            raise failure(f"{field} ended with {process.returncode}: {said}")


async def end_session(process: Process) -> None:
    """Kill a process with all that it has started, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def end(process: Process) -> None:
    """Kill a process and reap it."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word
