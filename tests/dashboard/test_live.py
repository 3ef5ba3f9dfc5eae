"""What a stream tells of a run that says nothing new."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from dashboards.made import small_run

from dart.dashboard import live
from dart.dashboard.library import Library
from dart.dashboard.live import Streams
from dart.errors import UserError
from dart.inspection.inspector import Inspector, Pulse
from dart.rundir import RunDirectory
from dart.store.records import RunState


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return small_run(tmp_path)


async def test_a_stream_with_nothing_new_says_so_in_an_event_that_pages_see(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment would keep the connection open, and no page could tell a run that is quiet from a broken tunnel."""

    async def locked(_: Inspector) -> Pulse:
        raise UserError("the database is locked")

    monkeypatch.setattr(Inspector, "pulse", locked)
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0.01)
    library = Library([run.path])
    streams = Streams(library, poll_seconds=0.001)
    async with asyncio.timeout(60), contextlib.aclosing(streams.stream(run.name)) as messages:
        told = [await anext(messages) for _ in range(4)]
    assert told == [
        b"retry: 2000\n\n",
        b'event: problem\ndata: {"error": "the database is locked"}\n\n',
        *[b"event: heartbeat\ndata: {}\n\n"] * 2,
    ]
    await library.close()


async def test_a_problem_that_comes_back_is_told_again(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the page would stand still, and look live."""
    looks, real = [], Inspector.pulse

    async def now_and_then(inspector: Inspector) -> Pulse:
        looks.append(1)
        if len(looks) % 2:
            raise UserError("the database is locked")
        return replace(await real(inspector), state=RunState.RUNNING)

    monkeypatch.setattr(Inspector, "pulse", now_and_then)
    library = Library([run.path])
    streams, told = Streams(library, poll_seconds=0.001), []
    async with asyncio.timeout(60), contextlib.aclosing(streams.stream(run.name)) as messages:
        while sum(message.startswith(b"event: problem") for message in told) < 2:
            told.append(await anext(messages))
    await library.close()
