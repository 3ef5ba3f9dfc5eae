"""The gate in front of the engine, the store of screenshots, and the tie of an engine process to its owner."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from PIL import Image as PillowImage

from dart.core.types import Image
from dart.workers.rollout.gate import Gate
from dart.workers.rollout.images import BadImageError, ImageStore, UnknownImageError
from dart.workers.weights.owner import EXIT_CODE, OWNER_VARIABLE


def _png(red: int, size: tuple[int, int] = (32, 32)) -> Image:
    data = io.BytesIO()
    PillowImage.new("RGB", size, (red, 0, 0)).save(data, "PNG")
    return Image.of(data.getvalue(), "image/png", *size)


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
    async with asyncio.timeout(1), gate.entering():
        pass


def test_the_store_gives_back_what_it_holds_and_forgets_the_least_recently_used() -> None:
    store = ImageStore(2)
    first, second, third = _png(1), _png(2), _png(3)
    store.resolve(first)
    store.resolve(second)
    assert store.resolve(replace(first, data=b"")).data == first.data
    store.resolve(third)
    assert len(store) == 2
    with pytest.raises(UnknownImageError):
        store.resolve(replace(second, data=b""))
    assert store.resolve(replace(first, data=b"")) == first


def test_wrong_images_are_refused_and_not_kept() -> None:
    store = ImageStore(2)
    good = _png(1)
    junk = b"not a picture"
    for bad in (
        replace(good, data=good.data + b"x"),
        replace(good, width=33),
        Image(hashlib.sha256(junk).digest(), "image/png", 1, 1, junk),
    ):
        with pytest.raises(BadImageError):
            store.resolve(bad)
    assert len(store) == 0


def test_an_engine_process_ends_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watch = (
        "import time; from dart.workers.weights.owner import end_with_owner;"
        "end_with_owner(); print(1, flush=True); time.sleep(60)"
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
        assert engine.wait(5) == EXIT_CODE
    finally:
        for process in (owner, engine):
            process.kill()
            process.wait()
        assert engine.stdout is not None
        engine.stdout.close()


@pytest.mark.torch
def test_positions_are_interleaved_whatever_the_checkpoint_leaves_out() -> None:
    from transformers import Qwen3VLConfig

    from dart.workers.rollout.engine import interleave_positions

    silent = {"rope_type": "default", "mrope_section": [8, 8, 8], "rope_theta": 10000.0}
    config = Qwen3VLConfig(text_config={"rope_parameters": silent})
    assert interleave_positions(config).text_config.rope_parameters["mrope_interleaved"] is True
    config = Qwen3VLConfig(text_config={"rope_parameters": silent | {"mrope_interleaved": False}})
    assert interleave_positions(config).text_config.rope_parameters["mrope_interleaved"] is False
