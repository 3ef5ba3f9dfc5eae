"""Environment variables that vLLM and torch read when they are imported; set before either is. No heavy imports.

Defaults give way to variables that are set; `rollout.environment` (`extra`) replaces even those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dart.core.capacity import devices

ALWAYS = {
    "HF_HUB_OFFLINE": "1",  # Models are folders; nothing is looked up.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
ON_CPU = {
    "OMP_NUM_THREADS": "1",  # With more, small models on few cores were 5 to 100 times slower.
    "TORCHDYNAMO_DISABLE": "1",  # Otherwise the first request with log-probs compiles for seconds.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine process does the work itself instead of starting another.
    "VLLM_PLUGINS": "",
}
ON_GPU = {
    # vLLM's default is a fork, here of a process with gRPC's and the event loop's threads and connections.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def apply(extra: Mapping[str, str] | None = None) -> None:
    """Set what is not set yet, and always `extra` from the config. Call before torch or vllm is imported."""
    os.environ.update(extra or {})
    for name, value in (ALWAYS | (ON_CPU if devices.on_cpu() else ON_GPU)).items():
        os.environ.setdefault(name, value)
