"""What a replica is told: fields that an older worker does not know only where they matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dart import config
from dart.agent.parsing import screenshot_tokens
from dart.config.told import read_told
from dart.coordinator.fleet.sessions import Rejected
from dart.coordinator.fleet.welcome import NEWER, welcome
from dart.coordinator.start import Start
from dart.errors import UserError
from dart.job import Train
from dart.v1 import session_pb2 as pb

CONFIGS = Path("configs")


def told(overrides: list[str], *capabilities: str, start: Start = Start()) -> dict[str, Any]:  # noqa: B008
    made = config.load(CONFIGS / "osworld_uitars15_7b.yaml", overrides)
    hello = pb.Hello(worker_id="rollout-0", role=pb.ROLE_ROLLOUT, capabilities=capabilities)
    text = welcome(made, start, hello, Train())
    config.RolloutWorkerConfig.model_validate_json(text)
    document: dict[str, Any] = json.loads(text)
    return document


def test_a_worker_of_an_earlier_version_is_told_nothing_new() -> None:
    old = told([])
    assert not old.keys() & {"screenshot_tokens", "packed_token_ids"}
    assert not old["rollout"].keys() & {"encoder_cache_tokens", "engine_args", "pipeline_parallel"}


def test_a_worker_of_another_release_says_so() -> None:
    text = json.dumps(told([]) | {"of_another_release": 1})
    with pytest.raises(UserError, match=r"of_another_release: leave it out.* use the same dart release on both ends"):
        read_told(config.RolloutWorkerConfig, text)
    with pytest.raises(UserError, match=r"cannot be read \(Invalid JSON.*: use the same dart release on both ends"):
        read_told(config.RolloutWorkerConfig, "no JSON")


FIRST = {
    "rollout": {
        "enforce_eager", "environment", "image_cache_entries", "kv_cache_bytes", "max_model_len", "max_tokens",
        "processor_cache_bytes", "replicas", "slots", "startup_timeout_seconds", "temperature", "tensor_parallel",
    },
    "trainer": {
        "adam_betas", "adam_epsilon", "advantage", "final_learning_rate_fraction", "gradient_checkpointing",
        "gradient_clip", "learning_rate", "loss", "microbatch_tokens", "minibatches", "ranks", "threads",
        "trajectories_per_update", "warmup_updates", "weight_decay",
    },
}  # fmt: skip
"""What workers have always known."""


def test_a_new_field_is_noted_as_one_that_older_workers_do_not_know() -> None:
    fields = {"rollout": set(config.Rollout.model_fields), "trainer": set(config.Trainer.model_fields)}
    assert fields == {section: FIRST[section] | NEWER[section] for section in FIRST}


def test_what_is_set_is_told() -> None:
    new = told(["rollout.engine_args.gpu_memory_utilization=0.8", "rollout.pipeline_parallel=2"], "screenshot_tokens")
    assert new["rollout"]["engine_args"] == {"gpu_memory_utilization": 0.8}
    assert new["rollout"]["pipeline_parallel"] == 2
    assert new["screenshot_tokens"] == 2691, "1920 x 1080 pixels, resized to multiples of 28: 69 x 39"


def test_a_worker_that_can_is_asked_to_pack_token_ids() -> None:
    assert told([], "packed_token_ids")["packed_token_ids"] is True


def test_a_screenshot_has_as_many_tokens_as_the_model_sees() -> None:
    ladder = config.load(CONFIGS / "ladder_demo.yaml")
    multiple = ladder.agent.resize_multiple
    width, height = ladder.environment.viewport
    assert screenshot_tokens(ladder.agent, ladder.environment.viewport) == round(width / multiple) * round(
        height / multiple
    )


def test_a_replica_that_gets_adapters_begins_with_the_weights_that_they_belong_to(tmp_path: Path) -> None:
    lora = ["trainer.lora={rank: 8, sync: adapter}", "sync.transport=gloo"]
    resumed = Start(checkpoint=tmp_path / "v3", version=3)
    with pytest.raises(Rejected, match=r"capability serves_adapter"):
        told(lora)
    first, later = told(lora, "serves_adapter"), told(lora, "serves_adapter", start=resumed)
    assert first["adapter"]["folder"] is None
    assert (later["adapter"]["rank"], later["adapter"]["folder"]) == (8, str(tmp_path / "v3" / "adapter"))
    assert first["model"]["path"] == later["model"]["path"] != str(tmp_path / "v3")

    whole = told([*lora, "trainer.lora.sync=merged"], start=resumed)
    assert whole["model"]["path"] == str(tmp_path / "v3")
    assert "adapter" not in whole
