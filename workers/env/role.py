"""The env worker: many environments in one browser, each held by one episode at a time.

An episode holds an environment from Reset until Release, under its assignment id. What breaks an environment ends
that attempt (`FAILURE_CODE_ENVIRONMENT`), not the worker; the next Reset replaces the page.
"""

from __future__ import annotations

import contextlib
import time
from importlib import metadata

from pydantic import ValidationError

from dart.config import EnvWorkerConfig
from dart.core.types import Observation
from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_from_proto, observation_to_proto, task_from_proto
from dart.wire.role import Command, CommandError, Reply
from dart.workers.env.browser import Browser, EnvironmentFailure
from dart.workers.env.devtools import ProtocolError
from dart.workers.env.miniwob import MiniWobEnv, check_task


class EnvRole:
    """Implements `dart.wire.role.WorkerRole`."""

    role: pb.Role = pb.ROLE_ENV

    def __init__(self) -> None:
        self._resources = contextlib.AsyncExitStack()
        self._free: list[MiniWobEnv] = []
        self._held: dict[tuple[str, int], MiniWobEnv] = {}

    async def prepare(self, config_json: str) -> pb.Ready:
        """Launch the browser and open every environment. Raises UserError for what the config asks and is not there."""
        try:
            config = EnvWorkerConfig.model_validate_json(config_json).environment
        except ValidationError as error:
            raise UserError(f"the coordinator's env config is not understood ({error}): use one version") from None
        for name in config.tasks.names:
            check_task(name)
        browser = await self._resources.enter_async_context(Browser.launch(config.browser))
        self._free = [await MiniWobEnv.open(browser, config) for _ in range(config.slots)]
        return pb.Ready(slots=config.slots, versions={"miniwob": metadata.version("miniwob")})

    async def handle(self, command: Command) -> Reply | None:
        began = time.monotonic()
        key = (command.assignment.assignment_id, command.assignment.attempt)
        try:
            match command:
                case pb.Reset():
                    observation = await self._take(key).reset(task_from_proto(command.task))
                case pb.Act():
                    observation = await self._act(key, command)
                case pb.Release():
                    self._give_back(key)
                    return pb.Released()
                case _:
                    name = type(command).__name__
                    raise CommandError(pb.FAILURE_CODE_INVALID, f"an env worker does not know {name}")
        except (EnvironmentFailure, ProtocolError) as error:
            raise CommandError(pb.FAILURE_CODE_ENVIRONMENT, f"{type(error).__name__}: {error}") from None
        except (UserError, ValueError) as error:
            raise CommandError(pb.FAILURE_CODE_INVALID, str(error)) from None
        return observation_to_proto(observation, time.monotonic() - began)

    async def close(self) -> None:
        self._free.clear()
        self._held.clear()
        await self._resources.aclose()

    async def _act(self, key: tuple[str, int], command: pb.Act) -> Observation:
        env = self._held.get(key)
        if env is None:
            raise CommandError(pb.FAILURE_CODE_INVALID, f"assignment {key[0]} holds no environment: send Reset first")
        return await env.act(action_from_proto(command.action), image=not command.last)

    def _take(self, key: tuple[str, int]) -> MiniWobEnv:
        if key not in self._held:
            if not self._free:
                raise CommandError(
                    pb.FAILURE_CODE_INVALID, f"all {len(self._held)} environments are held: send Release"
                )
            self._held[key] = self._free.pop()
        return self._held[key]

    def _give_back(self, key: tuple[str, int]) -> None:
        if (env := self._held.pop(key, None)) is not None:
            self._free.append(env)
