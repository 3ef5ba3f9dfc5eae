"""What a world is, and what an environment of it can do: the contract between dart's env worker and any world.

A world of your own is one file with one class in it, which `environment.kind: module:Class` names (docs/extending.md):

- a subclass of `SyncEnv` (or `Env`, if it uses asyncio): each environment is one instance, made with the options and
  the screen. It only has to implement `reset`, `act` and `judge`.
- a subclass of `World`, if environments share something (a browser, a pool of machines) or take minutes to boot.

The class also answers questions before anything runs: `Options` (a pydantic model for `environment.options`),
`check_task`, `check_tasks`, `checks`, `checks_with_screen`, `oracle_tasks`, `actions`. So its module must import
without the heavy parts, on any machine.

The env worker calls `reset`, then `act` repeatedly; `judge` once, when `act` returned `done`, when the policy finished,
or at the step limit; `renew` after every episode, however it ended. Calls to one environment never overlap. An
exception in any of them, or a value of another type, voids the attempt, which is retried; it never gives a reward.
`judge` is believed, with one exception: a reward of 0 counts only if the environment answers `probe` afterwards,
because a machine that has died looks like a task that was not done.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from dart.core.action import Action
from dart.core.action_json import KINDS
from dart.core.cutting import encodable
from dart.core.types import Image, Observation, Task

MOST_EVIDENCE_BYTES = 64 << 10


class EnvironmentFailure(Exception):
    """The environment, not the policy, is at fault: the attempt is void and is retried."""


class Full(Exception):
    """There is no room for another environment now (a quota, an HTTP 429). This is not a failure: the lease is retried
    later."""


class WorldOptions(BaseModel):
    """The fields of `environment.options`; subclass it. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an episode ended. `reward` is in [0, 1]; `evidence` supports it: named texts or JSON values.

    The evidence is kept with the trajectory, up to MOST_EVIDENCE_BYTES of JSON. Raises ValueError for a reward outside
    [0, 1].
    """

    reward: float
    evidence: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.reward <= 1.0:  # also false for NaN
            raise ValueError(f"the verdict's reward is {self.reward}: a reward is a number in [0, 1]")

    def evidence_json(self) -> str:
        """The evidence as a JSON object in ASCII of at most MOST_EVIDENCE_BYTES; "" if there is none.

        Longer evidence is cut off, with a note; values that are not JSON are written as Python's repr.
        """
        if not self.evidence:
            return ""
        try:
            text = json.dumps(self.evidence, allow_nan=False, default=str)
        except (TypeError, ValueError, RecursionError):  # a key or a number that JSON cannot express
            text = json.dumps({"not_json": repr(self.evidence)[: MOST_EVIDENCE_BYTES // 16]})
        if r"\ud" in text:  # half a surrogate pair, perhaps, which whoever reads it could not print
            text = json.dumps(json.loads(encodable(json.dumps(json.loads(text), ensure_ascii=False))))
        if len(text) > MOST_EVIDENCE_BYTES:
            text = json.dumps({"cut_off": text[: MOST_EVIDENCE_BYTES // 4], "bytes": len(text)})
        return text


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The time limit of each call, in seconds. A call that takes longer has failed, and its environment is renewed or
    replaced. `environment.timeouts` in the config overrides them one by one.

    A world that knows how long its verbs take should say so: what it declares is also how long the coordinator waits
    for an answer, and how long a run may be silent before it counts as stalled.
    """

    start: float = 1800.0
    """Of `World.start`; the worker ends if it takes longer."""
    lease: float = 900.0
    reset: float = 300.0
    act: float = 120.0
    judge: float = 300.0
    probe: float = 30.0
    renew: float = 600.0
    close: float = 600.0
    """Of disposing of one environment, and of closing the world."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            seconds = getattr(self, name)
            if not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(f"the timeout of {name} is {seconds}: a timeout is a positive number of seconds")

    def longest(self, around_reset: float = 0.0, around_act: float = 0.0) -> dict[str, float]:
        """What the env worker tells the coordinator (`Ready.longest_seconds`), in seconds; nothing if no limit was
        chosen.

        An action that ends its episode is several calls. `around_reset` and `around_act`: what the worker itself adds.
        """
        if self == Timeouts():
            return {}
        return {
            "reset": around_reset + self.reset,
            "act": around_act + self.act + self.judge + self.probe,
            "suggest": self.act,
            "boot": self.lease + self.probe,
            "renew": self.renew + self.probe,
        }


class Plug:
    """Questions about a world before it runs. Every `World`, `Env` and `SyncEnv` class answers them."""

    Options: ClassVar[type[BaseModel]] = WorldOptions
    actions: ClassVar[frozenset[str]] = frozenset(KINDS)
    """The kinds of actions that it carries out, by their names in action.proto; any other is treated as `observe`."""
    timeouts: ClassVar[Timeouts] = Timeouts()

    @classmethod
    def check_task(cls, name: str) -> None:
        """Raises UserError, with a remedy, for the name of a task that the world does not have."""

    @classmethod
    def check_tasks(cls, options: BaseModel, names: Collection[str]) -> None:
        """Like `check_task` for all names of a config, for a world whose tasks depend on its options."""
        for name in names:
            cls.check_task(name)

    @classmethod
    def checks(cls, options: BaseModel) -> Mapping[str, Callable[[], str | None]]:
        """Checks of this machine for `dart doctor`: name → a check that says what is missing and how to get it."""
        return {}

    @classmethod
    def checks_with_screen(cls, options: BaseModel, screen: tuple[int, int]) -> Mapping[str, Callable[[], str | None]]:
        """Like `checks`, for a world whose machines have screens of their own: `screen` is environment.viewport."""
        return cls.checks(options)

    @classmethod
    def warnings(cls, options: BaseModel, names: Collection[str]) -> Sequence[str]:
        """What `dart doctor` warns of: why tasks of a config, which exist, are unlike what one would expect."""
        return ()

    @classmethod
    def oracle_tasks(cls) -> Collection[str]:
        """The tasks that `suggest` can solve; none if there is no oracle."""
        return ()


class Env(Plug, ABC):
    """One environment, held by one episode at a time."""

    def __init__(self, options: BaseModel, screen: tuple[int, int]) -> None:
        """`options`: an instance of the class's own `Options`. `screen`: width and height in pixels."""
        self.options, self.screen = options, screen

    @abstractmethod
    async def reset(self, task: Task) -> Observation:
        """Begin an episode of the task: return the first screenshot and the instruction. A task always begins the same
        way.

        Raises UserError if the task itself is wrong: that attempt is not retried.
        """

    @abstractmethod
    async def act(self, action: Action) -> Observation:
        """Carry out the action as real input, and return a new screenshot. `done`: the world itself ended the episode;
        then a screenshot is kept, but not needed (`NO_IMAGE`).

        `finish` is never passed here, only to `judge`.
        """

    @abstractmethod
    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        """The episode is over, after the action `last`: how well was the task done?

        `at_limit`: the step limit ended it, or the policy's text was no action (then only the state is judged); the
        world decides whether an unfinished task can still count. `last` is a Finish if the policy ended it, with its
        status and its answer.
        """

    async def conclude(self, action: Action) -> Image:
        """Carry out the last action before the step limit. Its screenshot is only for people: return `NO_IMAGE`, or
        nothing, if there is none."""
        return (await self.act(action)).image

    async def probe(self) -> bool:
        """Whether it is alive and usable. Called before it is offered, and before a reward of 0 is believed."""
        return True

    async def renew(self) -> bool:
        """The episode is over: get ready for the next. Return False if that is impossible; you are then replaced."""
        return True

    async def suggest(self) -> Action | None:
        """A scripted oracle's next action, assumed to be carried out; None if it is stuck. See `oracle_tasks`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release everything, also after a failure. Called by `World.dispose` and `World.close`: by both if the first
        failed or was cancelled."""


class SyncEnv(Plug, ABC):
    """The same methods without asyncio: each instance is made, used and closed on one thread of its own."""

    def __init__(self, options: BaseModel, screen: tuple[int, int]) -> None:
        self.options, self.screen = options, screen

    @abstractmethod
    def reset(self, task: Task) -> Observation: ...

    @abstractmethod
    def act(self, action: Action) -> Observation: ...

    @abstractmethod
    def judge(self, last: Action, at_limit: bool) -> Verdict: ...

    def conclude(self, action: Action) -> Image:
        return self.act(action).image

    def probe(self) -> bool:
        return True

    def renew(self) -> bool:
        return True

    def suggest(self) -> Action | None:
        raise NotImplementedError

    def close(self) -> None:
        return


class World(Plug, ABC):
    """Where environments come from: a browser, a pool of machines. One per env worker, made without arguments."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Names and versions of the software behind it, for the run's summary; known once it has started."""
        return {}

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        """Get ready to lease. Raises UserError if this machine lacks something that the options require."""

    @abstractmethod
    async def lease(self) -> Env:
        """A booted environment. May take minutes; several leases run at once. Raises Full, and UserError.

        Any other exception is reported to the coordinator, and the lease is retried a little later.
        """

    async def dispose(self, env: Env) -> None:
        """The environment could not be renewed, or hangs: release it."""
        await env.close()

    async def close(self) -> None:
        """End the world, with every leased environment. Called once after `start`, even if that failed."""
