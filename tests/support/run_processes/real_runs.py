"""`dart train` as a user calls it, on MiniWoB: to its end, or until it is interrupted, and then resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from run_processes import told

MINIWOB = str(Path(__file__).parents[3] / "configs" / "miniwob_cpu.yaml")
HANG_SECONDS = 900


def train(
    where: Path, settings: Sequence[str], *more: str, interrupt_at: int | None = None, kill_rank_at: int | None = None
) -> str:
    """A run to its end, or until it has made so many updates and is interrupted. Returns what it printed.

    `kill_rank_at`: once it has made so many, kill -9 the trainer's last rank, and let the run go on.
    """
    sets = [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dart", "train", MINIWOB, "--quiet", "--set", "dashboard.enabled=false", *sets, *more],
        cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if kill_rank_at is not None:
        _wait(where, process, kill_rank_at)
        ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if "RANK" in child.environ()]
        max(ranks, key=lambda child: int(child.environ()["RANK"])).kill()
    if interrupt_at is not None:
        _wait(where, process, interrupt_at)
        process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == (0 if interrupt_at is None else 130), told[-3000:]
    return told


def _wait(where: Path, process: subprocess.Popen[str], made: int) -> None:
    """Until the run has made so many updates, or has ended."""
    deadline = time.monotonic() + HANG_SECONDS
    while process.poll() is None and updates(where) < made:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def events(where: Path) -> list[dict[str, Any]]:
    """Those of the run in the folder, of all its processes."""
    return [event for file in where.glob("runs/*/metrics.jsonl") for event in told.events(file)]


def updates(where: Path) -> int:
    """How many the run has made."""
    return max((int(event["update"]) for event in events(where) if event["event"] == "update"), default=0)


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("v*"), key=lambda path: int(path.name[1:]))
