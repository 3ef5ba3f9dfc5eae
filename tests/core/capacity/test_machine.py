"""The memory that a process may use, from files as Linux has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dart.core.capacity.machine import memory_bytes

WHOLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, WHOLE),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "500", "memory.max": "900"}, 500),
        ("0::/job/step\n", {"job/step/memory.max": "300", "job/memory.max": "500"}, 300),
        ("0::/\n", {"memory.max": "700\n"}, 700),
        ("0::/job\n", {"job/memory.max": "max"}, WHOLE),
        ("5:cpu,memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, WHOLE),
        ("5:memory:/a/b\n0::/\n", {"memory/a/b/memory.limit_in_bytes": "800"}, 800),
        # A container that is told the host's path finds its own group at the top.
        ("5:memory:/docker/abc\n", {"memory/memory.limit_in_bytes": "600"}, 600),
        ("5:cpu:/job\n", {"memory/job/memory.limit_in_bytes": "600", "job/memory.max": "500"}, WHOLE),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, groups: str, limits: dict[str, str], expected: int) -> None:
    files = {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": limit for name, limit in limits.items()}
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_bytes(tmp_path) == expected


def test_without_such_files_it_is_the_machines(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == WHOLE
