"""A real vLLM engine that serves an adapter beside the weights, against the trainer's model with the same adapter; and
the other family, with an adapter and with whole weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from engine_samples import (  # noqa: E402
    Adapted,
    Trainer,
    adapter_config,
    drawn,
    engine_config,
    first_turn,
    overtaken,
    request_id,
    send_weights,
    sync_weights,
    transfer_group,
    turn,
)
from PIL import ImageFile  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_model import build_windowed  # noqa: E402

from dart.core.types import Generation  # noqa: E402
from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.v1 import weights_pb2 as wpb  # noqa: E402
from dart.wire.role import CommandError  # noqa: E402
from dart.workers.rollout.engine import Engine  # noqa: E402
from dart.workers.rollout.role import RolloutRole  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]
CLOSE = 1e-4
IMAGE = drawn(1)


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Adapted:
    return Adapted(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def role(folder: Path, trainer: Adapted) -> AsyncIterator[RolloutRole]:
    role = RolloutRole()
    await role.prepare(adapter_config(folder))
    yield role
    await role.close()
    trainer.sender.close()


async def test_a_screenshot_is_decoded_once_while_it_is_held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, int]] = []
    load = ImageFile.ImageFile.load

    def counted(picture: ImageFile.ImageFile) -> object:
        decoded.append(picture.size)
        return load(picture)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    prompt = [*first_turn(drawn(52)), *turn(drawn(53))]
    await engine.generate(request_id(), prompt, 1.0, 4)
    assert decoded
    decoded.clear()
    await engine.generate(request_id(), prompt, 1.0, 4)
    assert not decoded


async def _turn(engine: Engine, temperature: float = 0.0) -> Generation:
    return await engine.generate(request_id(), first_turn(IMAGE), temperature, 24)


async def test_tokens_are_those_of_the_adapter_that_was_sent_last(
    role: RolloutRole, engine: Engine, trainer: Adapted, folder: Path
) -> None:
    plain = Trainer(folder)
    first = await _turn(engine)
    assert plain.difference(first, [IMAGE]) < CLOSE, "an adapter begins by adding nothing"
    assert {span.version for span in first.versions} == {0}
    served = [first]
    for version in (1, 2):
        trainer.step(version)
        loaded = await sync_weights(role, trainer, version)
        assert loaded.bytes == sum(4 * tensor.numel() for _, tensor in trainer.tensors())
        assert loaded.bytes < sum(4 * weight.numel() for weight in plain.model.parameters()) / 4
        turn = await _turn(engine)
        assert {span.version for span in turn.versions} == {version}
        assert trainer.difference(turn, [IMAGE]) < CLOSE
        assert trainer.greedy_matches(turn, [IMAGE]) == len(turn.token_ids)
        assert plain.difference(turn, [IMAGE]) > 0.1
        assert trainer.difference(served[-1], [IMAGE]) > 0.1, "what was served before is another policy's"
        served.append(turn)
    sampled = await _turn(engine, temperature=1.0)
    assert trainer.difference(sampled, [IMAGE]) < CLOSE


async def test_requests_in_flight_go_on_with_the_next_adapter(
    role: RolloutRole, engine: Engine, trainer: Adapted
) -> None:
    await overtaken(role, engine, trainer)
    # Nothing that the earlier adapter computed is used again.
    assert trainer.difference(await _turn(engine), [IMAGE]) < CLOSE


async def test_whole_weights_are_refused_and_it_goes_on(
    role: RolloutRole, engine: Engine, trainer: Adapted, folder: Path
) -> None:
    version, whole = engine.version, Trainer(folder)
    group = transfer_group(whole, new=True)
    load = pb.LoadWeights(version=99, group=group, pause_mode=wpb.PAUSE_MODE_DRAIN, tensors=whole.infos())
    sending = asyncio.ensure_future(asyncio.to_thread(send_weights, whole, group))
    with pytest.raises(CommandError, match="whole weights, which this replica was not started for") as refused:
        await role.handle(load)
    assert refused.value.code == pb.FAILURE_CODE_TRANSFER
    await asyncio.wait([sending])
    whole.sender.close()
    assert engine.version == version
    assert trainer.difference(await _turn(engine), [IMAGE]) < CLOSE
    trainer.step(version + 1)
    await sync_weights(role, trainer, version + 1, new=True)
    assert trainer.difference(await _turn(engine), [IMAGE]) < CLOSE


async def test_a_model_of_the_other_family_begins_with_the_adapter_of_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_windowed(folder)
    trainer = Adapted(folder)
    trainer.step(7)
    save_file(dict(trainer.tensors()), tmp_path / "adapter_model.safetensors")
    told = json.loads(adapter_config(folder, weight_version=7))
    told["adapter"]["folder"] = str(tmp_path)
    role = RolloutRole()
    try:
        assert (await role.prepare(json.dumps(told))).weight_version == 7
        assert role._engine is not None
        turn = await _turn(role._engine)
        assert {span.version for span in turn.versions} == {7}
        assert trainer.difference(turn, [IMAGE]) < CLOSE
    finally:
        await role.close()


async def test_whole_weights_of_the_other_family_with_windowed_vision(tmp_path: Path) -> None:
    """The screenshot's 5 × 7 merged patches do not fill the windows of 2 × 2."""
    build_windowed(tmp_path)
    trainer, role = Trainer(tmp_path), RolloutRole()
    try:
        await role.prepare(engine_config(tmp_path))
        assert role._engine is not None
        before = await _turn(role._engine, temperature=1.0)
        assert {span.version for span in before.versions} == {0}
        assert trainer.difference(before, [IMAGE]) < CLOSE
        trainer.step(1)
        await sync_weights(role, trainer, 1)
        after = await _turn(role._engine, temperature=1.0)
        assert {span.version for span in after.versions} == {1}
        assert trainer.difference(after, [IMAGE]) < CLOSE
        assert trainer.difference(before, [IMAGE]) > 0.1, "what was served before is another policy's"
    finally:
        await role.close()
        trainer.sender.close()
