"""The env worker: many environments in one browser, each held by one episode at a time.

An episode holds an environment from Reset until Release, under its assignment id and attempt; Suggest asks the scripted
oracle what it would do there. What breaks an environment ends that attempt (`FAILURE_CODE_ENVIRONMENT`), not the
worker; the next Reset replaces the page. A Reset waits a moment for an environment: the Release that it follows may
still be behind a page that has not answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import replace
from importlib import metadata

from pydantic import ValidationError

from dart.config import BUILTIN_SUITE, Delay, EnvWorkerConfig
from dart.core.types import Observation
from dart.errors import UserError
from dart.screenshots.shared import SharedScreenshots
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_from_proto, action_to_proto, observation_to_proto, task_from_proto
from dart.wire.role import Command, CommandError, Reply
from dart.workers.env.browser import Browser, EnvironmentFailure
from dart.workers.env.miniwob import MiniWobEnv, check_task
from dart.workers.env.oracle import Oracle


class EnvRole:
    """Implements `dart.wire.role.WorkerRole`."""

    role: pb.Role = pb.ROLE_ENV
    capabilities = ("oracle", "shared_blobs")

    def __init__(self) -> None:
        self._resources = contextlib.AsyncExitStack()
        self._free: asyncio.Queue[MiniWobEnv] = asyncio.Queue()  # at most `slots`; Reset empties it, Release fills it
        self._held: dict[tuple[str, int], MiniWobEnv] = {}
        self._oracles: dict[tuple[str, int], Oracle] = {}
        self._patience = 0.0
        self._delay = Delay()
        self._shared: SharedScreenshots | None = None

    async def prepare(self, config_json: str) -> pb.Ready:
        """Launch the browser and open every environment. Raises UserError for what the config asks and is not there."""
        try:
            told = EnvWorkerConfig.model_validate_json(config_json)
        except ValidationError as error:
            raise UserError(f"the coordinator's env config is not understood ({error}): use one version") from None
        config = told.environment
        if config.kind != BUILTIN_SUITE:
            raise UserError(
                f"environment.kind {config.kind}: this env worker runs {BUILTIN_SUITE} alone: start your own"
            )
        for name in config.tasks.names:
            check_task(name)
        self._patience = 2 * config.step_timeout_seconds
        self._delay = config.delay
        browser = await self._resources.enter_async_context(Browser.launch(config.browser))
        for _ in range(config.slots):
            self._free.put_nowait(await MiniWobEnv.open(browser, config))
        self._shared = SharedScreenshots.seen(told.shared_blobs, writes=True)
        versions = {"miniwob": metadata.version("miniwob"), "chromium": browser.version}
        return pb.Ready(slots=config.slots, versions=versions, shares_blobs=self._shared is not None)

    async def handle(self, command: Command) -> Reply | None:
        began = time.monotonic()
        key = (command.assignment.assignment_id, command.assignment.attempt)
        try:
            match command:
                case pb.Reset():
                    observation = await self._reset(key, command)
                    await asyncio.sleep(random.uniform(*self._delay.reset_seconds))
                case pb.Act():
                    observation = await self._act(key, command)
                    await asyncio.sleep(random.uniform(*self._delay.step_seconds))
                case pb.Suggest():
                    return await self._suggest(key)
                case pb.Release():
                    self._oracles.pop(key, None)
                    if (env := self._held.pop(key, None)) is not None:
                        self._free.put_nowait(env)
                    return pb.Released()
                case _:
                    raise _invalid(f"an env worker does not know {type(command).__name__}")
        except EnvironmentFailure as error:
            raise CommandError(pb.FAILURE_CODE_ENVIRONMENT, f"{type(error).__name__}: {error}") from None
        if self._shared is not None and observation.image.data:
            image = await asyncio.to_thread(self._shared.put, observation.image)
            observation = replace(observation, image=image)
        return observation_to_proto(observation, time.monotonic() - began)

    async def close(self) -> None:
        self._held.clear()
        self._oracles.clear()
        self._free = asyncio.Queue()  # they are this browser's
        await self._resources.aclose()

    async def _reset(self, key: tuple[str, int], command: pb.Reset) -> Observation:
        if key not in self._held:
            try:
                async with asyncio.timeout(self._patience):
                    self._held[key] = await self._free.get()
            except TimeoutError:
                raise _invalid(f"all {len(self._held)} environments are held: send Release before Reset") from None
        task = task_from_proto(command.task)
        try:
            observation = await self._held[key].reset(task)
        except UserError as error:
            raise _invalid(str(error)) from None
        self._oracles[key] = Oracle(task, observation.instruction)
        return observation

    async def _act(self, key: tuple[str, int], command: pb.Act) -> Observation:
        env = self._env(key)
        try:
            action = action_from_proto(command.action)
        except ValueError as error:
            raise _invalid(str(error)) from None
        return await env.act(action, image=not command.last)

    async def _suggest(self, key: tuple[str, int]) -> pb.Suggested:
        env = self._env(key)
        try:
            suggested = await self._oracles[key].next(env.page)
        except (UserError, ValueError) as error:
            raise _invalid(str(error)) from None
        return pb.Suggested(action=action_to_proto(suggested[0]) if suggested else None)

    def _env(self, key: tuple[str, int]) -> MiniWobEnv:
        env = self._held.get(key)
        if env is None or key not in self._oracles:  # a Reset that failed holds an environment without an episode
            raise _invalid(f"assignment {key[0]} (attempt {key[1]}) holds no environment: send Reset first")
        return env


def _invalid(message: str) -> CommandError:
    return CommandError(pb.FAILURE_CODE_INVALID, message)
