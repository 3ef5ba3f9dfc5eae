"""`dart train` with a trainer of two ranks and two replicas: one of the ranks is killed, and the run resumes by itself
from its checkpoint, with sharded weights; then it is resumed with one rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from run_processes.real_runs import events, newest_checkpoint, train, updates

BASE = Path(__file__).parents[2] / "dart" / "assets" / "tiny-qwen3vl"
SETTINGS = (
    "evaluation.episodes=0",
    "trainer.trajectories_per_update=16",
    "rollout.replicas=2",
    "checkpoint.every_updates=1",
)

pytestmark = [pytest.mark.engine, pytest.mark.browser, pytest.mark.torch]


def test_two_ranks_train_then_one_continues(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    told = train(tmp_path, [*SETTINGS, "trainer.ranks=2", "stop.updates=1000"], kill_rank_at=2, interrupt_at=4)
    assert "the run is resumed after 2 s (attempt 1 of 3" in told
    (run,) = (tmp_path / "runs").iterdir()
    before = updates(tmp_path)

    ready = Counter(
        str(event["worker"]) for event in events(tmp_path) if event["event"] == "worker" and event["state"] == "ready"
    )
    assert [ready[name] for name in ("train-0", "train-1", "rollout-0", "rollout-1")] == [2, 2, 2, 2]
    made = [int(event["update"]) for event in events(tmp_path) if event["event"] == "update"]
    assert made.count(1) == 1, "it went on from a checkpoint"
    checkpoint = newest_checkpoint(run)
    assert (checkpoint / "trainer_state" / ".metadata").is_file()
    parts = {file.name.split("_")[2] for file in (checkpoint / "trainer_state").glob("__*.distcp")}
    assert parts == {"0", "1"}, "each rank wrote its own"
    base = AutoModelForImageTextToText.from_pretrained(BASE)
    trained = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert any(not weight.equal(base.get_parameter(name)) for name, weight in trained.named_parameters())

    train(tmp_path, [*SETTINGS, "trainer.ranks=1", f"stop.updates={before + 1}"], "--resume", str(run))
    assert updates(tmp_path) == before + 1
    assert (newest_checkpoint(run) / "trainer_state.pt").is_file()
