"""Tasks' programs, `initial_setup.py` and `reward.py`, each run in a process of its own with limits.

They come with the task and have the worker's rights, so what is limited is what goes wrong, not what is meant. They see
few environment variables, a folder of their own, and programs named like browsers that only note what was to be opened:
published set-ups end with opening Chrome.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dart.worlds import EnvironmentFailure, limited
from dart.worlds.programs import end_session

BROWSERS = (
    "google-chrome", "google-chrome-stable", "chromium", "chromium-browser", "firefox", "xdg-open", "x-www-browser",
)  # fmt: skip
KEPT_VARIABLES = ("LANG", "LC_ALL", "TZ")
MOST_SAID = 8000
"""Characters kept of what a program prints."""
_NOTE = '#!/bin/sh\nfor word in "$@"; do echo "$word" >> "{opened}"; done\n'
_REWARD = re.compile(r"^\s*(?:REWARD:)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended. `said`: the end of its output; `errors`: the end of its standard error."""

    code: int
    said: str
    errors: str
    opened: tuple[str, ...]
    """Arguments of the browsers that it started."""

    @property
    def told(self) -> str:
        """The last line of its standard error, or of its output."""
        lines = (self.errors.strip() or self.said.strip() or "it printed nothing").splitlines()
        return lines[-1][:500]

    @property
    def missing_module(self) -> bool:
        """Whether it ended because a package is not installed, which is the machine's fault."""
        return self.code != 0 and self.told.startswith(("ModuleNotFoundError", "ImportError"))


async def run(
    program: str, folder: Path, python: str, seconds: float, megabytes: int, variables: Mapping[str, str]
) -> Ran:
    """Run the text of a Python program in `folder`.

    Raises EnvironmentFailure if it takes longer than `seconds`, by the clock or of processor time.
    """
    source, opened = folder / "program.py", folder / "opened"
    said, errors, shims = folder / "said", folder / "errors", folder / "bin"
    await asyncio.to_thread(_lay_out, source, program, shims, opened)
    environment = {
        **{name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        "PATH": f"{shims}:{os.environ.get('PATH', os.defpath)}", "HOME": str(folder), "TMPDIR": str(folder),
        "NO_PROXY": "*", "PYTHONDONTWRITEBYTECODE": "1", **variables,
    }  # fmt: skip
    limits = [str(os.getpid()), str(math.ceil(seconds)), str(megabytes)]
    command = [sys.executable, "-I", "-S", limited.__file__, *limits, python, str(source)]
    with said.open("wb") as output, errors.open("wb") as failures:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=failures,
            start_new_session=True,
        )  # fmt: skip
    try:
        async with asyncio.timeout(seconds):
            code = await process.wait()
    except TimeoutError:
        raise EnvironmentFailure(f"a program of the task took longer than {seconds:g} s") from None
    finally:
        await end_session(process)
    if code == -signal.SIGXCPU:  # its processor time was up before the clock, as with threads
        raise EnvironmentFailure(f"a program of the task took longer than {seconds:g} s of processor time")
    return await asyncio.to_thread(_result, code, said, errors, opened)


def reward_in(said: str) -> float | None:
    """The last number that stands alone on a line, with or without "REWARD:" before it; None if there is none."""
    found = _REWARD.findall(said)
    return float(found[-1]) if found else None


def _lay_out(source: Path, program: str, shims: Path, opened: Path) -> None:
    source.write_text(program, encoding="utf-8")
    opened.unlink(missing_ok=True)
    shims.mkdir(exist_ok=True)
    for name in BROWSERS:
        shim = shims / name
        shim.write_text(_NOTE.format(opened=opened))
        shim.chmod(0o700)


def _result(code: int, said: Path, errors: Path, opened: Path) -> Ran:
    words = opened.read_text(errors="replace").splitlines() if opened.exists() else ()
    return Ran(code, _end(said), _end(errors), tuple(words))


def _end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_SAID))
        return file.read().decode(errors="replace")
