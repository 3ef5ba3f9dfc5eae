"""`python -m benchmarks.scale`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import uvloop

import benchmarks.scale
from benchmarks.results import write
from benchmarks.scale.coordinator import WORKER, measure
from benchmarks.scale.workers import Answer, be_workers, open_files
from dart.malloc import keep_memory
from dart.processes.settings import collect_seldom

RESULT = Path(__file__).parents[1] / "results" / "scale.json"
SIZES = (100, 1_000, 3_000, 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=benchmarks.scale.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=int, action="append", help=f"may be repeated [default: {SIZES}]")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measurement at each size")
    parser.add_argument("--prompt-tokens", type=int, default=15_000, help="of five full-HD screenshots, or fewer")
    parser.add_argument("--unpacked", action="store_true", help="token ids as replicas before November 2026 sent them")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers-of", help=argparse.SUPPRESS)
    parser.add_argument("--envs", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--policies", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    collect_seldom()
    keep_memory()
    answer = Answer(options.prompt_tokens, not options.unpacked)
    if options.workers_of:
        uvloop.run(be_workers(options.workers_of, options.envs, options.policies, answer))
    elif options.alone:
        open_files()
        print(json.dumps(uvloop.run(measure(options.alone, options.seconds, answer))))
    else:
        compare(options.environments or SIZES, options.seconds, answer, options.out)


def compare(sizes: Sequence[int], seconds: float, answer: Answer, out: Path) -> None:
    rows = []
    for environments in sizes:
        # A process for each: memory that one size has used would count for the next.
        words = [*WORKER, "--alone", str(environments), "--seconds", str(seconds), *answer.words]
        done = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, check=True,
            env=os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "false"},  # as dart.cli sets it
        )  # fmt: skip
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    write(
        out,
        "scale",
        "real coordinator with SQLite and gRPC connections; environments and replicas sleep, "
        "screenshots are small files of random bytes, a batch counts as trained at once",
        {"prompt_tokens": answer.prompt_tokens, "packed": answer.packed, "sizes": rows},
    )
    print(out)


if __name__ == "__main__":
    main()
