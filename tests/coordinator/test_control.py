"""The Control service's answers, over a real connection with gRPC's limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from store_samples import TASK, image, trajectory

from dart.coordinator.service.control import ControlService
from dart.core.types import Trajectory
from dart.screenshots.directory import file_name
from dart.store.database import Database, sqlite_url
from dart.v1 import control_pb2 as cpb
from dart.v1 import control_pb2_grpc
from dart.wire.channel import MAX_MESSAGE_BYTES, OPTIONS

SCREENSHOT_BYTES = 300_000
HISTORY = 5


def sampled(name: str, steps: int) -> Trajectory:
    """Each prompt has its last few screenshots."""
    made = trajectory(name, "group-1", steps=steps)
    seen = [image(f"{name}-{index}", SCREENSHOT_BYTES) for index in range(steps)]
    told = [replace(step, images=tuple(seen[: step.index + 1][-HISTORY:])) for step in made.steps]
    return replace(made, steps=tuple(told))


@asynccontextmanager
async def serving(folder: Path, *trajectories: Trajectory) -> AsyncIterator[control_pb2_grpc.ControlServiceAsyncStub]:
    unused: Any = None
    async with await Database.open(sqlite_url(folder / "run.db"), folder / "blobs") as database:
        await database.start_run("run-1", "test", {}, started=0.0)
        await database.open_group("group-1", TASK, 8, 1.0)
        for one in trajectories:
            await database.add_trajectory(one)
        server = grpc.aio.server(options=OPTIONS)
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlService(unused, unused, database), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
                yield control_pb2_grpc.ControlServiceStub(channel)
        finally:
            await server.stop(None)


async def test_a_screenshot_that_is_in_many_prompts_is_sent_once(tmp_path: Path) -> None:
    given = sampled("t-1", steps=30)
    assert sum(len(step.images) for step in given.steps) * SCREENSHOT_BYTES > 2 * MAX_MESSAGE_BYTES
    async with serving(tmp_path, given) as control:
        answer = await control.GetTrajectory(cpb.GetTrajectoryRequest(id="t-1", with_images=True))
    shown = {one.sha256: one.data for step in answer.trajectory.steps for one in step.images if one.data}
    assert shown == {one.sha256: one.data for step in given.steps for one in step.images}
    assert [[one.sha256 for one in step.images] for step in answer.trajectory.steps] == [
        [one.sha256 for one in step.images] for step in given.steps
    ]
    assert all(step.images[-1].data for step in answer.trajectory.steps), "a step's own screenshot is new in it"


async def test_a_trajectory_that_is_too_large_says_how_large_and_what_to_do(tmp_path: Path) -> None:
    async with serving(tmp_path, sampled("t-1", steps=60)) as control:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await control.GetTrajectory(cpb.GetTrajectoryRequest(id="t-1", with_images=True))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        said = refused.value.details() or ""
        assert said.startswith("trajectory 't-1' is 18,0") and "the limit is 16,777,216: ask for it without" in said
        answer = await control.GetTrajectory(cpb.GetTrajectoryRequest(id="t-1"))
        assert len(answer.trajectory.steps) == 60


async def test_a_checkpoint_is_saved_although_its_caller_gives_up() -> None:
    class Slow:
        begun, goes_on, saved = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def checkpoint(self) -> tuple[str, int]:
            self.begun.set()
            await self.goes_on.wait()
            self.saved.set()
            return "checkpoints/v000007", 7

    levers, unused = Slow(), cast(Any, None)
    service = ControlService(cast(Any, levers), unused, unused)
    asking = asyncio.create_task(service.Checkpoint(cpb.CheckpointRequest(), unused))
    await levers.begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    levers.goes_on.set()
    async with asyncio.timeout(60):
        await levers.saved.wait()


async def test_a_screenshot_that_is_lost_is_told_with_what_to_do(tmp_path: Path) -> None:
    given = sampled("t-1", steps=1)
    async with serving(tmp_path, given) as control:
        (tmp_path / "blobs" / file_name(given.steps[0].images[0].sha256)).unlink()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await control.GetTrajectory(cpb.GetTrajectoryRequest(id="t-1", with_images=True))
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        said = refused.value.details() or ""
        assert said.startswith("trajectory 't-1' lacks a screenshot (blob ") and "without with_images" in said
