"""`dart train` with a trainer of two ranks: one process group, sharded weights; then resumed with one rank."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINIWOB = str(ROOT / "configs" / "miniwob_cpu.yaml")
HANG_SECONDS = 900

pytestmark = [pytest.mark.engine, pytest.mark.browser, pytest.mark.torch]


def train(where: Path, *more: str, interrupt_at: int | None = None) -> None:
    """A run to its end, or until it has made so many updates and is interrupted."""
    settings = (
        "evaluation.episodes=0",
        "trainer.trajectories_per_update=16",
        "rollout.replicas=1",
        "checkpoint.every_updates=1",
    )
    sets = [word for setting in (*settings, *more[:2]) for word in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dart", "train", MINIWOB, "--quiet", *sets, *more[2:]],
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


def events(where: Path) -> list[dict[str, object]]:
    files = where.glob("runs/*/metrics.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in lines]


def updates(where: Path) -> int:
    return max((int(str(event["update"])) for event in events(where) if event["event"] == "update"), default=0)


def test_two_ranks_train_then_one_continues(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    train(tmp_path, "trainer.ranks=2", "stop.updates=1000", interrupt_at=3)
    (run,) = (tmp_path / "runs").iterdir()
    before = updates(tmp_path)

    ready = {
        str(event["worker"]) for event in events(tmp_path) if event["event"] == "worker" and event["state"] == "ready"
    }
    assert {"train-0", "train-1"} <= ready
    checkpoint = max((run / "checkpoints").glob("v*"), key=lambda path: int(path.name[1:]))
    assert (checkpoint / "trainer_state" / ".metadata").is_file()
    parts = {file.name.split("_")[2] for file in (checkpoint / "trainer_state").glob("__*.distcp")}
    assert parts == {"0", "1"}, "each rank wrote its own"
    base = AutoModelForImageTextToText.from_pretrained(ROOT / "dart" / "assets" / "tiny-qwen3vl")
    trained = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert any(not weight.equal(base.get_parameter(name)) for name, weight in trained.named_parameters())

    train(tmp_path, "trainer.ranks=1", f"stop.updates={before + 1}", "--resume", str(run))
    assert updates(tmp_path) == before + 1
    assert (max((run / "checkpoints").glob("v*"), key=lambda path: int(path.name[1:])) / "trainer_state.pt").is_file()
