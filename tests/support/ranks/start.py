"""Runs a script once for each rank of a process group, and waits for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dart.wire.channel import free_port

SUPPORT = Path(__file__).parents[1]


def run_ranks(script: Path, arguments: list[str], ranks: int = 2) -> None:
    """Fails with the ends of what they said unless each of them exits with 0."""
    port = free_port()
    common = {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments], stderr=subprocess.PIPE, text=True,
            env=os.environ | common | {"RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": str(ranks)},
        )
        for n in range(ranks)
    ]  # fmt: skip
    told = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, "\n----\n".join(one[-4000:] for one in told)
