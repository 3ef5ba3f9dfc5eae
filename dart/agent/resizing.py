"""Whether the model sees screenshots as its grammar believes: the config's sizes against the model folder's own.

An engine resizes by the folder's processor_config.json or preprocessor_config.json, and the grammar turns the model's
pixels into points by `agent.resize_multiple`, `min_pixels` and `max_pixels`. Where the two differ, every click lands
elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dart.agent.parsing import smart_resize
from dart.config import Agent
from dart.errors import UserError

FILES = ("processor_config.json", "preprocessor_config.json")
"""In the order in which transformers heeds them. The first has the settings under "image_processor", if at all."""


def problem(agent: Agent, viewport: tuple[int, int], folder: Path) -> str | None:
    """What is wrong, with the remedy; None if a screenshot of this size is resized alike, or the file does not say."""
    try:
        file, found = _found(folder)
        own = _sizes(found, agent)
    except (OSError, ValueError, TypeError):
        return None
    fields = {"resize_multiple": own[0], "min_pixels": own[1], "max_pixels": own[2]}
    try:
        seen = smart_resize(*viewport, *own)
        believed = smart_resize(*viewport, agent.resize_multiple, agent.min_pixels, agent.max_pixels)
    except UserError as error:
        return str(error)
    if seen == believed:
        return None
    wrong = ", ".join(
        f"agent.{name}: {value} (it is {getattr(agent, name)})"
        for name, value in fields.items()
        if value != getattr(agent, name)
    )
    return (
        f"the model would see a screenshot of {viewport[0]}x{viewport[1]} as {seen[0]}x{seen[1]}, by {file}, "
        f"and its clicks would be read as on {believed[0]}x{believed[1]}: set {wrong}, or change that file"
    )


def _found(folder: Path) -> tuple[Path, Mapping[str, object]]:
    """The file that an engine resizes by, and its settings. Raises OSError, ValueError if there is none."""
    nested, own = (folder / name for name in FILES)
    if nested.exists():
        settings = json.loads(nested.read_text(encoding="utf-8"))
        found = settings.get("image_processor") if isinstance(settings, Mapping) else None
        if isinstance(found, Mapping):
            return nested, found
    found = json.loads(own.read_text(encoding="utf-8"))
    return own, found if isinstance(found, Mapping) else {}


def _sizes(found: Mapping[str, object], agent: Agent) -> tuple[int, int, int]:
    """(multiple, fewest pixels, most pixels) by the file; the agent's where it does not say. `min_pixels` and
    `max_pixels` go before `size`, as in transformers. Raises ValueError, TypeError for what is not a number."""
    size = found.get("size")
    edges: Mapping[str, object] = size if isinstance(size, Mapping) else {}
    patch, merge = found.get("patch_size"), found.get("merge_size")
    multiple = agent.resize_multiple if patch is None or merge is None else _number(patch) * _number(merge)
    fewest, most = (
        next((_number(value) for value in values if value is not None), default)
        for values, default in (
            ((found.get("min_pixels"), edges.get("shortest_edge")), agent.min_pixels),
            ((found.get("max_pixels"), edges.get("longest_edge")), agent.max_pixels),
        )
    )
    return multiple, fewest, most


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a number of pixels")
    return value
