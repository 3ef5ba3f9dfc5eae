"""What a world is, and what an environment of it can do: the contract between dart's env worker and any world.

A world of your own is one file with one class in it, which `environment.kind: module:Class` names (docs/extending.md):

- a subclass of `SyncEnv` (or `Env`, where it is asyncio): each environment is one instance, made with the options and
  the screen. `reset`, `act` and `judge` are all that it must have.
- a subclass of `World`, where environments share something (a browser, a pool of machines) or take minutes to boot.

The class also says what can be asked before anything runs: `Options` (a pydantic model for `environment.options`),
`check_task`, `checks`, `oracle_tasks`, `actions`. So its module must import without the heavy parts, on any machine.

The order of calls, which the env worker keeps to: `reset`, then `act` again and again; `judge` once, when `act` said
done, when the policy finished, or at the step limit; `renew` after every episode, however it ended. Calls to one
environment never overlap. Whatever one of them raises costs the attempt, never a reward: the attempt is made again.
`judge` is believed, with one exception: a reward of 0 counts only if the environment answers `probe` afterwards,
because a machine that has died looks like a task that was not done.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from dart.core.action import Action
from dart.core.action_json import KINDS
from dart.core.types import Observation, Task

MOST_EVIDENCE_BYTES = 64 << 10


class EnvironmentFailure(Exception):
    """The environment, not the policy, is at fault: the attempt is void and is made again."""


class Full(Exception):
    """No room for another environment now (a quota, an answer of 429). That is no failure: it is asked for again."""


class WorldOptions(BaseModel):
    """What `environment.options` may say; subclass it. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an episode ended. `reward` in [0, 1]; `evidence` is what it rests on: named texts or JSON values.

    The evidence is kept with the trajectory, up to MOST_EVIDENCE_BYTES of JSON. Raises ValueError for another reward.
    """

    reward: float
    evidence: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.reward <= 1.0:  # also false for NaN
            raise ValueError(f"the verdict's reward is {self.reward}: a reward is a number in [0, 1]")

    def evidence_json(self) -> str:
        """The evidence as a JSON object in ASCII of at most MOST_EVIDENCE_BYTES; "" where there is none.

        What is longer is cut off, and says so; what is no JSON is written as Python shows it.
        """
        if not self.evidence:
            return ""
        try:
            text = json.dumps(self.evidence, allow_nan=False, default=str)
        except (TypeError, ValueError, RecursionError):  # a key or a number that JSON does not have
            text = json.dumps({"not_json": repr(self.evidence)[: MOST_EVIDENCE_BYTES // 16]})
        if len(text) > MOST_EVIDENCE_BYTES:
            text = json.dumps({"cut_off": text[: MOST_EVIDENCE_BYTES // 4], "bytes": len(text)})
        return text


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that each verb may take. What takes longer has failed, and its environment is renewed or replaced."""

    lease: float = 900.0
    reset: float = 300.0
    act: float = 120.0
    judge: float = 300.0
    probe: float = 30.0
    renew: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            seconds = getattr(self, name)
            if not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(f"the timeout of {name} is {seconds}: a timeout is a positive number of seconds")


class Plug:
    """What can be asked of a world before it runs. Every `World`, `Env` and `SyncEnv` class is one."""

    Options: ClassVar[type[BaseModel]] = WorldOptions
    actions: ClassVar[frozenset[str]] = frozenset(KINDS)
    """Kinds of actions that it carries out, by their names in action.proto; any other one is taken as `observe`."""
    timeouts: ClassVar[Timeouts] = Timeouts()

    @classmethod
    def check_task(cls, name: str) -> None:
        """Raises UserError, with a remedy, for the name of a task that the world does not have."""

    @classmethod
    def checks(cls, options: BaseModel) -> Mapping[str, Callable[[], str | None]]:
        """What `dart doctor` asks of this machine: name → a check that says what is missing and how to get it."""
        return {}

    @classmethod
    def oracle_tasks(cls) -> Collection[str]:
        """The tasks that `suggest` knows; none where there is no oracle."""
        return ()


class Env(Plug, ABC):
    """One environment, held by one episode at a time."""

    def __init__(self, options: BaseModel, screen: tuple[int, int]) -> None:
        """`options`: of the class's own `Options`. `screen`: width and height in pixels."""
        self.options, self.screen = options, screen

    @abstractmethod
    async def reset(self, task: Task) -> Observation:
        """Begin the task's episode: the first screenshot and the instruction. The same task begins the same way.

        Raises UserError where the task itself is wrong: that attempt is not made again.
        """

    @abstractmethod
    async def act(self, action: Action) -> Observation:
        """Carry the action out as real input, and look again. `done`: the world itself ended the episode.

        `finish` never comes here: it is `judge`'s.
        """

    @abstractmethod
    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        """The episode is over, after the action `last`: how well was the task done?

        `at_limit`: the step limit ended it; whether an unfinished task can still count is the world's to say. `last` is
        a Finish where the policy ended it, with its status and its answer.
        """

    async def conclude(self, action: Action) -> None:
        """Carry out the last action before the step limit, after which nobody looks: `act` without a screenshot."""
        await self.act(action)

    async def probe(self) -> bool:
        """Is it alive and usable? Asked before it is offered, and before a reward of 0 is believed."""
        return True

    async def renew(self) -> bool:
        """The episode is over: make ready for the next one. False: it cannot be, and another takes its place."""
        return True

    async def suggest(self) -> Action | None:
        """What a scripted oracle would do next, taken as done; None: it finds no way on. See `oracle_tasks`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give everything back, also after a failure. See `World.dispose` and `World.close`, which call it."""


class SyncEnv(Plug, ABC):
    """The same verbs, plain: each instance is made, used and closed on one thread of its own, for its whole life."""

    def __init__(self, options: BaseModel, screen: tuple[int, int]) -> None:
        self.options, self.screen = options, screen

    @abstractmethod
    def reset(self, task: Task) -> Observation: ...

    @abstractmethod
    def act(self, action: Action) -> Observation: ...

    @abstractmethod
    def judge(self, last: Action, at_limit: bool) -> Verdict: ...

    def conclude(self, action: Action) -> None:
        self.act(action)

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
        """Names and versions of what does the work, for the run's summary; known once it has started."""
        return {}

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        """Make ready to lease. Raises UserError for what the options ask and this machine lacks."""

    @abstractmethod
    async def lease(self) -> Env:
        """A booted environment. May take minutes; several are asked for at once. Raises Full, and UserError.

        What else it raises is told to the coordinator, and another is asked for a little later.
        """

    async def dispose(self, env: Env) -> None:
        """The environment could not be renewed, or hangs: give it back."""
        await env.close()

    async def close(self) -> None:
        """End it, with every environment that was leased. Called once after `start`, also where that failed."""
