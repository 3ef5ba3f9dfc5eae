"""What a GPU does with the trainer's work: `python -m benchmarks.gpu`, on one GPU, in at most ten minutes.

Random weights of UI-TARS-1.5-7B's width and prompts of five full-HD screenshots; nothing is downloaded, and vLLM is not
needed. The trainer's own forward pass, batches and head are measured, at a few layers, and extrapolated to the whole
depth. Writes results/gpu/CARD.json after each measurement, so that a run that is cut off keeps what it has; a later run
replaces only what it measures. `--only` names some; `--unfused` measures without `trainer.fused_kernels`, and writes
NAME_unfused; `--device cpu --tiny` shows that everything runs and measures nothing.

`python -m benchmarks.gpu.pair` is for two or more GPUs and vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu import passes, pieces, update
from benchmarks.gpu.bench import Bench, Result
from benchmarks.gpu.subject import full, tiny
from dart.coordinator.summary import machine, software, write_json

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
MEASUREMENTS: dict[str, Callable[[Bench], Result]] = {
    "matmul": pieces.matmul,
    "update": update.update,
    "one_row": passes.one_row,
    "trainer_memory": passes.trainer_memory,
    "attention": passes.attention,
    "rows": passes.rows,
    "fully_shard": pieces.sharded,
    "optimiser": pieces.optimiser,
    "copies": pieces.copies,
    "head_chunks": passes.head_chunks,
}
"""In this order: what matters most comes first, and the peak before what is compared with it."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest model and batches")
    parser.add_argument("--only", nargs="+", choices=tuple(MEASUREMENTS), default=tuple(MEASUREMENTS))
    parser.add_argument("--unfused", action="store_true", help="with trainer.fused_kernels: false")
    parser.add_argument("--seconds", type=float, default=560.0, help="begin no measurement after this time")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this machine has no GPU that torch can use: --device cpu --tiny shows only that everything runs")
    if options.device == "cpu" and not options.tiny:
        sys.exit("a model of the full width is for GPUs: add --tiny")
    scale = tiny() if options.tiny else full()
    bench = Bench(torch.device(options.device), scale, 0 if options.tiny else 3, fused=not options.unfused)
    began = time.monotonic()
    path = _path(bench, options.output, tiny=options.tiny)
    for name in MEASUREMENTS:
        if name not in options.only:
            continue
        if time.monotonic() - began > options.seconds:
            print(f"{name}: left out, because {options.seconds:g} s are over")
            continue
        result = _measured(bench, name)
        _write(path, bench, f"{name}_unfused" if options.unfused else name, result, tiny=options.tiny)
    print(path)


def _measured(bench: Bench, name: str) -> Result:
    """Its result with `took_seconds`; what a card cannot hold or do is a result, too."""
    began = time.monotonic()
    try:
        result = MEASUREMENTS[name](bench)
    except (torch.OutOfMemoryError, RuntimeError, AssertionError) as error:
        result = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    bench.clear()
    result["took_seconds"] = round(time.monotonic() - began, 2)
    print(json.dumps({name: result}), flush=True)
    return result


def _path(bench: Bench, folder: Path, *, tiny: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name(bench.device) if bench.on_gpu else "cpu"
    return folder / f"{card.replace(' ', '-')}{'-tiny' if tiny else ''}.json"


def _write(path: Path, bench: Bench, name: str, result: Result, *, tiny: bool) -> None:
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    card: dict[str, object] = {"name": "cpu"}
    if bench.on_gpu:
        found = torch.cuda.get_device_properties(bench.device)
        card = {"name": found.name, "bytes": found.total_memory, "processors": found.multi_processor_count}
    write_json(
        path,
        {
            "name": "gpu",
            "real_or_simulated": "real: the trainer's passes over random weights" + (", tiny" if tiny else ""),
            "card": card,
            "machine": machine(),
            "versions": software() | {"torch": torch.__version__, "transformers": transformers.__version__},
            "date": time.strftime("%Y-%m-%d"),
            "results": known | {name: result},
        },
    )


if __name__ == "__main__":
    main()
