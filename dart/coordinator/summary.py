"""What a finished run leaves for people: summary.json, with the machine and the software that it ran on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import dart
from dart.core.json_text import to_json


def machine() -> dict[str, int | float | str]:
    """Cores that this process may use, memory, operating system, processor."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages * page / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
    }


def software() -> dict[str, str]:
    """Versions of what the coordinator itself runs on; workers report theirs in Ready."""
    names = ("grpcio", "protobuf", "SQLAlchemy", "uvloop")
    return {"dart": dart.__version__, "python": platform.python_version()} | {n: metadata.version(n) for n in names}


def write_json(path: Path, value: Mapping[str, object]) -> Path:
    """The file, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
