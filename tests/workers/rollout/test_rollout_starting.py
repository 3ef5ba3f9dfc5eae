"""What is checked before vLLM starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_samples import LORA, adapter_config, engine_config
from tiny_model import build

from dart.errors import UserError
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


async def test_an_adapter_that_the_replica_does_not_see_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    build(tmp_path / "model")
    adapter = {"rank": LORA.rank, "alpha": LORA.alpha, "target_modules": LORA.target_modules}
    told = adapter_config(tmp_path / "model", adapter=adapter | {"folder": str(tmp_path / "elsewhere")})
    with pytest.raises(
        UserError, match=r"no adapter_model\.safetensors in .*elsewhere: .* put run\.directory on a file"
    ):
        await RolloutRole().prepare(told)
