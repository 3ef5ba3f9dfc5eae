"""Environments behind an OpenEnv server (Meta's and Hugging Face's protocol), one session for each.

The server may be another machine's, and any environment that shows pixels: the options say what a reset is told, how an
action of dart becomes one of the environment's, and where its answers hold the screenshot, the instruction and the
evidence. The defaults are those of `dart serve-world`.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, JsonValue, field_validator, model_validator

from dart.core.action import Action, Finish, Point, pointer_after
from dart.core.action_json import action_to_json, kind_of
from dart.core.cutting import cut
from dart.core.loopback import is_loopback
from dart.core.types import Image, Observation, Task
from dart.errors import UserError
from dart.workers.env.openenv.link import SAID_CHARACTERS, Link
from dart.workers.env.openenv.reading import picture
from dart.workers.env.openenv.templates import EXAMPLES, fill, find, values_of
from dart.worlds import Env, EnvironmentFailure, Full, Timeouts, Verdict, World
from dart.worlds.closing import close_all
from dart.worlds.missing import package
from dart.worlds.pictures import NO_IMAGE
from dart.worlds.scoring import Score, ScoredOptions

MIDDLE = Point(0.5, 0.5)
_websockets = partial(package, "websockets", extra="openenv")


class OpenEnvOptions(ScoredOptions):
    """`environment.options` where `environment.kind` is openenv."""

    url: str = Field(
        pattern=r"^(http|https|ws|wss)://.+", description="The server's address, as in `http://127.0.0.1:8000`."
    )
    token: str | None = Field(
        None, pattern=r"^env:\w+$", description="A bearer token for it, as `env:NAME`, on the env worker's machine."
    )
    reset: dict[str, JsonValue] = Field(
        {"task": "{task}", "seed": "{seed}"}, description="What a reset is told: a template for the task."
    )
    actions: Literal["canonical"] | dict[str, JsonValue] = Field(
        "canonical",
        description="Kind of action → template of the environment's. Kinds that it lacks change nothing; `finish`, if "
        "it has it, is sent when the policy ends the episode. canonical: dart's own actions as JSON.",
    )
    screenshot: str = Field(
        "observation.screenshot",
        description="Where an answer holds the screenshot: a PNG or JPEG in base64, or rows of pixels.",
    )
    instruction: str = Field("", description="The instruction, a template for the task; empty: see `instruction_at`.")
    instruction_at: str = Field("observation.instruction", description="Where a reset's answer holds the instruction.")
    evidence_at: str = Field(
        "observation.evidence", description="Where the last answer holds the evidence; it may be missing."
    )
    accessibility_tree_at: str = Field(
        "observation.accessibility_tree", description="Where an answer holds the accessibility tree; it may be missing."
    )
    last_action_error_at: str = Field(
        "observation.last_action_error",
        description="Where an answer says why the last action could not be carried out; it may be missing.",
    )

    @field_validator("actions")
    @classmethod
    def _templates(cls, actions: str | dict[str, JsonValue]) -> str | dict[str, JsonValue]:
        for kind, template in actions.items() if isinstance(actions, dict) else ():
            if kind not in EXAMPLES:
                raise ValueError(f"{kind} is not a kind of action: use one of {', '.join(EXAMPLES)}")
            if not isinstance(fill(template, values_of(EXAMPLES[kind], MIDDLE, (2, 2))), dict):
                raise ValueError(f"the template of {kind} is not an object, as OpenEnv's actions must be")
        return actions

    @model_validator(mode="after")
    def _consistent(self) -> OpenEnvOptions:
        for template in (self.reset, self.instruction):
            fill(template, _of_task(Task("", "", 0)))
        return self

    @property
    def socket(self) -> str:
        """The address of its WebSocket."""
        url = self.url.rstrip("/")
        return f"{url.replace('http', 'ws', 1) if url.startswith('http') else url}/ws"


class _Result(BaseModel):
    """An answer to reset or step."""

    observation: dict[str, Any] = {}  # what `Answer` holds has been checked
    reward: float | None = None
    done: bool = False


class OpenEnvEnv(Env):
    """One session."""

    def __init__(self, options: OpenEnvOptions, screen: tuple[int, int], link: Link) -> None:
        super().__init__(options, screen)
        self._settings, self._link = options, link
        self._begin()

    def _begin(self) -> None:
        self._pointer = MIDDLE
        self._last, self._image = _Result(), NO_IMAGE
        self._score = Score()

    async def reset(self, task: Task) -> Observation:
        self._begin()
        values = _of_task(task)
        await self._ask("reset", fill(self._settings.reset, values))
        said = fill(self._settings.instruction, values) or self._value(self._settings.instruction_at)
        return Observation(self._image, str(said), accessibility_tree=self._text(self._settings.accessibility_tree_at))

    async def act(self, action: Action) -> Observation:
        before = self._score.steps
        await self._step(action, last=False)
        if self._last.done:
            return Observation(self._image, done=True)
        tree = self._text(self._settings.accessibility_tree_at)
        sent = self._score.steps > before  # what was not sent has not failed, whatever the last answer says
        error = self._text(self._settings.last_action_error_at) if sent else ""
        return Observation(self._image, accessibility_tree=tree, last_action_error=error)

    async def conclude(self, action: Action) -> Image:
        await self._step(action, last=True)
        return self._image

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        """The environment's reward; if the policy ended the episode, it is sent `finish` first, if it has that."""
        if not self._last.done and isinstance(last, Finish):
            await self._step(last, last=False)
        evidence: dict[str, object] = {"done": self._last.done}
        try:
            if (told := self._value(self._settings.evidence_at)) is not None:
                evidence |= told if isinstance(told, dict) else {"evidence": told}
        except EnvironmentFailure:
            pass  # most environments give none
        return self._score.verdict(self._settings, "last", evidence)

    async def probe(self) -> bool:
        """Whether the server answers on this session."""
        if not self._link.usable:
            return False
        try:
            await self._link.ask("state")
        except (EnvironmentFailure, Full):
            return self._link.usable  # an error is an answer, too
        return True

    async def renew(self) -> bool:
        """Its next reset begins anew; a session that was lost is replaced."""
        return self._link.usable

    async def close(self) -> None:
        await self._link.close()

    async def _step(self, action: Action, *, last: bool) -> None:
        """Send the action, if the environment has one for it. `last` is passed to `dart serve-world` only."""
        if self._last.done:
            return
        actions = self._settings.actions
        if actions == "canonical":
            await self._ask("step", action_to_json(action) | ({"last": True} if last else {}))  # type: ignore[arg-type]
        elif isinstance(actions, dict) and (template := actions.get(kind_of(action))) is not None:
            size = (self._image.width, self._image.height)
            await self._ask("step", fill(template, values_of(action, self._pointer, size)))
        self._pointer = pointer_after(action, self._pointer)

    async def _ask(self, kind: str, data: JsonValue) -> None:
        answer, rows = await self._link.ask(kind, data)
        try:
            self._last = _Result.model_validate(answer.data)
        except ValueError as error:
            why = cut(str(error), SAID_CHARACTERS)
            raise EnvironmentFailure(f"the OpenEnv server answered {kind} with no observation: {why}") from None
        reward = self._last.reward or 0.0
        if not math.isfinite(reward):
            raise EnvironmentFailure(
                f"the OpenEnv server answered {kind} with the reward {reward}: a reward is a finite number"
            )
        self._score.add(reward, step=kind == "step")
        try:
            self._image = await self._shown(rows)
        except EnvironmentFailure:
            if not self._last.done:  # the end of an episode needs no screenshot
                raise
            self._image = NO_IMAGE

    async def _shown(self, rows: Mapping[str, object]) -> Image:
        path, value = self._settings.screenshot, self._value(self._settings.screenshot)
        shown = rows.get(value, value) if isinstance(value, str) else value
        try:
            return await asyncio.to_thread(picture, shown)
        except ValueError as error:
            raise EnvironmentFailure(f"environment.options.screenshot: the value at {path} {error}") from None

    def _text(self, path: str) -> str:
        """The text at the path; empty where the environment has none there."""
        try:
            found = self._value(path)
        except EnvironmentFailure:
            return ""
        return found if isinstance(found, str) else ""

    def _value(self, path: str) -> object:
        try:
            return find(path, vars(self._last))
        except LookupError as error:
            why = cut(str(error), SAID_CHARACTERS)
            raise EnvironmentFailure(f"the OpenEnv server's answer: {why}: correct environment.options") from None


class OpenEnv(World):
    """A session with the server for each environment. A server without room for one has it later."""

    Options = OpenEnvOptions
    timeouts = Timeouts(reset=900.0, act=300.0)  # with `last`, an action is answered with the verdict

    def __init__(self) -> None:
        self._options: OpenEnvOptions
        self._screen = (0, 0)
        self._leased: list[OpenEnvEnv] = []

    @classmethod
    def checks(cls, options: BaseModel) -> dict[str, Callable[[], str | None]]:
        return {"websockets": _websockets}

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        assert isinstance(options, OpenEnvOptions)
        if missing := _websockets():
            raise UserError(missing)
        _token(options)
        self._options, self._screen = options, screen

    async def lease(self) -> Env:
        link = await Link.open(self._options.socket, _token(self._options))
        env = OpenEnvEnv(self._options, self._screen, link)
        self._leased.append(env)
        return env

    async def dispose(self, env: Env) -> None:
        self._leased = [one for one in self._leased if one is not env]
        await env.close()

    async def close(self) -> None:
        await close_all(env.close() for env in self._leased)


def _of_task(task: Task) -> dict[str, object]:
    return {"task": task.name, "seed": task.seed}


def _token(options: OpenEnvOptions) -> str | None:
    if options.token is None:
        return None
    name = options.token.removeprefix("env:")
    address = urlsplit(options.socket)
    if address.scheme == "ws" and not is_loopback(address.hostname or ""):
        raise UserError(f"environment.options.token would go to {options.url} unencrypted: use https, or leave it out")
    token = os.environ.get(name)
    if not token:
        raise UserError(f"environment.options.token is env:{name}, which is not set: set it where the env worker runs")
    return token
