"""What a GPU does with the trainer's work: `python -m benchmarks.gpu`, on one GPU, in at most ten minutes.

Random weights of UI-TARS-1.5-7B's width and prompts of five full-HD screenshots; nothing is downloaded, and vLLM is not
needed. The trainer's own forward pass, batches and head are measured, at a few layers, and extrapolated to the whole
depth. Writes results/gpu/CARD.json after each measurement, so that a run that is cut off keeps what it has; a later run
replaces only what it measures. `--only` names some; `--unfused` measures without `trainer.fused_kernels`, and writes
NAME_unfused; `--device cpu --tiny` shows that everything runs and measures nothing.

Three more need vLLM: `benchmarks.gpu.replica` and `benchmarks.gpu.shared` for one GPU, `benchmarks.gpu.pair` for more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu import passes, update
from benchmarks.gpu.bench import Bench, Result
from benchmarks.gpu.record import RESULTS, file_of, record
from benchmarks.gpu.subject import full, tiny
from dart.errors import first_line

MEASUREMENTS: dict[str, Callable[[Bench], Result]] = {
    "matmul": passes.matmul,
    "update": update.update,
    "one_row": passes.one_row,
    "trainer_memory": passes.trainer_memory,
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
    card = _card(bench)
    path = file_of(options.output, "", f"{card['name']}{'-tiny' if options.tiny else ''}")
    what = "real: the trainer's passes over random weights" + (", tiny" if options.tiny else "")
    about = {"name": "gpu", "real_or_simulated": what, "card": card}
    for name in MEASUREMENTS:
        if name not in options.only:
            continue
        if time.monotonic() - began > options.seconds:
            print(f"{name}: left out, because {options.seconds:g} s are over")
            continue
        result = _measured(bench, name)
        record(path, about, f"{name}_unfused" if options.unfused else name, result)
    print(path)


def _measured(bench: Bench, name: str) -> Result:
    """Its result with `took_seconds`; what a card cannot hold or do is a result, too."""
    began = time.monotonic()
    try:
        result = MEASUREMENTS[name](bench)
    except (torch.OutOfMemoryError, RuntimeError, AssertionError) as error:
        result = {"failed": f"{type(error).__name__}: {first_line(error)}"}
    bench.clear()
    result["took_seconds"] = round(time.monotonic() - began, 2)
    print(json.dumps({name: result}), flush=True)
    return result


def _card(bench: Bench) -> dict[str, object]:
    if not bench.on_gpu:
        return {"name": "cpu"}
    found = torch.cuda.get_device_properties(bench.device)
    return {"name": found.name, "bytes": found.total_memory, "processors": found.multi_processor_count}


if __name__ == "__main__":
    main()
