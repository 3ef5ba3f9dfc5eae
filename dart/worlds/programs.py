"""Programs of the user's on this machine, such as those that revert a machine or a device."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping

from dart.worlds.contract import EnvironmentFailure

MOST_SAID = 500
"""Bytes of a program's errors that a message has."""


async def run_here(
    command: str, values: Mapping[str, str], seconds: float, field: str, failure: type[EnvironmentFailure]
) -> None:
    """Run a command line without a shell; `{name}` in its words stands for `values[name]`.

    What it leaves running in the background is left alone, and not waited for. Raises `failure`, naming `field`, if it
    cannot be started, takes longer than `seconds`, or fails.
    """
    words = [_filled(word, values) for word in shlex.split(command)]
    # Files and no pipes: a pipe stays open for as long as anything that the command has started.
    with tempfile.TemporaryFile() as errors:
        try:
            process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=DEVNULL, stderr=errors)
        except OSError as error:
            raise failure(f"{field}: {words[0]} cannot be started: {error}") from error
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(end, process)
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


async def end(process: Process) -> None:
    """Kill a process and reap it."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word
