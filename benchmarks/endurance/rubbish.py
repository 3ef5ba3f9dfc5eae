"""An outsider on the coordinator's port: random bytes, malformed messages, workers that break every rule."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import grpc

from dart.v1 import session_pb2 as pb
from dart.wire.channel import OPTIONS, PROTOCOL_VERSION

SECONDS = 5.0
METHOD = f"/{pb.DESCRIPTOR.services_by_name['CoordinatorService'].full_name}/Session"


async def talk_rubbish(port: int, chance: random.Random) -> bool:
    """One stranger, which goes away after a few seconds at most. False if nobody was listening."""
    try:
        if chance.random() < 0.3:
            await _bytes(port, chance)
        else:
            await _session(port, chance)
    except (OSError, grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
        return False
    return True


async def _bytes(port: int, chance: random.Random) -> None:
    """Send bytes that are not even HTTP/2."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(chance.randbytes(chance.randrange(1, 100_000)))
    with contextlib.suppress(OSError):
        await writer.drain()
    writer.close()


async def _session(port: int, chance: random.Random) -> None:
    """Open a stream that begins well or badly, and send what no worker would."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        session: Callable[..., grpc.aio.StreamStreamCall[bytes, pb.SessionResponse]] = channel.stream_stream(
            METHOD, None, pb.SessionResponse.FromString
        )
        call = session(_messages(chance))
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(SECONDS):
                while await call.read() is not grpc.aio.EOF:
                    pass
        call.cancel()


async def _messages(chance: random.Random) -> AsyncIterator[bytes]:
    if chance.random() < 0.3:
        yield chance.randbytes(chance.randrange(1, 10_000))
    hello = pb.Hello(
        worker_id=f"stranger-{chance.randrange(1000)}", instance_id=f"{chance.getrandbits(64):x}",
        role=chance.choice([pb.ROLE_ENV, pb.ROLE_ROLLOUT, pb.ROLE_TRAIN]), protocol_version=PROTOCOL_VERSION,
        world_size=1,
    )  # fmt: skip
    yield pb.SessionRequest(hello=hello).SerializeToString()
    await asyncio.sleep(0.2)
    ready = pb.Ready(slots=chance.choice([0, 1, 2**32 - 1]), engine_ranks=chance.choice([0, 1, 2**32 - 1]))
    yield pb.SessionRequest(ready=ready).SerializeToString()
    for _ in range(chance.randrange(1, 20)):
        await asyncio.sleep(0.05)
        yield chance.choice(_WORDS).SerializeToString()
    yield chance.randbytes(200)


_WORDS = (
    pb.SessionRequest(observed=pb.Observed(reward=float("nan"), done=True)),
    pb.SessionRequest(generated=pb.Generated(token_ids=[2**32 - 1], logprobs=[float("inf")])),
    pb.SessionRequest(trained=pb.Trained(weight_version=2**64 - 1)),
    pb.SessionRequest(failure=pb.Failure(message="x" * 1_000_000)),
    pb.SessionRequest(batch=[pb.SessionRequest()] * 10_000),
    pb.SessionRequest(hello=pb.Hello(worker_id="env-0")),
    pb.SessionRequest(),
)
