"""docs/configuration.md, from the config's own fields: `python -m dart.config_reference`."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from dart.config import Config
from dart.worlds.plugs import BUILT_IN, find

_HEAD = """# Configuration

One YAML file, checked whole before anything starts. This page is made from the fields themselves
(`python -m dart.config_reference`); `configs/` holds worked examples. Any field can be changed on the command line:
`--set section.field=value`. Defaults are those of the paper where it gives one, except `curation.task_preference`: the
paper's is 0, which visits all tasks equally often.
"""


def reference() -> str:
    """The page."""
    sections = [_HEAD, *_sections(Config, "")]
    for kind in BUILT_IN:
        sections += _sections(find(kind).Options, f"environment.options, for {kind}: ")
    return "\n".join(sections) + "\n"


def _sections(
    model: type[BaseModel], prefix: str, default: BaseModel | None = None, description: str = ""
) -> Iterator[str]:
    """The section that `model` is, and those within it. `default`: what stands there where the config says nothing, if
    that is not what the class says; `description`: of the field that holds the section."""
    rows: list[str] = []
    nested: list[tuple[str, type[BaseModel], BaseModel | None, str]] = []
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            nested.append((f"{prefix}{name}", field.annotation, _section_default(field), field.description or ""))
            continue
        choices = typing.get_args(field.annotation)
        if types.NoneType in choices:
            nested += [(f"{prefix}{name}", one, None, "") for one in choices if _is_section(one)]
        told = _default(field) if default is None else _written(getattr(default, name))
        rows.append(f"| `{name}` | {_type(field.annotation)} | {told} | {field.description or ''} |")
    if rows:
        yield f"## {prefix.rstrip('.: ') or '(top level)'}\n"
        if model.__doc__ and not model.__doc__.startswith("A run, whole"):
            yield f"{inspect.cleandoc(model.__doc__)}\n"
        if default is not None and description:
            yield f"{description}\n"
        yield "| field | type | default | what it is |\n|---|---|---|---|"
        yield "\n".join(rows) + "\n"
    for name, inner, own, said in nested:
        yield from _sections(inner, f"{name}.", own, said)


def _section_default(field: FieldInfo) -> BaseModel | None:
    """The section that a config without this field has, if its fields differ from the defaults of its class."""
    value = None if field.is_required() or field.default_factory is not None else field.default
    return value if isinstance(value, BaseModel) else None


def _is_section(annotation: object) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _type(annotation: object) -> str:
    if annotation is JsonValue:
        return "JSON"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if arguments:
        name = getattr(origin, "__name__", str(origin))
        return f"{name} of {', '.join(_type(argument) for argument in arguments if argument is not ...)}"
    return "none" if annotation is type(None) else getattr(annotation, "__name__", str(annotation)).lower()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _written(field.get_default(call_default_factory=True))


def _written(value: object) -> str:
    return "none" if value is None else f"`{value}`"


if __name__ == "__main__":
    Path("docs/configuration.md").write_text(reference(), encoding="utf-8")
