"""What has changed in the config of a run since it began, for whoever continues it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import yaml

from dart.inspection.runs import masked
from dart.inspection.wording import plain

OWN = ("server.host", "server.port", "server.tls_certificate", "server.tls_key", "server.tokens")
"""How to reach a coordinator: a launcher, or `dart coordinator --host`, chooses it anew at each start."""
MOST_OF_VALUE = 60
KEPT = 10
"""Of values that are too long: how much they show before their first difference."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each field that differs, in the order of the config, without secrets: "stop.updates: 10 → 20"."""
    shown = masked(before), masked(now)
    return [f"{'.'.join(path)}: {_pair(path, *shown)}" for path in _unlike((), before, now)]


def _unlike(path: tuple[str, ...], before: Any, now: Any) -> Iterator[tuple[str, ...]]:
    if ".".join(path[:2]) in OWN:
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*now, *before)):
            yield from _unlike((*path, str(key)), before.get(key), now.get(key))
    elif before != now:
        yield path


def _pair(path: tuple[str, ...], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    texts = [_text(path, before), _text(path, now)]
    if max(map(len, texts)) > MOST_OF_VALUE:
        alike = takewhile(lambda both: both[0] == both[1], zip(*texts, strict=False))
        same = max(0, sum(1 for _ in alike) - KEPT)
        texts = [f"…{text[same:]}" if same else text for text in texts]
    return " → ".join(plain(text, MOST_OF_VALUE) for text in texts)


def _text(path: tuple[str, ...], config: Mapping[str, Any]) -> str:
    """The value as it is written in a config, on one line."""
    value: Any = config
    for name in path:
        value = value.get(name)
    written = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf, sort_keys=False)
    return written.removesuffix("...\n").strip()
