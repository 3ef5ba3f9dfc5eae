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

from benchmarks.peers.shared import Screenshots, touch
from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet
from dart.coordinator.training.ranks import TrainerRanks
from dart.core.types import Image, Observation
from dart.malloc import keep_memory
from dart.screenshots.held import Held
from dart.screenshots.shared import SharedScreenshots
from dart.screenshots.stored import StoredScreenshots
from dart.store.blobs import BlobStore
from dart.v1 import control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.v1 import trajectory_pb2 as tpb
from dart.wire.capabilities import IMAGES_APART, IMAGES_ONCE
from dart.wire.channel import Dial
from dart.wire.convert import image_to_proto, observation_to_proto
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
        self._shared: SharedScreenshots | None = None

    async def prepare(self, config_json: str) -> pb.Ready:
        self._shared = _shared(config_json)
        return pb.Ready(slots=self._slots, shares_blobs=self._shared is not None)

    async def handle(self, command: Command) -> Reply | None:
        if isinstance(command, pb.Release):
            return pb.Released()
        last = isinstance(command, pb.Act) and command.last
        return pb.Observed(image=self._image, instruction=INSTRUCTION, done=last)


class FreshEnv(InstantEnv):
    """A new screenshot each time, with its digest; every second episode succeeds.

    Like the real worker, it sends none after an episode's last action.
    """

    def __init__(self, slots: int, image_bytes: int) -> None:
        super().__init__(slots, image_bytes)
        self._screenshots = Screenshots(image_bytes)
        self._episodes = 0

    async def handle(self, command: Command) -> Reply | None:
        if isinstance(command, pb.Release):
            return pb.Released()
        if isinstance(command, pb.Act) and command.last:
            self._episodes += 1
            return pb.Observed(done=True, reward=float(self._episodes % 2))
        image = Image.of(self._screenshots.next(), MEDIA_TYPE, WIDTH, HEIGHT)
        if self._shared is not None:
            image = await asyncio.to_thread(self._shared.put, image)
        return observation_to_proto(Observation(image, INSTRUCTION), 0.0)


class InstantPolicy(WorkerRole):
    """Answers with the same tokens at once. `image_cache_entries`: how many screenshots it claims to cache; it caches
    none, but reads each one that comes as a digest only."""

    role = pb.ROLE_ROLLOUT

    def __init__(self, slots: int, image_cache_entries: int = IMAGE_CACHE_ENTRIES) -> None:
        self._slots, self._image_cache_entries = slots, image_cache_entries
        self._shared: SharedScreenshots | None = None
        self._seen: Held[bool] = Held(image_cache_entries)

    async def prepare(self, config_json: str) -> pb.Ready:
        self._shared = _shared(config_json)
        return pb.Ready(
            slots=self._slots,
            engine_ranks=1,
            image_cache_entries=self._image_cache_entries,
            shares_blobs=self._shared is not None,
        )

    async def handle(self, command: Command) -> Reply | None:
        if self._shared is not None and isinstance(command, pb.Generate):
            self._read(self._shared, command)
        return pb.Generated(
            prompt_token_ids=range(PROMPT_TOKENS),
            token_ids=range(TOKENS),
            logprobs=[-0.1] * TOKENS,
            versions=[tpb.VersionSpan(version=0, start=0, end=TOKENS)],
            text=TEXT,
            finish_reason=pb.FINISH_REASON_STOP,
        )

    def _read(self, shared: SharedScreenshots, command: pb.Generate) -> None:
        for part in command.prompt:
            digest = part.image.sha256
            if not digest:
                continue
            if digest not in self._seen:
                read_shared(shared, digest)
            self._seen.note(digest, True)


class InstantTrainer(WorkerRole):
    """Keeps the pages of a batch until the last has arrived, like the real worker; then reads all screenshots."""

    role = pb.ROLE_TRAIN
    capabilities = (IMAGES_ONCE, IMAGES_APART)

    def __init__(self) -> None:
        self._pages: list[pb.TrainBatch] = []
        self._shared: SharedScreenshots | None = None

    async def prepare(self, config_json: str) -> pb.Ready:
        self._shared = _shared(config_json)
        return pb.Ready(slots=1, shares_blobs=self._shared is not None)

    async def handle(self, command: Command) -> Reply | None:
        assert isinstance(command, pb.TrainBatch)
        self._pages.append(command)
        if len(self._pages) < command.pages:
            return None
        pages, self._pages = self._pages, []
        seen: set[bytes] = set()
        for page in pages:
            for sample in page.samples:
                for image in sample.images:
                    if image.data or self._shared is None:
                        touch(image.data)
                    elif image.sha256 not in seen:
                        read_shared(self._shared, image.sha256)
                        seen.add(image.sha256)
        return pb.Trained(update=command.update, weight_version=command.update)


def _shared(config_json: str) -> SharedScreenshots | None:
    """The directory that `coordinator` shares, if any."""
    told = json.loads(config_json)
    return SharedScreenshots.seen(config.SharedBlobs.model_validate(told)) if told else None


def read_shared(shared: SharedScreenshots, digest: bytes) -> None:
    """Read all of its bytes. The real workers hash them as well, however they arrived; here neither path does."""
    if not touch(shared.get(digest)):
        raise RuntimeError(f"screenshot {digest.hex()} is not where it was stored")


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The parts that a benchmark drives."""

    envs: EnvPool
    policy: RolloutPool
    ranks: TrainerRanks


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
async def coordinator(
    made: config.Config, *workers: Sequence[str], blobs: BlobStore | None = None
) -> AsyncIterator[Coordinator]:
    """A listening coordinator, with these workers (arguments of `python -m benchmarks.instant`) ready.

    `blobs`: a store in a directory that the workers share.
    """
    fleet, stored = Fleet(60.0), StoredScreenshots(blobs)
    share = stored.share()
    told = share.model_dump_json() if share else "{}"
    parts = Coordinator(EnvPool(fleet), RolloutPool(fleet, stored), TrainerRanks(fleet, 1, stored))
    ready = asyncio.Event()
    fleet.on_ready.append(lambda _: ready.set() if len(fleet.workers) == len(workers) else None)
    server = Server(made.server)
    await server.start(
        CoordinatorService(fleet, made.server, "bench", lambda hello: told), control_pb2_grpc.ControlServiceServicer()
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
    parser.add_argument("role", choices=["env", "fresh-env", "rollout", "train"])
    parser.add_argument("--address", required=True)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--image-bytes", type=int, default=64)
    parser.add_argument("--image-cache-entries", type=int, default=IMAGE_CACHE_ENTRIES)
    given = parser.parse_args()
    role: WorkerRole
    match given.role:
        case "env":
            role = InstantEnv(given.slots, given.image_bytes)
        case "fresh-env":
            role = FreshEnv(given.slots, given.image_bytes)
        case "rollout":
            role = InstantPolicy(given.slots, given.image_cache_entries)
        case _:
            role = InstantTrainer()
    keep_memory()
    uvloop.run(_serve(role, given.address, given.role))


async def _serve(role: WorkerRole, address: str, name: str) -> None:
    await serve(role, WorkerOptions(Dial(address), name), asyncio.Event())


if __name__ == "__main__":
    main()
