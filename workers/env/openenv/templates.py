"""Actions as the JSON that a foreign environment takes, by templates; and values found in its answers by path. Pure."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from dart.core import action as a
from dart.core.action_json import action_to_json, kind_of

EXAMPLES: Mapping[str, a.Action] = {
    kind_of(example): example
    for example in (
        a.Move(a.Point(0.5, 0.5)), a.Click(None), a.Button(None), a.Drag((a.Point(0.5, 0.5),)), a.Scroll(None),
        a.Keys(("a",)), a.TypeText(""), a.Wait(1.0), a.Observe(), a.Finish(), a.System("back"), a.Code("python", ""),
    )
}  # fmt: skip


class _Text(string.Formatter):
    """`{name}`, `{name:.2f}`, `{name!r}` (as in Python) and `{name!j}` (as in JSON), for plain names alone."""

    def get_field(self, field_name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, str]:
        if field_name not in kwargs:
            raise ValueError(f"{{{field_name}}} is unknown: use one of {', '.join(f'{{{name}}}' for name in kwargs)}")
        return kwargs[field_name], field_name

    def convert_field(self, value: object, conversion: str | None) -> object:
        return json.dumps(value) if conversion == "j" else super().convert_field(value, conversion)


_TEXT = _Text()


def fill(template: JsonValue, values: Mapping[str, object]) -> JsonValue:
    """The template with `{name}` replaced in its texts; a text that is nothing but `{name}` becomes the value itself.

    Raises ValueError for an unknown name, or a text that is not a template; `{{` and `}}` stand for braces.
    """
    match template:
        case dict():
            return {key: fill(item, values) for key, item in template.items()}
        case list():
            return [fill(item, values) for item in template]
        case str():
            alone = template[1:-1]
            if template == f"{{{alone}}}" and alone in values:
                return values[alone]  # type: ignore[return-value]
            try:
                return _TEXT.vformat(template, (), values)
            except TypeError as error:  # a format that the value does not have
                raise ValueError(f"{template!r}: {error}") from None
        case _:
            return template


def values_of(action: a.Action, pointer: a.Point, size: tuple[int, int]) -> dict[str, object]:
    """What templates of the action's kind may name: the fields of its JSON object (`dart.core.action_json`), and

    - of an action with a place: x and y in [0, 1), px and py in pixels of `size`; the `pointer`'s if it has no place.
    - of a drag, those of its start, to_x, to_y, to_px and to_py of its end, and `path`, a list of {x, y, px, py}.
    - of keys, also `chord`, the keysyms with + between them.
    """
    values: dict[str, object] = {name: value for name, value in action_to_json(action).items() if name != "at"}
    match action:
        case a.Move(at) | a.Click(at) | a.Button(at) | a.Scroll(at):
            values |= _place(at or pointer, size)
        case a.Drag(path):
            path = path if len(path) > 1 else (pointer, *path)  # only the end is given: it starts at the pointer
            values |= _place(path[0], size)
            values |= {f"to_{name}": value for name, value in _place(path[-1], size).items()}
            values["path"] = [_place(point, size) for point in path]
        case a.Keys(keysyms):
            values["chord"] = "+".join(keysyms)
    return values


def _place(at: a.Point, size: tuple[int, int]) -> dict[str, object]:
    px, py = at.pixels(*size)
    return {"x": at.x, "y": at.y, "px": int(px + a.ROUNDING), "py": int(py + a.ROUNDING)}


def find(path: str, data: object) -> object:
    """The value at a path of keys and list indices with dots between them. Raises LookupError saying where it ends."""
    found = data
    for key in path.split("."):
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            there = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise LookupError(f"there is no {key!r} of {path}, only: {there}")
    return found
