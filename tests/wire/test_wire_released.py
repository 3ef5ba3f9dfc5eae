"""A worker built when the protocol was last released, without optional capabilities, at today's coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from dart import config
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.core.types import Image
from dart.v1 import control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire.channel import PROTOCOL_VERSION
from dart.wire.convert import image_to_proto

PICTURE = image_to_proto(Image.of(b"picture", "image/png", 160, 224))
RELEASED = Path(__file__).parents[2] / "proto" / "released.binpb"


def released() -> tuple[Any, Any]:
    """SessionRequest and SessionResponse as they were."""
    files = descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    left = list(files.file)
    known: set[str] = set()
    while left:
        ready = [file for file in left if known.issuperset(file.dependency)]
        assert ready, "the image has every file that it names"
        for file in ready:
            pool.Add(file)
            known.add(file.name)
            left.remove(file)
    names = ("dart.v1.SessionRequest", "dart.v1.SessionResponse")
    request, response = (message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names)
    return request, response


async def old_worker(address: str) -> str:
    """Serve one environment whose second action ends the episode; returns the goodbye's reason."""
    request, response = released()
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    await outbox.put(request(hello={"worker_id": "old", "instance_id": "1", "role": pb.ROLE_ENV,
                                    "protocol_version": PROTOCOL_VERSION}))  # fmt: skip

    async def written() -> AsyncIterator[bytes]:
        while True:
            yield (await outbox.get()).SerializeToString()

    acts = 0
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/dart.v1.CoordinatorService/Session", None, None)(written())
        async for encoded in call:
            said = response.FromString(encoded)
            body = said.WhichOneof("body")
            if body == "welcome":
                await outbox.put(request(ready={"slots": 1}))
            elif body == "bye":
                return str(said.bye.reason)
            elif body in ("reset", "act", "release"):
                reply = request(released={}) if body == "release" else request(observed={})
                acts += body == "act"
                if body != "release":
                    reply.observed.instruction, reply.observed.done = "Do it", acts == 2
                    reply.observed.image.MergeFromString(PICTURE.SerializeToString())
                answered = reply.released if body == "release" else reply.observed
                answered.assignment.CopyFrom(getattr(said, body).assignment)
                await outbox.put(reply)
    return "hung up"


async def test_a_worker_of_the_last_release_without_capabilities_serves_an_episode() -> None:
    settings = config.Server(heartbeat_seconds=1.0, lost_after_seconds=60.0)
    fleet, server = Fleet(settings.lost_after_seconds), Server(settings)
    ready: asyncio.Queue[Worker] = asyncio.Queue()
    fleet.on_ready.append(ready.put_nowait)
    service = CoordinatorService(fleet, settings, "run", lambda _: "{}")
    await server.start(service, control_pb2_grpc.ControlServiceServicer())
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(old_worker(server.address))
            worker = await ready.get()
            assignment = pb.Assignment(assignment_id="a", attempt=1)
            ends = []
            for command in (pb.Reset, pb.Act, pb.Act):
                reply = await worker.call(command(assignment=assignment))
                assert isinstance(reply, pb.Observed)
                ends.append(reply.done)
            assert ends == [False, False, True]
            assert isinstance(await worker.call(pb.Release(assignment=assignment)), pb.Released)
            fleet.say_goodbye("over")
            assert await serving == "over"
    finally:
        await server.stop()
