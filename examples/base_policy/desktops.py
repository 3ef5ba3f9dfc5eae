"""Demonstrations on desktops: the oracle's clicks, with the widgets that they are aimed at."""

from __future__ import annotations

from dart.core.action import Finish
from dart.core.types import Task
from dart.workers.env.desktop.environment import DesktopEnv
from dart.workers.env.desktop.tree import Node
from dart.workers.env.oracle import Demonstration, DemonstrationStep, Target
from dart.worlds import Env
from dart.worlds.threads import Threaded


async def demonstrate(env: Env, task: Task) -> Demonstration:
    """The oracle's episode, as `oracle.demonstrate` has it for a web page. Raises EnvironmentFailure."""
    assert isinstance(env, Threaded) and isinstance(env.env, DesktopEnv)
    desktop = env.env
    observation = await env.reset(task)
    instruction = observation.instruction
    steps: list[DemonstrationStep] = []
    while not observation.done and (action := await env.suggest()) is not None:
        steps.append(DemonstrationStep(observation, action, _rectangle(desktop.target, *desktop.screen)))
        observation = await env.act(action)
    reward = observation.reward if observation.done else (await env.judge(Finish(), False)).reward
    return Demonstration(task, instruction, tuple(steps), reward)  # a slow dialog has closed by the verdict


def _rectangle(widget: Node | None, width: int, height: int) -> Target | None:
    """The widget's, in fractions of the screen, and no further than it."""
    if widget is None:
        return None
    across = [min(max(edge / width, 0.0), 1.0) for edge in (widget.left, widget.left + widget.width)]
    down = [min(max(edge / height, 0.0), 1.0) for edge in (widget.top, widget.top + widget.height)]
    return Target(across[0], down[0], across[1], down[1], ())
