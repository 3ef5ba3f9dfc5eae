"""`dart train` with a trainer of two ranks: one process group, sharded weights; then resumed with one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINIWOB = str(ROOT / "configs" / "miniwob_cpu.yaml")
HANG_SECONDS = 900

pytestmark = [pytest.mark.engine, pytest.mark.browser, pytest.mark.torch]


def train(where: Path, *more: str) -> None:
    settings = ("evaluation.episodes=0", "trainer.trajectories_per_update=16", "rollout.replicas=1")
    sets = [word for setting in (*settings, *more[:2]) for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "dart", "train", MINIWOB, "--quiet", *sets, *more[2:]],
        cwd=where, env=dict(os.environ), capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_two_ranks_train_then_one_continues(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    train(tmp_path, "trainer.ranks=2", "stop.updates=2")
    (run,) = (tmp_path / "runs").iterdir()

    def events() -> list[dict[str, object]]:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    ready = {str(event["worker"]) for event in events() if event["event"] == "worker" and event["state"] == "ready"}
    assert {"train-0", "train-1"} <= ready
    checkpoint = max((run / "checkpoints").glob("v*"))
    assert (checkpoint / "trainer_state" / ".metadata").is_file()
    parts = {file.name.split("_")[2] for file in (checkpoint / "trainer_state").glob("__*.distcp")}
    assert parts == {"0", "1"}, "each rank wrote its own"
    base = AutoModelForImageTextToText.from_pretrained(ROOT / "dart" / "assets" / "tiny-qwen3vl")
    trained = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert any(not weight.equal(base.get_parameter(name)) for name, weight in trained.named_parameters())

    train(tmp_path, "trainer.ranks=1", "stop.updates=3", "--resume", str(run))
    assert max(int(str(event["update"])) for event in events() if event["event"] == "update") == 3
    assert (max((run / "checkpoints").glob("v*")) / "trainer_state.pt").is_file()
