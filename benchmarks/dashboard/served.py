"""`dart view` as a process of its own, and the Chromium of the environments to look at it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dart.workers.env.devtools import find_executable

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@dataclass(frozen=True, slots=True)
class Served:
    """`address`: without the slash at its end. `pid`: of the process that serves."""

    address: str
    pid: int


@contextlib.contextmanager
def serving(*runs: Path) -> Iterator[Served]:
    """Raises RuntimeError, with what it printed, if it does not start."""
    command = [sys.executable, "-m", "dart", "view", *map(str, runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?(?=/\s)", process.stdout.readline())
        if not found:
            raise RuntimeError(process.communicate()[0])
        yield Served(found[0], process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """It needs Playwright, of the extra dev, and no browser of Playwright's own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_executable(None), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()
