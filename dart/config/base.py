"""The base of every config section, and common field types."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import ErrorDetails

from dart.errors import UserError

Positive = Annotated[int, Field(ge=1)]


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


Seconds = Annotated[float, Field(gt=0.0)]


class ConfigError(UserError):
    """The configuration is wrong; the message names field, value and remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


_KINDS: Mapping[str, str] = {
    "int": "give a whole number",
    "float": "give a number",
    "bool": "write true or false",
    "string": "give a text, in quotes if it looks like something else",
    "path": "give a path, in quotes if it looks like something else",
    "date": "give a date, as in 2026-01-31",
    **dict.fromkeys(("tuple", "list", "set", "frozen_set", "iterable"), "give a list, as in [a, b]"),
    **dict.fromkeys(("dict", "mapping", "model", "dataclass"), "give its fields, as in {name: value}, or leave it out"),
}
"""What a value of the wrong kind should be, by the beginning of pydantic's names for such problems."""
_REMEDIES: Mapping[str, str] = {
    "greater_than_equal": "give a number of at least {ge}",
    "greater_than": "give a number above {gt}",
    "less_than_equal": "give a number of at most {le}",
    "less_than": "give a number below {lt}",
    "finite_number": "give a finite number",
    "string_too_short": "give a text of at least {min_length} characters",
    "string_too_long": "give a text of at most {max_length} characters",
    "string_pattern_mismatch": "give a text of the form {pattern}",
    "too_short": "give at least {min_length} entries",
    "too_long": "give at most {max_length} entries",
    "missing": "add it",
    "extra_forbidden": "leave it out",
}


def remedy(problem: ErrorDetails) -> str:
    """What to write instead, for one of pydantic's problems: in dart's own words, with the nearest of known names."""
    kind, context = problem["type"], dict[str, Any](problem.get("ctx", {}))
    if kind in ("literal_error", "enum"):
        names = re.findall(r"'([^']*)'", str(context["expected"]))
        close = difflib.get_close_matches(str(problem["input"]), names, n=1)
        return f"use {' or '.join(filter(None, [', '.join(names[:-1]), *names[-1:]])) or context['expected']}" + (
            f"; did you mean {close[0]}?" if close else ""
        )
    if kind in _REMEDIES:
        return _REMEDIES[kind].format(**context)
    of_kind = next((text for name, text in _KINDS.items() if kind.startswith(f"{name}_")), None)
    return of_kind or problem["msg"].removeprefix("Value error, ").replace("Input should be", "give")


def called(value: object) -> str:
    """What a YAML value is, in a sentence: "is empty", "is a list", …"""
    kinds = {str: "a text", bool: "true or false", list: "a list"}
    return "is empty" if value is None else f"is {kinds.get(type(value), 'a single value')}"
