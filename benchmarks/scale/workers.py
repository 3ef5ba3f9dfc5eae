"""The workers of `benchmarks.scale`: as slow as desktops and a large policy, and idle meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import resource
from dataclasses import dataclass

from benchmarks.instant import INSTRUCTION, TEXT, InstantPolicy, shared
from benchmarks.sessions import Apart
from dart.core.packing import pack
from dart.core.types import Image, Observation
from dart.screenshots.shared import SharedScreenshots
from dart.v1 import session_pb2 as pb
from dart.v1 import trajectory_pb2 as tpb
from dart.wire.convert import observation_to_proto
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.worker import WorkerOptions, serve

ENVIRONMENTS_PER_WORKER, WORKERS_PER_PROCESS = 64, 40
REPLICAS, REPLICA_SLOTS = 256, 64
STEPS = 30
ACT_SECONDS, GENERATE_SECONDS = (1.0, 5.0), (1.0, 3.0)
"""The shortest and the longest; a step is one of each, 5 s on average."""
TOKENS = 60
"""Of a turn."""
SCREENSHOT_BYTES = 2_000


class Desktops(WorkerRole):
    """A new screenshot after each pause, eight of whose bytes are new; every second episode succeeds.

    Like the real worker, it sends none after an episode's last action.
    """

    role = pb.ROLE_ENV

    def __init__(self, slots: int) -> None:
        self._slots, self._number, self._episodes = slots, 0, 0
        self._rest = os.urandom(SCREENSHOT_BYTES - 8)
        self._shared: SharedScreenshots | None = None

    async def prepare(self, config_json: str) -> pb.Ready:
        self._shared = shared(config_json)
        return pb.Ready(slots=self._slots, shares_blobs=self._shared is not None)

    async def handle(self, command: Command) -> Reply | None:
        if isinstance(command, pb.Release):
            return pb.Released()
        await asyncio.sleep(random.uniform(*ACT_SECONDS))
        if isinstance(command, pb.Act) and command.last:
            self._episodes += 1
            return pb.Observed(done=True, reward=float(self._episodes % 2))
        self._number += 1
        image = Image.of(self._number.to_bytes(8, "little") + self._rest, "image/png", 160, 224)
        if self._shared is not None:
            image = await asyncio.to_thread(self._shared.put, image)
        return observation_to_proto(Observation(image, INSTRUCTION), 0.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """A replica's. `packed`: as `Generated.packed_prompt_token_ids`."""

    prompt_tokens: int
    packed: bool

    @property
    def words(self) -> list[str]:
        """On the command line."""
        return ["--prompt-tokens", str(self.prompt_tokens), *([] if self.packed else ["--unpacked"])]

    def made(self) -> pb.Generated:
        """Its ids begin at random: equal answers would be cheaper to keep than real ones."""
        first = random.randrange(50_000)
        prompt = range(first, first + self.prompt_tokens)
        return pb.Generated(
            prompt_token_ids=() if self.packed else prompt,
            packed_prompt_token_ids=pack("I", prompt) if self.packed else b"",
            token_ids=range(first, first + TOKENS),
            logprobs=[-0.1] * TOKENS,
            versions=[tpb.VersionSpan(version=0, start=0, end=TOKENS)],
            text=TEXT,
            finish_reason=pb.FINISH_REASON_STOP,
        )


class Replica(InstantPolicy):
    def __init__(self, slots: int, answer: Answer) -> None:
        super().__init__(slots)
        self._answer = answer

    async def handle(self, command: Command) -> Reply | None:
        await asyncio.sleep(random.uniform(*GENERATE_SECONDS))
        return self._answer.made()


async def be_workers(address: str, environments: int, replicas: int, answer: Answer) -> None:
    """So many environments, in workers of 64, or so many replicas, in this process; each with its own connection."""
    sizes = [min(ENVIRONMENTS_PER_WORKER, environments - n) for n in range(0, environments, ENVIRONMENTS_PER_WORKER)]
    roles: list[tuple[str, Desktops | Replica]] = [("env", Desktops(size)) for size in sizes]
    roles += [("rollout", Replica(REPLICA_SLOTS, answer)) for _ in range(replicas)]
    async with asyncio.TaskGroup() as tasks:
        for kind, role in roles:
            name = f"{kind}-{random.getrandbits(48):012x}"
            tasks.create_task(serve(role, WorkerOptions(Apart(address), name), asyncio.Event()))
            await asyncio.sleep(0.01)  # a cluster starts them one after the other as well


def open_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
