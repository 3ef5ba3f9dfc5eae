"""Commands of the user's on this machine: what they leave behind, what they say when they fail, and limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from dart.worlds import EnvironmentFailure
from dart.worlds.programs import run_here

GONE_SECONDS = 60.0
"""A hang guard."""


class Failure(EnvironmentFailure):
    pass


def gone(pid: int) -> bool | None:
    """None while it runs; a dead one that nobody has reaped yet is gone, too."""
    with contextlib.suppress(OSError):
        return True if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX" else None
    return True


async def run(command: str, seconds: float = GONE_SECONDS, **values: str) -> None:
    await run_here(command, values, seconds, "environment.options.renew", Failure)


async def test_what_a_command_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    """An emulator that it starts has the command's output and errors for as long as it runs."""
    note = tmp_path / "pid"
    await run(f"sh -c 'sleep 600 & echo $! > {note}'")
    pid = int(note.read_text())
    os.kill(pid, 0)
    assert os.getsid(pid) != os.getsid(0), "it outlives the worker, which ends with its own group"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def test_values_are_filled_in_after_the_words_are_split(tmp_path: Path) -> None:
    note = tmp_path / "note"
    program = f"import sys; open({str(note)!r}, 'w').write(sys.argv[1])"
    await run(shlex.join([sys.executable, "-c", program, "{host} and {port}"]), host="a b", port="'5'")
    assert note.read_text() == "a b and '5'"


async def test_a_command_that_fails_is_quoted_by_the_end_of_its_errors() -> None:
    with pytest.raises(Failure, match=r"^environment\.options\.renew ended with 3: x{496} no!$"):
        await run("""sh -c 'printf "%01000d no!" 0 | tr 0 x >&2; exit 3'""")
    with pytest.raises(Failure, match=r"^environment\.options\.renew: no-such-program cannot be started: "):
        await run("no-such-program")


async def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    note, began = tmp_path / "pid", time.monotonic()
    with pytest.raises(Failure, match=r"environment\.options\.renew took longer than 1 s"):
        await run(f"sh -c 'sleep 600 & echo $! > {note}; wait'", 1.0)
    assert time.monotonic() - began < GONE_SECONDS
    if note.exists():  # else the machine was too busy to get so far
        while gone(int(note.read_text())) is None:
            assert time.monotonic() - began < GONE_SECONDS, "the step that it was at goes on"
            await asyncio.sleep(0.05)
