"""Hosts and evaluators of a worker: what they are locked by, what a host's screen becomes, and who outlives whom."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from osworld import standin
from osworld.machine import FakeMachine

from dart.core.action import Click, Drag, Point
from dart.core.types import Task
from dart.workers.env.osworld.options import Host, OSWorldOptions, StaticPool
from dart.workers.env.osworld.pools import StaticHosts
from dart.workers.env.osworld.world import OSWorld

GONE_SECONDS = 60.0
"""A hang guard."""
WORKER = """
import asyncio, sys
from pathlib import Path
from dart.workers.env.osworld import evaluator

evaluator.PROGRAM = Path(sys.argv[1])
asyncio.run(evaluator._Process(Path(sys.executable)).ask({}, 600.0))
"""
BUSY = """
import os, sys, time
from pathlib import Path

sys.stdin.readline()
note = Path(sys.argv[0]).with_suffix(".pid")
note.with_suffix(".new").write_text(str(os.getpid()))
note.with_suffix(".new").rename(note)
time.sleep(600)
"""


def test_an_evaluator_does_not_outlive_its_worker(tmp_path: Path) -> None:
    """The next worker reverts the machine that it is about to change."""
    busy, note = tmp_path / "busy.py", tmp_path / "busy.pid"
    busy.write_text(BUSY)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(busy)])
    try:
        began = time.monotonic()
        while not note.exists():
            assert worker.poll() is None and time.monotonic() - began < GONE_SECONDS
            time.sleep(0.05)
    finally:
        worker.kill()
        worker.wait()
    evaluator = int(note.read_text())
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            one, began = psutil.Process(evaluator), time.monotonic()
            while one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() - began < GONE_SECONDS
                time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(evaluator, signal.SIGKILL)


async def test_places_are_pixels_of_the_last_screenshot(tmp_path: Path) -> None:
    """An action may change the screen's resolution."""
    with FakeMachine((160, 224)) as machine:
        options = OSWorldOptions.model_validate(
            {
                "tasks_folder": str(standin.tasks(tmp_path / "tasks")),
                "evaluators": str(standin.environment(tmp_path / "evaluators")),
                "state_folder": str(tmp_path / "state"),
                "static": {"hosts": [f"127.0.0.1:{machine.port}"]}, "start_seconds": 0, "settle_seconds": 0,
            }
        )  # fmt: skip
        world = OSWorld()
        try:
            await world.start(options, (160, 224))
            env = await world.lease()
            await env.reset(Task("osworld", "os/write"))
            machine.screen = (80, 64)
            seen = await env.act(Click(Point(0.5, 0.5)))
            assert (seen.image.width, seen.image.height) == (80, 64)
            await env.act(Drag((Point(0.5, 0.5), Point(0.75, 0.25))))
            assert machine.gui.calls == [
                "click(80.0, 112.0, button='left')", "moveTo(40.0, 32.0)", "dragTo(60.0, 16.0, duration=1.0)",
            ]  # fmt: skip
        finally:
            await world.close()


@pytest.mark.parametrize(("host", "own"), [("127.0.0.1", True), ("localhost", True), ("10.0.0.5", False)])
async def test_a_host_of_this_machines_own_is_locked_for_this_machine_alone(
    host: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the locks may be on a network file system, and so may that of the evaluations' files."""
    async with httpx.AsyncClient() as client:
        pools, taken = [], []
        for machine in ("one", "two"):
            monkeypatch.setattr(socket, "gethostname", lambda machine=machine: machine)
            pools.append(StaticHosts(StaticPool(hosts=(Host(host=host),)), tmp_path, client))
        taken.append(await pools[0].take())
        assert (taken[0].host, taken[0].server) == (host, 5000)
        free = [pools[1]._locks.take(address.id) for address in pools[1]._waiting]
        assert free == [own]
        for pool in pools:
            await pool.close()


def test_a_host_is_written_short() -> None:
    options = OSWorldOptions.model_validate({"tasks_folder": "x", "static": {"hosts": ["a", "b:1:2", {"host": "c"}]}})
    assert [(one.host, one.server, one.chromium, one.vlc) for one in options.static.hosts] == [
        ("a", 5000, 9222, 8080), ("b", 1, 2, 8080), ("c", 5000, 9222, 8080),
    ]  # fmt: skip


@pytest.mark.parametrize(("renew", "why"), [("revert 'x", "correct its quotes"), (" ", "names nothing to do")])
def test_a_revert_that_cannot_be_run_is_refused_before_anything_starts(renew: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StaticPool.model_validate({"hosts": ["a"], "renew": renew})
