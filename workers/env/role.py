"""The env worker: hosts any world (`dart.worlds`), and gives each of its environments to one episode at a time.

An episode holds an environment from Reset until Release, under its assignment id and attempt. An exception in a world,
or a value that no verb may return, ends that attempt (`FAILURE_CODE_ENVIRONMENT`), not the worker; the environment is
renewed or replaced (`places`). A wrong command is answered with `FAILURE_CODE_INVALID`. Suggest asks the world's
scripted oracle, if it has one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal

from dart.config import Delay, EnvWorkerConfig
from dart.config.told import read_told
from dart.core.action import Action, Finish, Observe
from dart.core.action_json import kind_of
from dart.core.cutting import cut
from dart.core.types import Image, Observation
from dart.errors import UserError
from dart.screenshots.shared import SharedScreenshots
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import ORACLE, SHARED_BLOBS, SLOTS
from dart.wire.convert import action_from_proto, action_to_proto, observation_to_proto, task_from_proto
from dart.wire.role import Command, CommandError, Offering, Reply, WorkerRole
from dart.wire.rules.table import (
    ERROR_CHARACTERS,
    INSTRUCTION_CHARACTERS,
    LONGEST_COMMAND_SECONDS,
    MOST_GOAL_IMAGES,
    TREE_CHARACTERS,
)
from dart.workers.env.answers import concluded, judged, observed, suggested
from dart.workers.env.places import Lease, Places
from dart.worlds import Env, EnvironmentFailure, Timeouts, Verdict, World
from dart.worlds.pictures import NO_IMAGE
from dart.worlds.plugs import find, make, read_options

log = logging.getLogger(__name__)

Key = tuple[str, int]
"""(assignment id, attempt), which identify an episode."""
PATIENCE_SECONDS = 20.0
"""How long a Reset waits for an environment: a coordinator that does not know Slots goes by Release alone."""
NOTE = 64
"""Characters for the note that a text was cut."""


class EnvRole(WorkerRole, Offering):
    """One world, and its environments."""

    role: pb.Role = pb.ROLE_ENV
    capabilities = (ORACLE, SHARED_BLOBS, SLOTS)

    def __init__(self) -> None:
        self._world: World | None = None
        self._places: Places
        self._actions: frozenset[str] = frozenset()
        self._held: dict[Key, Lease] = {}
        self._waiting: set[Key] = set()
        """Episodes whose Reset waits for an environment."""
        self._timeouts = Timeouts()
        self._begun: set[Key] = set()
        """The held episodes whose Reset succeeded."""
        self._suite = ""
        self._delay = Delay()
        self._shared: SharedScreenshots | None = None
        self.patience = PATIENCE_SECONDS

    async def prepare(self, config_json: str) -> pb.Ready:
        """Start the world; its environments boot in `run`. Raises UserError for a wrong config."""
        section = read_told(EnvWorkerConfig, config_json)
        config = section.environment
        plug = find(config.kind)
        options = read_options(plug, config.options)
        await asyncio.to_thread(plug.check_tasks, options, config.tasks.all)  # it may ask servers, or read folders
        self._suite, self._delay, self._actions = config.kind, config.delay, plug.actions
        self._world = world = make(plug)
        self._timeouts = replace(world.timeouts, **config.timeouts.chosen)
        limit = self._timeouts.start
        try:
            async with asyncio.timeout(limit) as bound:
                await world.start(options, config.viewport)
        except TimeoutError:
            if not bound.expired():
                raise
            raise UserError(
                f"environment.kind {config.kind}: the world did not start within {limit:g} s: look at this worker's "
                "log, or set environment.timeouts.start to more"
            ) from None
        self._timeouts = replace(world.timeouts, **config.timeouts.chosen)  # a world may know them only now
        self._places = Places(world, config.slots, self._timeouts)
        self._shared = SharedScreenshots.seen(section.shared_blobs, writes=True)
        delay = config.delay
        longest = self._timeouts.longest(self.patience + delay.reset_seconds[1], delay.step_seconds[1])
        longest = {kind: min(seconds, LONGEST_COMMAND_SECONDS) for kind, seconds in longest.items()}
        return pb.Ready(
            slots=config.slots, versions=world.versions, shares_blobs=self._shared is not None, longest_seconds=longest
        )

    async def run(self, say: Callable[[pb.Slots], None]) -> None:
        """Boot and renew environments, and report how many there are, until cancelled."""
        await self._places.keep(say)

    async def handle(self, command: Command) -> Reply | None:
        key = (command.assignment.assignment_id, command.assignment.attempt)
        try:
            return await self._answer(key, command)
        except CommandError:
            raise
        except EnvironmentFailure as error:
            raise CommandError(pb.FAILURE_CODE_ENVIRONMENT, f"{type(error).__name__}: {error}") from None
        except Exception as error:  # A world is the user's code: what it returns costs only this attempt, too.
            name = type(command).__name__
            log.exception("%s cannot be answered", name)
            why = (
                f"{name} cannot be answered with what the world returned ({type(error).__name__}: {error}): it must be "
                "as dart.worlds.contract says"
            )
            if (lease := self._held.get(key)) is not None:
                self._places.failed(lease, why)
            raise CommandError(pb.FAILURE_CODE_ENVIRONMENT, why) from error

    async def _answer(self, key: Key, command: Command) -> Reply:
        began = time.monotonic()
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
                self._begun.discard(key)
                self._waiting.discard(key)
                if (lease := self._held.pop(key, None)) is not None:
                    self._places.release(lease)
                return pb.Released()
            case _:
                raise _invalid(f"an env worker does not know {type(command).__name__}")
        observation = await self._sendable(observation)
        return observation_to_proto(observation, time.monotonic() - began)

    async def _sendable(self, observation: Observation) -> Observation:
        """The observation with its texts within their bounds, and with pictures in the run's directory if that is
        shared."""
        tree, error = observation.accessibility_tree, observation.last_action_error
        if len(tree) > TREE_CHARACTERS or len(error) > ERROR_CHARACTERS:
            tree, error = cut(tree, TREE_CHARACTERS - NOTE), cut(error, ERROR_CHARACTERS - NOTE)
            observation = replace(observation, accessibility_tree=tree, last_action_error=error)
        if self._shared is None or not (observation.image.data or observation.goal_images):
            return observation
        put = self._shared.put
        image = await asyncio.to_thread(put, observation.image) if observation.image.data else observation.image
        goals = [await asyncio.to_thread(put, goal) for goal in observation.goal_images]
        return replace(observation, image=image, goal_images=tuple(goals))

    async def close(self) -> None:
        self._held.clear()
        self._begun.clear()
        if self._world is not None:
            world, self._world = self._world, None
            try:
                async with asyncio.timeout(self._timeouts.close):
                    await world.close()
            except TimeoutError:
                log.warning("the world was not closed within %g s", self._timeouts.close)
            except Exception:  # a world is the user's code, and the worker ends or begins anew all the same
                log.exception("the world was not closed")

    async def _reset(self, key: Key, command: pb.Reset) -> Observation:
        task = task_from_proto(command.task)
        if task.suite != self._suite:
            raise _invalid(f"task {task.id} is of suite {task.suite!r}, this worker runs {self._suite!r}: use another")
        lease = self._held.get(key) or await self._wait_for_environment(key)
        try:
            observation = await self._observe(lease, "reset", lambda env: env.reset(task), (UserError,))
        except UserError as error:
            raise CommandError(pb.FAILURE_CODE_TASK, str(error)) from None
        if (goals := len(observation.goal_images)) > MOST_GOAL_IMAGES:
            why = f"its instruction has {goals} pictures, and {MOST_GOAL_IMAGES} can be sent: have the world merge them"
            raise CommandError(pb.FAILURE_CODE_TASK, f"task {task.id}: {why}")
        if (length := len(observation.instruction)) > INSTRUCTION_CHARACTERS:
            why = f"its instruction has {length:,} characters, and {INSTRUCTION_CHARACTERS:,} can be sent: shorten it"
            raise CommandError(pb.FAILURE_CODE_TASK, f"task {task.id}: {why}")
        if self._held.get(key) is not lease:
            raise _released(key)
        self._begun.add(key)
        return observation

    async def _wait_for_environment(self, key: Key) -> Lease:
        self._waiting.add(key)
        try:
            lease = await self._places.take(self.patience)
            if lease is None:
                why = f"no environment became free within {self.patience:g} s, and {len(self._held)} are held"
                if reason := self._places.slots().reason:  # there are fewer than there should be
                    raise CommandError(pb.FAILURE_CODE_ENVIRONMENT, f"{why}: {reason}")
                raise _invalid(f"{why}: send Release before Reset")
            if key not in self._waiting:
                self._places.release(lease)
                raise _released(key)
            self._held[key] = lease
            return lease
        finally:
            self._waiting.discard(key)

    async def _act(self, key: Key, command: pb.Act) -> Observation:
        """The observation after the action; at the episode's end the verdict, with the screen if the world shows it."""
        lease = self._lease(key)
        try:
            action = action_from_proto(command.action)
        except ValueError as error:
            raise _invalid(str(error)) from None
        if isinstance(action, Finish):
            return await self._judge(lease, action, at_limit=False)
        offered = (kind := kind_of(action)) in self._actions
        carried_out = action if offered else Observe()
        if command.last:

            async def conclude(env: Env) -> Image:
                return concluded(await env.conclude(carried_out))

            shown = await self._places.call(lease, "act", conclude)
            return await self._judge(lease, action, at_limit=True, shown=shown)
        observation = await self._observe(lease, "act", lambda env: env.act(carried_out))
        if not offered and not observation.last_action_error:
            observation = replace(observation, last_action_error=f"this environment does not offer the action {kind}")
        if observation.done:
            return await self._judge(lease, action, at_limit=False, shown=observation.image)
        return observation

    async def _observe(
        self,
        lease: Lease,
        verb: Literal["reset", "act"],
        call: Callable[[Env], Awaitable[Observation]],
        passing: tuple[type[Exception], ...] = (),
    ) -> Observation:
        async def checked(env: Env) -> Observation:
            return observed(verb, await call(env))

        return await self._places.call(lease, verb, checked, passing)

    async def _judge(self, lease: Lease, last: Action, *, at_limit: bool, shown: Image = NO_IMAGE) -> Observation:
        """The verdict, as a final observation. A 0 from a dead environment counts as its failure, not as a verdict."""

        async def judge(env: Env) -> Verdict:
            return judged(await env.judge(last, at_limit))

        verdict = await self._places.call(lease, "judge", judge)
        if verdict.reward == 0 and not await self._places.call(lease, "probe", lambda env: env.probe()):
            why = "the environment does not answer its probe, so its verdict of 0 is discarded"
            self._places.failed(lease, why)
            raise EnvironmentFailure(why)
        return Observation(shown, "", True, verdict.reward, verdict.evidence_json())

    async def _suggest(self, key: Key) -> pb.Suggested:
        lease = self._lease(key)

        async def suggest(env: Env) -> Action | None:
            return suggested(await env.suggest())

        try:
            passing = (UserError, ValueError, NotImplementedError)
            action = await self._places.call(lease, "act", suggest, passing)
        except NotImplementedError:
            raise _invalid(f"{self._suite} has no oracle: collect from a policy or an endpoint") from None
        except (UserError, ValueError) as error:
            raise _invalid(str(error)) from None
        return pb.Suggested(action=action_to_proto(action) if action is not None else None)

    def _lease(self, key: Key) -> Lease:
        if key not in self._begun:  # a Reset that failed holds an environment without an episode
            raise _invalid(f"assignment {key[0]} (attempt {key[1]}) holds no environment: send Reset first")
        return self._held[key]


def _released(key: Key) -> CommandError:
    return _invalid(f"assignment {key[0]} (attempt {key[1]}) was released before its Reset was over")


def _invalid(message: str) -> CommandError:
    return CommandError(pb.FAILURE_CODE_INVALID, message)
