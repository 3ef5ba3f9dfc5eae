"""Worlds: where environments come from. A world of your own needs only `from dart.worlds import …`.

`contract` defines a world, `pictures` makes screenshots from PNG bytes or pixels, `threads` runs each synchronous
environment on a thread of its own, `locks` keeps the workers of one machine off each other's devices, `missing` says
what a machine lacks, `tasks` that no task has a name, `scoring` turns an environment's own rewards into a verdict,
`programs` runs commands of the user's, `limited` a program that must not outlive the worker, `closing` closes
environments, `plugs` finds the class that `environment.kind` names and reads `environment.options` with it. Nothing
here imports a worker, an engine or torch: a machine that only hosts environments needs the base package alone.
"""

from dart.core.action import (
    Action,
    Button,
    Click,
    Code,
    Drag,
    Finish,
    Keys,
    Move,
    Observe,
    Point,
    Scroll,
    System,
    TypeText,
    Wait,
)
from dart.core.types import Image, Observation, Task
from dart.errors import UserError
from dart.worlds.contract import (
    Env,
    EnvironmentFailure,
    Full,
    Plug,
    SyncEnv,
    Timeouts,
    Verdict,
    World,
    WorldOptions,
)
from dart.worlds.pictures import NO_IMAGE, from_pixels, from_png

__all__ = [
    "NO_IMAGE",
    "Action",
    "Button",
    "Click",
    "Code",
    "Drag",
    "Env",
    "EnvironmentFailure",
    "Finish",
    "Full",
    "Image",
    "Keys",
    "Move",
    "Observation",
    "Observe",
    "Plug",
    "Point",
    "Scroll",
    "SyncEnv",
    "System",
    "Task",
    "Timeouts",
    "TypeText",
    "UserError",
    "Verdict",
    "Wait",
    "World",
    "WorldOptions",
    "from_pixels",
    "from_png",
]
