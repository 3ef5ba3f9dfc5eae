"""What a finished run leaves for people: summary.json, with the machine and the software that it ran on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dart
from dart.config import Config
from dart.coordinator.service.accounting import Times
from dart.core.capacity.machine import memory_bytes
from dart.core.fates import TRAINED, cause_of
from dart.core.json_text import to_json
from dart.core.status import Figures
from dart.versions import installed

Summary = dict[str, Any]
"""How a run ended, as summary.json has it."""


def machine() -> dict[str, int | float | str]:
    """Cores and memory that this process may use, operating system, processor."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
    }


def software() -> dict[str, str]:
    """Versions of what the coordinator itself runs on; workers report theirs in Ready."""
    libraries = installed("grpcio", "protobuf", "SQLAlchemy", "uvloop")
    return {"dart": dart.__version__, "python": platform.python_version(), **libraries}


def about(run: str, config: Config, versions: Mapping[str, str]) -> dict[str, object]:
    """The run, and what it ran on. `versions`: those that workers reported."""
    return {
        "run": run,
        "config": config.as_json(),
        "machine": machine(),
        "versions": {**software(), **versions},
    }


def write_json(path: Path, value: Mapping[str, object], indent: int | None = 2) -> Path:
    """Write the file atomically; on one line if `indent` is None."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(to_json(value, indent=indent) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def training_summary(figures: Figures, times: Times) -> dict[str, object]:
    """What the training phase came to, for summary.json."""
    counts = figures.counts
    return {
        "train_seconds": round(figures.train_seconds, 2),
        "trajectories": counts.trajectories,
        "env_steps": counts.env_steps,
        "updates": counts.updates,
        "weight_syncs": counts.weight_syncs,
        **asdict(figures.usage),
        "time": times.to_json(),
        "staleness": counts.staleness.to_json(),
        "dropped": {cause: n for fate, n in counts.fates.items() if (cause := cause_of(fate)) is not None},
        "trained": counts.fates.get(TRAINED, 0),
        "infrastructure_failures": counts.infrastructure_failures,
        "unparsable": counts.unparsable,
        "reading_rules": dict(counts.reading_rules),
        "prefix_cached": counts.prefix_cached,
        "pooled": counts.pooled,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
