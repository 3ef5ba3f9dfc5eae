"""The Control service: what the run is doing, its trajectories, and a few commands, for people and other programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from dart.coordinator.service.journal import Journal
from dart.core.curation.submitted import NotWanted
from dart.core.status import Status
from dart.core.types import Task
from dart.errors import UserError
from dart.store.blobs import BlobError
from dart.store.database import Database
from dart.v1 import control_pb2 as cpb
from dart.v1 import control_pb2_grpc
from dart.wire.channel import MAX_MESSAGE_BYTES
from dart.wire.convert import task_from_proto, trajectory_to_proto
from dart.wire.rules import REQUESTS, shortened
from dart.wire.status import status_to_proto


class Levers(Protocol):
    """What Control may do to a run."""

    def pause(self, paused: bool) -> None: ...

    def drain(self) -> None: ...

    async def submit(self, tasks: Sequence[Task]) -> None: ...

    async def checkpoint(self) -> tuple[str, int]: ...

    def status(self) -> Status: ...


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Callers were let in by `coordinator.fleet.door.ControlDoor`."""

    def __init__(self, levers: Levers, journal: Journal, database: Database) -> None:
        self._levers, self._journal, self._database = levers, journal, database
        self._saving: set[asyncio.Task[tuple[str, int]]] = set()
        """Checkpoints that were asked for; the event loop alone would not keep them alive."""

    async def GetStatus(self, request: cpb.GetStatusRequest, context: Any) -> cpb.GetStatusResponse:
        await self._admit(request, context)
        return status_to_proto(self._levers.status())

    async def WatchEvents(
        self, request: cpb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[cpb.WatchEventsResponse]:
        await self._admit(request, context)
        async for event in self._journal.watch(request.from_sequence, self._database):
            yield cpb.WatchEventsResponse(
                sequence=event.sequence, unix_seconds=event.unix_seconds, kind=event.kind, json=event.json
            )

    async def ListTrajectories(self, request: cpb.ListTrajectoriesRequest, context: Any) -> Any:
        await self._admit(request, context)
        size = min(request.page_size or 100, 1000)
        try:
            page = await self._database.list_trajectories(request.task_name, size, request.page_token)
        except UserError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return cpb.ListTrajectoriesResponse(
            trajectories=[
                cpb.TrajectorySummary(
                    id=row.id, group_id=row.group_id, task_id=row.task.id, reward=row.reward, success=row.success,
                    steps=row.steps, fate=row.fate, finished_unix_seconds=row.finished,
                )
                for row in page
            ],
            next_page_token=page[-1].id if len(page) == size else "",
        )  # fmt: skip

    async def GetTrajectory(self, request: cpb.GetTrajectoryRequest, context: Any) -> Any:
        await self._admit(request, context)
        stored = await self._database.trajectory(request.id)
        if stored is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"trajectory {request.id!r} is not in this run")
            raise AssertionError("abort raises")
        with_images = request.with_images and stored.screenshots_kept
        if with_images:
            try:
                stored = await self._database.with_images(stored)
            except (BlobError, OSError) as error:
                why = f"trajectory {request.id!r} lacks a screenshot ({error}): ask for it without with_images"
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        answer = cpb.GetTrajectoryResponse(
            trajectory=trajectory_to_proto(stored.trajectory, stored.advantages, stored.fate, with_images),
            screenshots_removed=not stored.screenshots_kept,
        )
        if (size := answer.ByteSize()) > MAX_MESSAGE_BYTES:
            remedy = "ask for it without with_images, and see its screenshots" if with_images else "look at it"
            why = (
                f"trajectory {request.id!r} is {size:,} bytes, and the limit is {MAX_MESSAGE_BYTES:,}: {remedy} with "
                "`dart view` or `dart show`"
            )
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        return answer

    async def SubmitTasks(self, request: cpb.SubmitTasksRequest, context: Any) -> cpb.SubmitTasksResponse:
        await self._admit(request, context)
        for number, task in enumerate(request.tasks):
            named = f"{task.suite}/{task.name}#{task.seed}"
            if task.id not in ("", named):
                why = f"tasks[{number}].id {shortened(task.id)} is another task: leave it out, or write {named}"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        tasks = [task_from_proto(task) for task in request.tasks]
        await self._obey(context, partial(self._levers.submit, tasks))
        return cpb.SubmitTasksResponse(accepted=len(tasks))

    async def Pause(self, request: cpb.PauseRequest, context: Any) -> cpb.PauseResponse:
        await self._admit(request, context)
        await self._obey(context, partial(self._levers.pause, True))
        return cpb.PauseResponse()

    async def Resume(self, request: cpb.ResumeRequest, context: Any) -> cpb.ResumeResponse:
        await self._admit(request, context)
        await self._obey(context, partial(self._levers.pause, False))
        return cpb.ResumeResponse()

    async def Drain(self, request: cpb.DrainRequest, context: Any) -> cpb.DrainResponse:
        await self._admit(request, context)
        await self._obey(context, self._levers.drain)
        return cpb.DrainResponse()

    async def Checkpoint(self, request: cpb.CheckpointRequest, context: Any) -> cpb.CheckpointResponse:
        await self._admit(request, context)
        saving = asyncio.create_task(self._levers.checkpoint())
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)
        try:
            # A caller that gives up must not leave a checkpoint that is written and recorded nowhere.
            path, version = await asyncio.shield(saving)
        except UserError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return cpb.CheckpointResponse(path=path, weight_version=version)

    async def _obey(self, context: Any, lever: Callable[[], Awaitable[None] | None]) -> None:
        try:
            if (obeying := lever()) is not None:
                await obeying
        except NotWanted as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except UserError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def _admit(self, request: Message, context: Any) -> None:
        """Check that the request keeps the rules (`dart.wire.rules`); the token was checked at the door."""
        if broken := REQUESTS[request.DESCRIPTOR.name].violation(request):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(broken))
