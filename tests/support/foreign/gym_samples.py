"""Gymnasium environments for tests, without any dependency but gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy

from dart.worlds import Action, Click, TypeText

CELLS = 2


class Lamps(gymnasium.Env[Any, Any]):
    """Four cells, one of them lit by the seed. Choosing it gives 2 and ends the episode, another costs 1."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  gymnasium's own form

    def __init__(self, render_mode: str | None = None, breaks: bool = False, space: str = "discrete") -> None:
        self.render_mode, self.breaks = render_mode, breaks
        self.observation_space = gymnasium.spaces.Discrete(CELLS**2)
        self.action_space = (
            gymnasium.spaces.Discrete(CELLS**2)
            if space == "discrete"
            else gymnasium.spaces.Box(-1, 1, (2,), numpy.float32)
        )
        self.taken: list[object] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.lit = int(self.np_random.integers(CELLS**2))
        return self.lit, {"said": {"words": f"Choose lamp {self.lit}."}}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        if self.breaks:
            raise RuntimeError("the simulator has crashed")
        right = bool(numpy.all(action == self.lit))
        return self.lit, 2.0 if right else -1.0, right, False, {}

    def render(self) -> Any:
        frame = numpy.zeros((CELLS, CELLS, 3), numpy.uint8)
        frame[divmod(self.lit, CELLS)] = 255
        return frame.repeat(8, 0).repeat(8, 1)


def choose(action: Action, space: object) -> object:
    """Typed digits are choices, and so is any click: of lamp 0."""
    if isinstance(action, TypeText) and action.text.isdecimal():
        return int(action.text)
    return 0 if isinstance(action, Click) else None


gymnasium.register("Lamps-v0", entry_point="foreign.gym_samples:Lamps")
