"""The gate in front of the engine, what its prompts are cached under, and the tie of its process to its owner."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from dart.core.types import Image
from dart.workers.rollout import prompts
from dart.workers.rollout.gate import Gate
from dart.workers.rollout.prompts import Prompts
from dart.workers.weights.owner import EXIT_CODE, OWNER_VARIABLE

HANG_SECONDS = 60


async def test_a_closed_gate_waits_for_those_on_their_way_in_and_keeps_others_out() -> None:
    gate, order = Gate(), []
    inside, leave, closed, reopen = asyncio.Event(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def early() -> None:
        async with gate.entering():
            inside.set()
            await leave.wait()
            order.append("early left")

    async def update() -> None:
        async with gate.closed():
            order.append("closed")
            closed.set()
            await reopen.wait()
            order.append("opened")

    async def late() -> None:
        async with gate.entering():
            order.append("late entered")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(early())
        await inside.wait()
        tasks.create_task(update())
        await asyncio.sleep(0)
        tasks.create_task(late())
        await asyncio.sleep(0)
        assert order == []
        leave.set()
        await closed.wait()
        reopen.set()
    assert order == ["early left", "closed", "opened", "late entered"]


async def test_a_failed_update_opens_the_gate() -> None:
    gate = Gate()
    with pytest.raises(RuntimeError):
        async with gate.closed():
            raise RuntimeError
    async with asyncio.timeout(HANG_SECONDS), gate.entering():
        pass


def test_an_engine_process_ends_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    watch = (
        "import time; from dart.workers.weights.owner import end_with_owner;"
        "end_with_owner(); print(1, flush=True); time.sleep(600)"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", watch], env=os.environ | {OWNER_VARIABLE: str(owner.pid)}, stdout=subprocess.PIPE
    )
    try:
        assert engine.stdout is not None
        engine.stdout.readline()
        assert engine.poll() is None
        owner.kill()
        owner.wait()
        assert engine.wait(HANG_SECONDS) == EXIT_CODE
    finally:
        for process in (owner, engine):
            process.kill()
            process.wait()
        assert engine.stdout is not None
        engine.stdout.close()


@pytest.mark.torch
def test_positions_are_interleaved_whatever_the_checkpoint_leaves_out() -> None:
    from transformers import Qwen3VLConfig

    from dart.workers.rollout.starting import interleave_positions

    silent = {"rope_type": "default", "mrope_section": [8, 8, 8], "rope_theta": 10000.0}
    config = Qwen3VLConfig(text_config={"rope_parameters": silent})
    assert interleave_positions(config).text_config.rope_parameters["mrope_interleaved"] is True
    config = Qwen3VLConfig(text_config={"rope_parameters": silent | {"mrope_interleaved": False}})
    assert interleave_positions(config).text_config.rope_parameters["mrope_interleaved"] is False


def test_renamed_screenshots_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST_RENAMED", 3)
    made, shots = Prompts(caches_images=True), [Image.of(bytes([n]), "image/png", 1, 1) for n in range(9)]
    names = set[str]()
    for shot in shots:
        before = made._name(shot)
        made.rename([shot])
        assert made._name(shot) != before and made._name(shot) not in names, "vLLM may not have it under this name"
        names |= {before, made._name(shot)}
        assert len(made._renamed) <= 3
