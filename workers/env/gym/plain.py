"""A plain gymnasium environment: what it renders is the screenshot, and a table or a function translates actions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel

from dart.core.action import Action
from dart.core.types import Image, Observation, Task
from dart.errors import UserError
from dart.workers.env.gym.options import GymOptions
from dart.workers.env.gym.translate import check_space, translator
from dart.workers.env.openenv.templates import find
from dart.worlds import EnvironmentFailure, SyncEnv, Verdict, from_pixels
from dart.worlds.pictures import NO_IMAGE
from dart.worlds.scoring import Score

if TYPE_CHECKING:
    import gymnasium


class PlainGym(SyncEnv):
    """One environment, made anew only for another task's id or after a failure."""

    def __init__(self, options: BaseModel, screen: tuple[int, int]) -> None:
        super().__init__(options, screen)
        assert isinstance(options, GymOptions)
        self._settings = options
        self._translate = translator(options)
        self._env: gymnasium.Env[object, object] | None = None
        self._name = ""
        self._score = Score()
        self._ended: dict[str, object] = {}
        """Why the environment itself ended the episode; empty while it has not."""

    def reset(self, task: Task) -> Observation:
        with self._discarded_if_it_fails():
            env = self._made_for(task)
            observation, info = env.reset(seed=task.seed)
            self._score, self._ended = Score(), {}
            return Observation(self._look(env), self._instruction(task, observation, info))

    def act(self, action: Action) -> Observation:
        """An action that has no translation changes nothing: the environment stands still until one has."""
        env = self._env
        if env is None:
            raise EnvironmentFailure("the environment failed earlier in this episode")
        with self._discarded_if_it_fails():
            if not self._ended and (translated := self._translate(action, env.action_space)) is not None:
                _, reward, terminated, truncated, _ = env.step(translated)
                self._score.add(reward)
                if terminated or truncated:
                    self._ended = {"terminated": bool(terminated), "truncated": bool(truncated)}
            return Observation(NO_IMAGE, done=True) if self._ended else Observation(self._look(env))

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        """The rewards so far, also of an episode that did not end by itself."""
        return self._score.verdict(self._settings, "sum", self._ended)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    @contextlib.contextmanager
    def _discarded_if_it_fails(self) -> Iterator[None]:
        """An environment that raised is not used again: the next reset makes another."""
        try:
            yield
        except Exception:  # the boundary to the user's own environment, which may raise anything; it is raised again
            with contextlib.suppress(Exception):  # what it raises while it is closed hides the first error
                self.close()
            raise

    def _made_for(self, task: Task) -> gymnasium.Env[object, object]:
        import gymnasium

        name = self._settings.name(task.name)
        if self._env is not None and name == self._name:
            return self._env
        self.close()
        arguments = {"render_mode": "rgb_array", "disable_env_checker": True} | dict(self._settings.arguments)
        try:
            env: gymnasium.Env[object, object] = gymnasium.make(name, **arguments)  # type: ignore[arg-type]
        except gymnasium.error.UnregisteredEnv as error:
            raise UserError(
                f"environment.options.id: gymnasium has no environment {name} ({error}): correct it or the task's "
                "name, or write module:ID if a module registers it"
            ) from None
        self._env, self._name = env, name
        check_space(self._settings, env.action_space)
        return env

    def _instruction(self, task: Task, observation: object, info: Mapping[str, object]) -> str:
        if self._settings.instruction:
            return self._settings.instruction.replace("{task}", task.name)
        try:
            return str(find(self._settings.instruction_at, {"observation": observation, "info": info}))
        except LookupError as error:
            raise UserError(
                f"environment.options.instruction_at: the answer to the reset: {error}: name a value that it has"
            ) from None

    @staticmethod
    def _look(env: gymnasium.Env[object, object]) -> Image:
        import numpy

        frame: object = env.render()
        if not (isinstance(frame, numpy.ndarray) and frame.ndim == 3 and frame.shape[2] == 3):
            shape = getattr(frame, "shape", type(frame).__name__)
            raise UserError(
                f"environment.options.id: the environment renders {shape}, not height x width x 3 pixels: use one with "
                "the render mode rgb_array"
            )
        height, width, _ = frame.shape
        return from_pixels(frame.astype(numpy.uint8).tobytes(), width, height)
