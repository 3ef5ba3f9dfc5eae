"""Workers without machines: what answers a command is a function."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.core.action import Click, Point
from dart.core.fleet.replica import Replica, S
from dart.core.fleet.replicas import Replicas
from dart.core.types import Image, Observation
from dart.screenshots.stored import StoredScreenshots
from dart.store.blobs import BlobStore
from dart.v1 import control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, observation_to_proto


def transfer_broke(replicas: Replicas[S], replica: Replica[S]) -> None:
    """A transfer of weights to it broke, and its rest is over."""
    replicas.update_broke(replica, 0.0)
    replicas.update_failed(replica, 0.0)


def screen(text: str = "") -> Image:
    return Image.of(text.encode(), "image/png", 160, 224)


@asynccontextmanager
async def fleet(
    blobs: BlobStore | None = None,
    sharing: Collection[str] = (),
    capabilities: Sequence[str] = (),
    keeps: int = 8,
    **roles: Callable[[Any], Any],
) -> AsyncIterator[tuple[EnvPool, RolloutPool]]:
    """Env workers and replicas, each of four slots, that answer every command with what their function returns.

    Their names are those of the arguments: "env" or "rollout", and whatever follows a "_". `sharing`: those that say
    they see the directory of `blobs`. `keeps`: screenshots, of each replica.
    """
    made, screenshots = Fleet(60.0), StoredScreenshots(blobs)
    pools = EnvPool(made), RolloutPool(made, screenshots)

    async def serve(worker: Worker, answer: Callable[[Any], Any]) -> None:
        while True:
            message = await worker.outbox.get()
            body = message.WhichOneof("body")
            command = getattr(message, body)
            if (reply := answer(command)) is not None:
                reply.assignment.CopyFrom(command.assignment)
                kind = re.sub("(?<!^)(?=[A-Z])", "_", type(reply).__name__).lower()
                made.receive(worker, pb.SessionRequest(**{kind: reply}))

    async with asyncio.TaskGroup() as tasks:
        serving = []
        for name, answer in roles.items():
            role = {"env": pb.ROLE_ENV, "rollout": pb.ROLE_ROLLOUT}[name.partition("_")[0]]
            worker, _ = made.admit(pb.Hello(worker_id=name, instance_id=name, role=role, capabilities=capabilities))
            made.became_ready(worker, pb.Ready(slots=4, image_cache_entries=keeps, shares_blobs=name in sharing))
            serving.append(tasks.create_task(serve(worker, answer)))
        try:
            async with asyncio.timeout(60):
                yield pools
        finally:
            for task in serving:
                task.cancel()


@asynccontextmanager
async def served(
    fleet: Fleet, settings: config.Server, welcome: Callable[[pb.Hello], str] = lambda hello: "{}"
) -> AsyncIterator[Server]:
    """A real server, which workers of this fleet dial over gRPC."""
    server = Server(settings)
    await server.start(CoordinatorService(fleet, settings, "run", welcome), control_pb2_grpc.ControlServiceServicer())
    try:
        yield server
    finally:
        await server.stop()


def replica(command: Any, **more: Any) -> Any:
    """Writes a forced text as one token per character, and samples the same words as log-probabilities of -0.5."""
    if not isinstance(command, pb.Generate):
        return None
    forced = command.HasField("forced_text")
    text = command.forced_text if forced else "Action: click(start_box='(010,020)')"
    tokens = [*map(ord, text), 2]
    return pb.Generated(
        prompt_token_ids=[1], token_ids=tokens, logprobs=[] if forced else [-0.5] * len(tokens), text=text,
        versions=[{"version": 0, "start": 0, "end": len(tokens)}], finish_reason=pb.FINISH_REASON_STOP, **more,
    )  # fmt: skip


class World:
    """Tasks that one click in their left half solves; the oracle finds its way on even seeds only."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}

    def __call__(self, command: Any) -> Any:
        name = command.assignment.assignment_id
        match command:
            case pb.Reset():
                self.seeds[name] = command.task.seed
                return observation_to_proto(Observation(screen(name), "click left"), 0.0)
            case pb.Act():
                solved = command.action.click.at.x < 0.5
                return observation_to_proto(Observation(screen(name), "", True, float(solved)), 0.0)
            case pb.Suggest():
                found = self.seeds[name] % 2 == 0
                return pb.Suggested(action=action_to_proto(Click(Point(0.25, 0.5))) if found else None)
