"""`dart train` with an adapter, which alone is trained and sent: the tokens of replicas prove what they serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_processes.real_runs import events, newest_checkpoint, train, updates

pytest.importorskip("peft")

WHOLE_BYTES = 4 * 3_200_000
SETTINGS = (
    "trainer.lora.sync=adapter",
    "trainer.learning_rate=3e-3",
    "trainer.trajectories_per_update=16",
    "trainer.loss.kl_coefficient=0.1",
    "evaluation.episodes=0",
    "rollout.replicas=1",
    "checkpoint.every_updates=1",
    "schedule.training=synchronous",
    "curation.max_staleness=0",  # so each update trains on what the version before it has sampled, and on nothing older
)

pytestmark = [pytest.mark.engine, pytest.mark.browser, pytest.mark.torch]


def test_each_version_of_the_adapter_is_what_replicas_serve(tmp_path: Path) -> None:
    train(tmp_path, [*SETTINGS, "stop.updates=1000"], interrupt_at=4)
    (run,) = (tmp_path / "runs").iterdir()
    begun = updates(tmp_path)
    assert (newest_checkpoint(run) / "adapter" / "adapter_model.safetensors").is_file()
    # The replica begins with the adapter of the checkpoint.
    train(tmp_path, [*SETTINGS, f"stop.updates={begun + 2}"], "--resume", str(run))

    syncs = [event for event in events(tmp_path) if event["event"] == "sync"]
    assert {1, 2, 3} <= {event["version"] for event in syncs}
    assert all(0 < event["bytes"] < WHOLE_BYTES / 10 for event in syncs)

    made = {event["update"]: event["trainer"] for event in events(tmp_path) if event["event"] == "update"}
    assert made[begun + 2]["kl_reference"] > 1e-4, "versions differ, so an earlier one would be noticed"
    # The update that was interrupted has no figures.
    compared = {number: told for number, told in made.items() if told.get("same_version_tokens", 0) > 0}
    assert begun + 1 in compared, "the checkpoint's version"
    assert compared.keys() & set(range(2, begun + 1)), "one that was sent"
    assert all(told["same_version_difference_max"] < 1e-3 for told in compared.values())
