"""`dart train` as a user calls it, on MiniWoB: to its end, or until it is interrupted, and then resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MINIWOB = str(Path(__file__).parents[3] / "configs" / "miniwob_cpu.yaml")
HANG_SECONDS = 900


def train(where: Path, settings: Sequence[str], *more: str, interrupt_at: int | None = None) -> None:
    """A run to its end, or until it has made so many updates and is interrupted."""
    sets = [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dart", "train", MINIWOB, "--quiet", "--set", "dashboard.enabled=false", *sets, *more],
        cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + HANG_SECONDS
    while interrupt_at is not None and process.poll() is None and updates(where) < interrupt_at:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    if interrupt_at is not None:
        process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == (0 if interrupt_at is None else 130), told[-3000:]


def events(where: Path) -> list[dict[str, Any]]:
    """Those of the run in the folder, of all its processes."""
    files = where.glob("runs/*/metrics.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in lines]


def updates(where: Path) -> int:
    """How many the run has made."""
    return max((int(event["update"]) for event in events(where) if event["event"] == "update"), default=0)


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("v*"), key=lambda path: int(path.name[1:]))
