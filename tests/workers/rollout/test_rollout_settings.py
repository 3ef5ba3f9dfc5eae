"""The engine's arguments: those of the config, those that it may not set, and what is set beyond them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field
from vllm_alone.stand_ins import replaced_modules

from dart import config
from dart.config.engine_args import OWNED
from dart.core.capacity import devices
from dart.errors import UserError
from dart.workers.rollout import environment, starting

ARGUMENTS = Path(__file__).parents[3] / "build" / "vllm-gpu" / "vllm" / "engine" / "arg_utils.py"


def told(screenshot_tokens: int = 0, **rollout: Any) -> config.RolloutWorkerConfig:
    document = {
        "model": {"path": "nowhere"},
        "rollout": rollout,
        "sync": {"transport": "nccl"},
        "max_images": 5,
        "screenshot_tokens": screenshot_tokens,
        "seed": 0,
    }
    return config.RolloutWorkerConfig.model_validate_json(json.dumps(document))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "on_cpu", lambda: False)


def test_the_users_arguments_are_passed_on_and_may_replace_ours_where_nothing_relies_on_them(on_gpu: None) -> None:
    made = starting.settings(told(engine_args={"gpu_memory_utilization": 0.8, "block_size": 16}, slots=7))
    assert (made["gpu_memory_utilization"], made["block_size"], made["max_num_seqs"]) == (0.8, 16, 7)
    assert starting.settings(told())["block_size"] is None


def test_a_quantised_replica_leaves_the_tower_as_it_is() -> None:
    made = starting.settings(told(quantization="fp8"))
    assert (made["quantization"], made["quantization_config"]) == ("fp8_per_channel", {"ignore": ["re:.*visual.*"]})
    assert "quantization" not in starting.settings(told())


def test_every_argument_that_dart_relies_on_is_refused_in_the_config() -> None:
    """Otherwise the config would accept a value that `settings` then ignores."""
    free = {"block_size", "disable_log_stats", "use_tqdm_on_load"}
    for name in starting.settings(told()).keys() - free:
        with pytest.raises(ValueError, match=f"{name} cannot be set: "):
            told(engine_args={name: 1})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dtype", "set model.dtype instead"),
        ("quantization", "set rollout.quantization instead"),
        ("kv_cache_dtype", "recomputes every log-probability"),
        ("speculative_config", "a draft model would keep its first weights"),
        ("enable_lora", "set trainer.lora instead"),
        ("kv_offloading_size", "older weights"),
        ("data_parallel_size", "set rollout.replicas instead"),
        ("logits_processors", "recomputes log-probabilities without it"),
    ],
)
def test_refusals_say_why(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        told(engine_args={name: "x"})


@pytest.mark.skipif(not ARGUMENTS.is_file(), reason="the pinned vLLM's files are not there: run `make gpu-files`")
def test_all_these_names_are_arguments_of_the_pinned_vllm() -> None:
    classes = [node for node in ast.parse(ARGUMENTS.read_text()).body if isinstance(node, ast.ClassDef)]
    known = {
        line.target.id
        for node in classes
        if node.name in ("EngineArgs", "AsyncEngineArgs")
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    assert starting.settings(told()).keys() | {"weight_transfer_config"} <= known
    assert [name for name in OWNED if not any(fnmatchcase(one, name) for one in known)] == []


def test_an_unknown_argument_is_refused_with_the_nearest_ones() -> None:
    known = ["max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization"]
    starting.check_known(["gpu_memory_utilization"], known, "0.33.0")
    with pytest.raises(
        UserError, match=r"engine_args.max_batched_tokens is not an .* \(0.33.0\): did you mean max_num_batched"
    ):
        starting.check_known(["max_batched_tokens"], known, "0.33.0")
    with pytest.raises(UserError, match="see the engine arguments in vLLM's documentation"):
        starting.check_known(["zzz"], known, "0.33.0")


def test_encodings_of_four_prompts_are_kept_on_a_gpu(on_gpu: None) -> None:
    assert starting.encoder_cache_tokens(told(2691)) == 4 * 5 * 2691
    assert starting.encoder_cache_tokens(told()) == 0, "an older coordinator does not say"
    assert starting.encoder_cache_tokens(told(2691, encoder_cache_tokens=9)) == 9


def test_on_a_cpu_vllm_chooses_unless_the_config_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "on_cpu", lambda: True)
    assert starting.encoder_cache_tokens(told(2691)) == 0
    assert starting.encoder_cache_tokens(told(2691, encoder_cache_tokens=9)) == 9
    assert starting.settings(told())["block_size"] == 32


class Cache(BaseModel):
    """Takes the place of vLLM's CacheConfig, which is pydantic's, too."""

    gpu_memory_utilization: float = Field(0.9, le=1)


@dataclass(init=False)
class AsyncEngineArgs:
    """Takes the place of vLLM's."""

    gpu_memory_utilization: float = 0.9
    disable_log_stats: bool = False

    def __init__(self, **named: Any) -> None:
        self.named = named
        self.disable_log_stats = named["disable_log_stats"]

    def create_engine_config(self, usage_context: object) -> SimpleNamespace:
        Cache(**self.named)
        scheduler = SimpleNamespace(encoder_cache_size=16_384)
        return SimpleNamespace(scheduler_config=scheduler, context=usage_context, arguments=self.named)


AMPERE = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda capability: capability <= 80)


class Refused(Exception):
    """Takes the place of VLLMClientError."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(starting, "own_engines", lambda: None)
    monkeypatch.setattr(environment, "apply", lambda extra: None)
    started = SimpleNamespace(from_vllm_config=lambda made, **named: (made, named))
    with replaced_modules(
        {
            "vllm": {"__version__": "0.33.0"},
            "vllm.config": {},
            "vllm.config.weight_transfer": {"WeightTransferConfig": SimpleNamespace},
            "vllm.engine": {},
            "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
            "vllm.exceptions": {"VLLMClientError": Refused},
            "vllm.platforms": {"current_platform": AMPERE},
            "vllm.usage": {},
            "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(OPENAI_API_SERVER="server")},
            "vllm.v1": {},
            "vllm.v1.engine": {},
            "vllm.v1.engine.async_llm": {"AsyncLLM": started},
        }
    ):
        yield


def test_an_unknown_argument_ends_the_start_before_the_model_is_looked_at(vllm: None) -> None:
    with pytest.raises(UserError, match="did you mean gpu_memory_utilization"):
        starting.start_vllm(told(engine_args={"gpu_memory_utilisation": 0.5}))
    with pytest.raises(UserError, match=r"model\.path: nowhere is not a folder"):
        starting.start_vllm(told(engine_args={"gpu_memory_utilization": 0.5}))


def test_eight_bit_floats_need_a_card_that_has_them(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "check_model", lambda folder: None)
    with pytest.raises(UserError, match="fp8 needs GPUs of compute capability"):
        starting.start_vllm(told(quantization="fp8"))


def test_a_value_that_vllm_refuses_is_named(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "check_model", lambda folder: None)
    with pytest.raises(UserError, match="section: gpu_memory_utilization: give a number of at most 1"):
        starting.start_vllm(told(engine_args={"gpu_memory_utilization": 7}))


def test_an_engine_is_started_as_vllms_server_starts_it(
    vllm: None, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "check_model", lambda folder: None)
    made: Any = starting.start_vllm(told(2691, tensor_parallel=2, pipeline_parallel=3))
    engine, named = made
    assert engine.context == named["usage_context"] == "server"
    assert engine.scheduler_config.encoder_cache_size == 4 * 5 * 2691
    assert (engine.arguments["tensor_parallel_size"], engine.arguments["pipeline_parallel_size"]) == (2, 3)
    assert engine.arguments["weight_transfer_config"].backend == "nccl"
    small: Any = starting.start_vllm(told(10))
    assert small[0].scheduler_config.encoder_cache_size == 16_384, "never less than vLLM's own"


def test_on_gpus_the_engine_is_a_new_interpreter_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment.devices, "on_cpu", lambda: False)
    for variables, expected in (({}, "spawn"), ({"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "fork")):
        monkeypatch.setattr(environment.os, "environ", dict(variables))
        environment.apply()
        assert environment.os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == expected
        assert "VLLM_PLUGINS" not in environment.os.environ
