"""Workers that answer at once, in processes of their own, and a coordinator for them; several benchmarks use both.

Real: the project's protocol, gRPC over loopback, the workers' end of a session (`dart.wire.worker`), the coordinator's
server, sessions and pools.
Simulated: what the workers answer (a screenshot of random bytes, a fixed token sequence), and that it takes no time.

`python -m benchmarks.instant ROLE …` starts such a worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet
from dart.core.types import Image
from dart.malloc import keep_memory
from dart.screenshots.shared import SharedScreenshots
from dart.screenshots.stored import StoredScreenshots
from dart.v1 import control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.v1 import trajectory_pb2 as tpb
from dart.wire.channel import Dial
from dart.wire.convert import image_to_proto
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.worker import WorkerOptions, serve

TEXT = "Action: click(start_box='(045,120)')"
INSTRUCTION = "Click the button."
MEDIA_TYPE, WIDTH, HEIGHT = "image/png", 160, 224
PROMPT_TOKENS, TOKENS = 90, 12
"""The number of tokens in a prompt, and in an answer of the policy."""
IMAGE_CACHE_ENTRIES = 64
READY_SECONDS, GOODBYE_SECONDS = 60.0, 15.0


class InstantEnv(WorkerRole):
    """Answers with the same screenshot at once."""

    role = pb.ROLE_ENV

    def __init__(self, slots: int, image_bytes: int) -> None:
        self._slots = slots
        self._image = image_to_proto(Image.of(os.urandom(image_bytes), MEDIA_TYPE, WIDTH, HEIGHT))

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=self._slots)

    async def handle(self, command: Command) -> Reply | None:
        if isinstance(command, pb.Release):
            return pb.Released()
        last = isinstance(command, pb.Act) and command.last
        return pb.Observed(image=self._image, instruction=INSTRUCTION, done=last)


class InstantPolicy(WorkerRole):
    """Answers with the same tokens at once. It claims to cache screenshots, and caches none."""

    role = pb.ROLE_ROLLOUT

    def __init__(self, slots: int) -> None:
        self._slots = slots

    async def prepare(self, config_json: str) -> pb.Ready:
        shares = shared(config_json) is not None
        return pb.Ready(slots=self._slots, engine_ranks=1, image_cache_entries=IMAGE_CACHE_ENTRIES, shares_blobs=shares)

    async def handle(self, command: Command) -> Reply | None:
        return pb.Generated(
            prompt_token_ids=range(PROMPT_TOKENS),
            token_ids=range(TOKENS),
            logprobs=[-0.1] * TOKENS,
            versions=[tpb.VersionSpan(version=0, start=0, end=TOKENS)],
            text=TEXT,
            finish_reason=pb.FINISH_REASON_STOP,
        )


def shared(config_json: str) -> SharedScreenshots | None:
    """The directory that the coordinator shares with its workers, if any."""
    told = json.loads(config_json)
    return SharedScreenshots.seen(config.SharedBlobs.model_validate(told)) if told else None


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The parts that a benchmark drives."""

    envs: EnvPool
    policy: RolloutPool


def settings(**sections: dict[str, Any]) -> config.Config:
    """The config of a run, overridden by `sections`; its model is never loaded."""
    made: dict[str, dict[str, Any]] = {
        "model": {"path": "none"},
        "agent": {"prompt": "minimal", "history_screenshots": 2, "resize_multiple": 32, "min_pixels": 1024},
        "environment": {"tasks": {"names": ["instant"]}},
        "stop": {"updates": 1},
    }
    for name, section in sections.items():
        made[name] = made.get(name, {}) | section
    return config.Config.model_validate(made)


@asynccontextmanager
async def coordinator(made: config.Config, *workers: Sequence[str]) -> AsyncIterator[Coordinator]:
    """A listening coordinator, with these workers (arguments of `python -m benchmarks.instant`) ready."""
    fleet = Fleet(60.0)
    parts = Coordinator(EnvPool(fleet), RolloutPool(fleet, StoredScreenshots(None)))
    ready = asyncio.Event()
    fleet.on_ready.append(lambda _: ready.set() if len(fleet.workers) == len(workers) else None)
    server = Server(made.server)
    await server.start(
        CoordinatorService(fleet, made.server, "bench", lambda hello: "{}"), control_pb2_grpc.ControlServiceServicer()
    )
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.instant", *arguments, "--address", server.address
        )
        for arguments in workers
    ]
    try:
        async with asyncio.timeout(READY_SECONDS):
            await ready.wait()
        yield parts
    finally:
        fleet.say_goodbye("done")
        for process in started:
            try:
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
        await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=["env", "rollout"])
    parser.add_argument("--address", required=True)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--image-bytes", type=int, default=64)
    given = parser.parse_args()
    env = given.role == "env"
    role: WorkerRole = InstantEnv(given.slots, given.image_bytes) if env else InstantPolicy(given.slots)
    keep_memory()
    uvloop.run(_serve(role, given.address, given.role))


async def _serve(role: WorkerRole, address: str, name: str) -> None:
    await serve(role, WorkerOptions(Dial(address), name), asyncio.Event())


if __name__ == "__main__":
    main()
