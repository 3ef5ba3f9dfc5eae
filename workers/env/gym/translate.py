"""Actions of dart → actions of a plain gymnasium environment: by the user's function, by keys, by cells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dart.core.action import Action, Click, Keys
from dart.errors import UserError
from dart.workers.env.gym.options import GymOptions, Translate, import_here

if TYPE_CHECKING:
    import gymnasium


def translator(options: GymOptions) -> Translate:
    """How actions are translated. Raises UserError if the user's function cannot be imported."""
    if options.actions is None:
        return lambda action, space: _by_table(options, action, space)
    module, _, name = options.actions.partition(":")
    function = getattr(import_here(module, "actions"), name, None) if module and name else None
    if not callable(function):
        raise UserError(
            f"environment.options.actions is {options.actions!r}, which is not a function: write module:function"
        )
    made: Translate = function
    return made


def check_space(options: GymOptions, space: gymnasium.Space[object]) -> None:
    """Raises UserError if the environment does not have the actions that `keys` and `cells` speak of."""
    import gymnasium

    for key, value in options.keys.items():
        if (action := _value(value, space)) not in space:
            raise UserError(
                f"environment.options.keys: {key} is {action!r}, which is not an action of {space}: give one"
            )
    if options.cells is None:
        return
    count = math.prod(options.cells)
    if not (isinstance(space, gymnasium.spaces.Discrete) and space.n == count):
        columns, rows = options.cells
        raise UserError(
            f"environment.options.cells is [{columns}, {rows}], which takes Discrete({count}), and the environment has "
            f"{space}: change it, or give actions (module:function)"
        )


def _by_table(options: GymOptions, action: Action, space: object) -> object:
    match action:
        case Keys(keysyms, "press" | "down") if keysyms and keysyms[-1] in options.keys:
            return _value(options.keys[keysyms[-1]], space)
        case Click(at, "left") if at is not None and options.cells is not None:
            columns, rows = options.cells
            return int(at.y * rows) * columns + int(at.x * columns) + getattr(space, "start", 0)
        case _:
            return None


def _value(value: object, space: object) -> object:
    """A JSON value as an action: lists as arrays of the space's type, also within objects."""
    if isinstance(value, Mapping):
        parts = getattr(space, "spaces", {})
        return {key: _value(item, parts.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        import numpy

        return numpy.asarray(value, dtype=getattr(space, "dtype", None))
    return value
