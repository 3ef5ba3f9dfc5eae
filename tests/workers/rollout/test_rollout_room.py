"""A real vLLM engine whose KV cache holds fewer requests than it has slots says so, and serves them all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("torch")

from engine_samples import drawn, engine_config, first_turn, request_id

from dart.v1 import session_pb2 as pb
from dart.workers.rollout.engine import Engine
from dart.workers.rollout.role import RolloutRole

pytestmark = [pytest.mark.engine, pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]
CACHE = 8 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def role(folder: Path) -> AsyncIterator[RolloutRole]:
    role = RolloutRole()
    told = json.loads(engine_config(folder))
    told["rollout"] |= {"kv_cache_bytes": CACHE, "max_model_len": 1024}
    await role.prepare(json.dumps(told))
    yield role
    await role.close()


async def test_a_replica_offers_what_its_cache_has_room_for(role: RolloutRole, engine: Engine, folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    token = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"] * 4
    assert 0.8 * CACHE < engine.room.tokens * token <= CACHE
    said: list[pb.Slots] = []
    saying = asyncio.create_task(role.run(said.append))
    length = engine.room.tokens // 5
    turns = [engine.generate(request_id(), first_turn(drawn(1)), 1.5, length) for _ in range(32)]
    sizes = [len(turn.prompt_token_ids) + len(turn.token_ids) for turn in await asyncio.gather(*turns)]
    assert engine.room.slots == engine.room.tokens * len(sizes) // sum(sizes) < 16
    while not said or said[-1].count != engine.room.slots:
        await asyncio.sleep(0.1)
    saying.cancel()
    assert said[-1].reason.startswith(f"its KV cache has room for {engine.room.slots} requests of ")
