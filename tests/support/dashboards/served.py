"""`dart view` as a process of its own, and a browser that looks at it; skipped where Playwright is not installed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dart.workers.env.devtools import find_executable

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@contextlib.contextmanager
def viewing(*runs: Path) -> Iterator[str]:
    """Yields the address, without the slash at its end."""
    command = [sys.executable, "-m", "dart", "view", *map(str, runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?(?=/\s)", process.stdout.readline())
        if not found:
            raise RuntimeError(process.communicate()[0])
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """With the Chromium of the environments, not one of Playwright's own."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_executable(None), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()
