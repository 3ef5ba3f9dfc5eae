"""`dart view` as a process of its own, and a browser that looks at it; skipped where Playwright is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.dashboard import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@contextlib.contextmanager
def viewing(*runs: Path) -> Iterator[str]:
    """Yields the address, without the slash at its end."""
    with served.serving(*runs) as found:
        yield found.address


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    pytest.importorskip("playwright.sync_api")
    with served.browsing() as browser:
        yield browser
