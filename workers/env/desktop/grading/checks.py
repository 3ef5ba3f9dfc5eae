"""The functions that an evaluator may name (`evaluator.func`): each says whether a result is as expected.

A check gets what was found and the rules (`expected.rules`) and returns whether it holds. It raises ValueError if a
file cannot be read, which counts as not done, and KeyError or TypeError if the rules are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from PIL import ImageColor
from pydantic import JsonValue

from dart.workers.env.desktop.grading import documents

Rules = Mapping[str, JsonValue]
COLOUR_TOLERANCE = 12


@dataclass(frozen=True, slots=True)
class Found:
    """A result: a text, or a file, which may not exist."""

    text: str = ""
    file: Path | None = None

    def said(self) -> str:
        """The text, or the file's. Raises ValueError if there is no such file."""
        if self.file is None:
            return self.text
        if not self.file.is_file():
            raise ValueError(f"there is no file {self.file.name}")
        return self.file.read_bytes()[: documents.MOST_BYTES].decode("utf-8", "replace")

    def path(self) -> Path:
        if self.file is None or not self.file.is_file():
            raise ValueError(f"there is no file {self.file.name if self.file else 'named'}")
        return self.file


Check = Callable[[Found, Rules], bool]


def exact_match(found: Found, rules: Rules) -> bool:
    """`expected`: the whole text, but for white space at its ends."""
    return found.said().strip() == str(rules["expected"]).strip()


def check_include_exclude(found: Found, rules: Rules) -> bool:
    """`include`: texts that all occur; `exclude`: texts of which none does."""
    text = found.said()
    return all(one in text for one in _texts(rules, "include")) and not any(
        one in text for one in _texts(rules, "exclude")
    )


def lines_match(found: Found, rules: Rules) -> bool:
    """`expected`: all lines, in order; empty ones and white space at their ends do not count."""
    return [line.strip() for line in found.said().splitlines() if line.strip()] == _texts(rules, "expected")


def file_exists(found: Found, rules: Rules) -> bool:
    return found.file is not None and found.file.exists()


def file_missing(found: Found, rules: Rules) -> bool:
    return found.file is not None and not found.file.exists()


def folder_exists(found: Found, rules: Rules) -> bool:
    return found.file is not None and found.file.is_dir()


def document_paragraphs(found: Found, rules: Rules) -> bool:
    """`expected`: the paragraphs that are not empty."""
    return [one.strip() for one in documents.paragraphs(found.path()) if one.strip()] == _texts(rules, "expected")


def document_bold(found: Found, rules: Rules) -> bool:
    """`expected`: all bold texts."""
    return [one.strip() for one in documents.bold_texts(found.path()) if one.strip()] == _texts(rules, "expected")


def sheet_cells(found: Found, rules: Rules) -> bool:
    """`expected`: a list of [cell, value], as in ["B3", "12"]; numbers are compared as numbers."""
    pairs = [_items(one) for one in _items(rules["expected"])]
    return all(_same(documents.cell(found.path(), str(name)), str(value)) for name, value in pairs)


def picture_size(found: Found, rules: Rules) -> bool:
    """`expected`: [width, height] in pixels."""
    return list(documents.picture(found.path()).size) == [int(one) for one in _texts(rules, "expected")]


def picture_colours(found: Found, rules: Rules) -> bool:
    """`expected`: a list of [x, y, colour]: places in fractions of the picture, and the names of their colours."""
    picture = documents.picture(found.path())
    for one in _items(rules["expected"]):
        x, y, colour = [str(part) for part in _items(one)]
        seen = picture.getpixel((int(float(x) * picture.width), int(float(y) * picture.height)))
        wanted = ImageColor.getcolor(colour, "RGB")
        assert isinstance(seen, tuple) and isinstance(wanted, tuple)
        if any(abs(a - b) > COLOUR_TOLERANCE for a, b in zip(seen, wanted, strict=True)):
            return False
    return True


def is_bookmarked(found: Found, rules: Rules) -> bool:
    """Chromium's file of bookmarks has exactly the pages whose addresses end with `expected`, a list."""

    def addresses(node: JsonValue) -> list[str]:
        if isinstance(node, list):
            return [one for child in node for one in addresses(child)]
        if not isinstance(node, dict):
            return []
        own = [str(node["url"])] if node.get("type") == "url" else []
        return own + [one for child in node.values() for one in addresses(child)]

    try:
        marked = addresses(json.loads(found.said()))
    except RecursionError:
        raise ValueError("the bookmarks are nested too deeply") from None
    wanted = _texts(rules, "expected")
    return len(marked) == len(wanted) and all(any(one.endswith(end) for one in marked) for end in wanted)


CHECKS: Mapping[str, Check] = {
    one.__name__: one
    for one in (
        exact_match, check_include_exclude, lines_match, file_exists, file_missing, folder_exists, document_paragraphs,
        document_bold, sheet_cells, picture_size, picture_colours, is_bookmarked,
    )
}  # fmt: skip


def _texts(rules: Rules, name: str) -> list[str]:
    value = rules.get(name, [])
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _items(value: JsonValue) -> list[JsonValue]:
    if not isinstance(value, list):
        raise TypeError(f"evaluator.expected.rules.expected is {value!r}: it must be a list here")
    return value


def _same(seen: str, wanted: str) -> bool:
    try:
        return abs(float(seen) - float(wanted)) < 1e-6
    except ValueError:
        return seen.strip() == wanted.strip()
