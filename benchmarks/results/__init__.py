"""What the benchmarks measured, one JSON file each; here is how they write it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dart.coordinator.summary import machine, software, write_json


def record(
    name: str, what: str, results: object, *, versions: Mapping[str, str] | None = None, **more: object
) -> dict[str, Any]:
    """The content of one file, with when and on what it was measured.

    `what`: what was real and what was simulated. `versions`: of software beside the coordinator's. `more`: what else
    a reader has to know.
    """
    return {
        "name": name,
        "real_or_simulated": what,
        "machine": machine(),
        "versions": {**software(), **(versions or {})},
        "date": time.strftime("%Y-%m-%d"),
        **more,
        "results": results,
    }


def write(
    path: Path, name: str, what: str, results: object, *, versions: Mapping[str, str] | None = None, **more: object
) -> Path:
    """Write the `record` to the file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_json(path, record(name, what, results, versions=versions, **more))
