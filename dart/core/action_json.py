"""Canonical actions ⇄ JSON objects, for the database, exports and experience pools. Pure.

An object has "kind", with the names of `proto/dart/v1/action.proto`, and the fields of that kind's dataclass; points
are {"x", "y"}. One name differs: `System.kind` is written "system", since "kind" is taken. Writing and reading back
gives an equal action. Reading is strict: an unknown kind or field, or a value of the wrong type, raises ValueError;
only fields with a default may be left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import cast, get_args

from dart.core import action as a

Decode = Callable[[object], object]
_MOST = sys.float_info.max


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


def _number(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and -_MOST <= value <= _MOST:
        return float(value)
    raise ValueError("must be a finite number")


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of strings")
    return tuple(_string(item) for item in value)


def _point(value: object) -> a.Point:
    if not isinstance(value, Mapping) or value.keys() != {"x", "y"}:
        raise ValueError('must be a point, {"x": …, "y": …}')
    return a.Point(_number(value["x"]), _number(value["y"]))


def _point_or_none(value: object) -> a.Point | None:
    return None if value is None else _point(value)


def _path(value: object) -> tuple[a.Point, ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of points")
    return tuple(_point(item) for item in value)


def _actions(value: object) -> tuple[a.Action, ...]:
    if not isinstance(value, list) or any(
        not isinstance(one, Mapping) or one.get("kind") == "several" for one in value
    ):
        raise ValueError("must be a list of actions, none of which is several")
    return tuple(action_from_json(one) for one in value)


def _one_of(*names: str) -> Decode:
    def decode(value: object) -> object:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return value

    return decode


_BUTTON = _one_of(*get_args(a.MouseButton))

# Kind → its class, and how to read each of its fields.
_KINDS: dict[str, tuple[type, dict[str, Decode]]] = {
    "move": (a.Move, {"at": _point}),
    "click": (
        a.Click,
        {"at": _point_or_none, "button": _BUTTON, "count": _integer, "modifiers": _strings, "hold_seconds": _number},
    ),
    "button": (a.Button, {"at": _point_or_none, "button": _BUTTON, "mode": _one_of("down", "up")}),
    "drag": (a.Drag, {"path": _path, "button": _BUTTON, "duration_seconds": _number}),
    "scroll": (a.Scroll, {"at": _point_or_none, "dx": _integer, "dy": _integer}),
    "keys": (a.Keys, {"keysyms": _strings, "mode": _one_of(*get_args(a.PressMode))}),
    "type_text": (a.TypeText, {"text": _string}),
    "wait": (a.Wait, {"seconds": _number}),
    "observe": (a.Observe, {}),
    "finish": (a.Finish, {"status": _one_of(*get_args(a.FinishStatus)), "answer": _string}),
    "system": (a.System, {"kind": _one_of(*get_args(a.SystemKind)), "argument": _string}),
    "code": (a.Code, {"language": _string, "source": _string}),
    "several": (a.Several, {"actions": _actions}),
}
_NAMES = {cls: kind for kind, (cls, _) in _KINDS.items()}
_LATER = {"hold_seconds", "duration_seconds"}
"""Fields that earlier versions of dart refuse, so they are written only where they say something."""
KINDS = tuple(kind for kind in _KINDS if kind != "several")
"""Every kind of action that an environment may carry out, by its name."""


def kind_of(action: a.Action) -> str:
    """The name of the action's kind."""
    return _NAMES[type(action)]


def _key(kind: str, field: str) -> str:
    """The field's name in the JSON object."""
    return "system" if (kind, field) == ("system", "kind") else field


def _encode(value: object) -> object:
    match value:
        case a.Point(x, y):
            return {"x": x, "y": y}
        case _ if type(value) in _NAMES:
            return action_to_json(cast("a.Action", value))
        case tuple():
            return [_encode(item) for item in value]
        case _:
            return value


def action_to_json(action: a.Action) -> dict[str, object]:
    """The action as a JSON object."""
    kind = kind_of(action)
    values = {name: getattr(action, name) for name in _KINDS[kind][1]}
    return {"kind": kind} | {
        _key(kind, name): _encode(value) for name, value in values.items() if value or name not in _LATER
    }


def action_from_json(data: Mapping[str, object]) -> a.Action:
    """Read an action from its JSON object. Raises ValueError, which names the field and what it must be."""
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"action kind {kind!r} is unknown: it must be one of {', '.join(_KINDS)}")
    cls, decoders = _KINDS[kind]
    by_key = {_key(kind, name): (name, decode) for name, decode in decoders.items()}
    if unknown := data.keys() - by_key.keys() - {"kind"}:
        raise ValueError(f"action {kind} has no field {', '.join(sorted(unknown))}: it has {', '.join(by_key)}")
    values: dict[str, object] = {}
    for key, (name, decode) in by_key.items():
        if key in data:
            try:
                values[name] = decode(data[key])
            except ValueError as error:
                raise ValueError(f"action {kind}: {key} {data[key]!r}: {error}") from None
    required = {field.name for field in fields(cls) if field.default is MISSING}
    if missing := required - values.keys():
        raise ValueError(f"action {kind} lacks {', '.join(sorted(missing))}")
    action: a.Action = cls(**values)
    return action
