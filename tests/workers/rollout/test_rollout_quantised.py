"""A real vLLM engine whose decoder computes in 8-bit floats, against the trainer's model with and without them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

from engine_samples import (  # noqa: E402
    Adapted,
    Trainer,
    adapter_config,
    drawn,
    engine_config,
    first_turn,
    overtaken,
    request_id,
    sync_weights,
)

from dart.core.types import Generation  # noqa: E402
from dart.workers.rollout.engine import Engine  # noqa: E402
from dart.workers.rollout.role import RolloutRole  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]
IMAGE = drawn(1)
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Each row, scaled to the range of 8-bit floats, as these floats can say it."""
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return ((rows.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(rows.dtype)


class Quantised(Trainer):
    """Its decoder's matrices round their weights and inputs as the engine's do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for layer in self.model.get_decoder().layers.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.forward = lambda rows, layer=layer: torch.nn.functional.linear(
                    rounded(rows), rounded(layer.weight), layer.bias
                )


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Trainer:
    return Trainer(folder)


def _quantised(config: str) -> str:
    told = json.loads(config)
    told["model"]["dtype"] = "bfloat16"
    told["rollout"]["quantization"] = "fp8"
    return json.dumps(told)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def role(folder: Path, trainer: Trainer) -> AsyncIterator[RolloutRole]:
    role = RolloutRole()
    await role.prepare(_quantised(engine_config(folder)))
    yield role
    await role.close()
    trainer.sender.close()


async def _turn(engine: Engine) -> Generation:
    return await engine.generate(request_id(), first_turn(IMAGE), 1.0, 200)


async def test_every_version_is_quantised_when_it_arrives(
    role: RolloutRole, engine: Engine, trainer: Trainer, folder: Path
) -> None:
    quantised, earlier = Quantised(folder), Trainer(folder)
    off = quantised_off = 0.0
    for version in range(3):
        if version:
            earlier.model.load_state_dict(trainer.model.state_dict())
            trainer.step(version)
            await sync_weights(role, trainer, version)
        quantised.model.load_state_dict(trainer.model.state_dict())
        turn = await _turn(engine)
        assert {span.version for span in turn.versions} == {version}
        difference = trainer.difference(turn, [IMAGE])
        # With random weights, bfloat16 alone gives 0.01 to 0.02.
        assert 0.05 < difference < 0.3
        assert version == 0 or earlier.difference(turn, [IMAGE]) > 3 * difference
        off += difference
        quantised_off += quantised.difference(turn, [IMAGE])
    assert quantised_off < 0.95 * off, "the decoder rounds as said, so the engine is nearer to a model that does, too"


async def test_requests_in_flight_go_on_with_the_next_version(
    role: RolloutRole, engine: Engine, trainer: Trainer
) -> None:
    await overtaken(role, engine, trainer)
    assert trainer.difference(await _turn(engine), [IMAGE]) < 0.3


async def test_an_adapter_stays_as_it_is_beside_quantised_weights(folder: Path) -> None:
    pytest.importorskip("peft")
    adapted, role = Adapted(folder), RolloutRole()
    await role.prepare(_quantised(adapter_config(folder)))
    try:
        assert role._engine is not None
        assert 0.05 < adapted.difference(await _turn(role._engine), [IMAGE]) < 0.3
        adapted.step(1)
        await sync_weights(role, adapted, 1)
        turn = await _turn(role._engine)
        assert adapted.difference(turn, [IMAGE]) < 0.15
        assert Trainer(folder).difference(turn, [IMAGE]) > 1
    finally:
        await role.close()
        adapted.sender.close()
