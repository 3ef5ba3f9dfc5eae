"""What is checked before vLLM starts."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import NoReturn

import pytest
from engine_samples import LORA, adapter_config, engine_config
from tiny_model import build

from dart.errors import USER_ERROR, UserError
from dart.workers.rollout import starting
from dart.workers.rollout.role import RolloutRole
from dart.workers.rollout.starting import check_model

pytestmark = [pytest.mark.engine, pytest.mark.torch, pytest.mark.asyncio]


async def test_a_model_that_cannot_be_served_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path: .*nowhere is not a folder"):
        await RolloutRole().prepare(engine_config(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no config\.json"):
        check_model(tmp_path)
    build(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["AbacusForCounting"]}))
    with pytest.raises(UserError, match="safetensors weights"):
        check_model(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="AbacusForCounting, which this vLLM cannot load"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("error", "limit", "named", "code"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "", "too many open files: the limit of this process is", 1),
        (RuntimeError("pthread_create: Resource temporarily unavailable"), "", "no more threads or processes", 1),
        (RuntimeError("Engine core initialization failed"), "only 64 files open", "only 64 files open", USER_ERROR),
        (RuntimeError("Engine core initialization failed"), "", "max_model_len or kv_cache_bytes", USER_ERROR),
    ],
)
async def test_an_engine_that_the_machine_has_no_room_for_names_what_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, limit: str, named: str, code: int
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    def fails(*arguments: object, **settings: object) -> NoReturn:
        raise error

    build(tmp_path)
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", fails)
    monkeypatch.setattr(starting, "tight", lambda: limit)
    with pytest.raises(UserError, match=named) as refused:
        await RolloutRole().prepare(engine_config(tmp_path))
    assert refused.value.exit_code == code
    assert ("max_model_len" in str(refused.value)) == ("max_model_len" in named)


async def test_an_adapter_that_the_replica_does_not_see_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    build(tmp_path / "model")
    adapter = {"rank": LORA.rank, "alpha": LORA.alpha, "target_modules": LORA.target_modules}
    told = adapter_config(tmp_path / "model", adapter=adapter | {"folder": str(tmp_path / "elsewhere")})
    with pytest.raises(
        UserError, match=r"no adapter_model\.safetensors in .*elsewhere: .* put run\.directory on a file"
    ):
        await RolloutRole().prepare(told)
