"""Moving screenshots and trajectories, compared with what others use for it: `python -m benchmarks.transport`.

Real: this project's coordinator with its store; Ray, TransferQueue (verl's queue), ZeroMQ and grpc.aio as installed
(`make peers`); separate processes at both ends, on one machine. Simulated: the data (random bytes; a trajectory is 30
screenshots of 300 KB), and environments, policy and trainer, which take no time.

steps   32 environments at once, each step with a fresh screenshot. Ours is the whole coordinator, with workers that see
        the run's directory, as they do on one machine: the env worker hashes a screenshot and writes it there, the
        roll-out worker reads it there, and only its digest goes over the wire; trajectories count when they are durable
        in SQLite. "ours over the wire" is the same with workers that do not see the directory: every screenshot goes
        through the coordinator, which hashes it once more and writes it. The peers move it once, from the environment
        to the process that asked for it, which keeps it until its trajectory ends; they store, hash and check nothing.
        "ray with policy" moves it on to a policy as well.
whole   Trajectories handed over as one piece. Ours is the coordinator's batches for the trainer: 8 trajectories, cut
        into pages, answered when every screenshot, which env workers had stored before, has been read; one batch at a
        time. "ours over the wire" sends them from the coordinator's memory. Nothing is hashed. The peers have 8
        trajectories in flight. "ours with history": prompts show five screenshots, which is the default; rates count
        the 30 that differ.
small   64 bytes instead of a screenshot, nothing stored: round trips. Ours makes two per step. Its times are those of a
        step; Ray's are those of a hundred calls, which are submitted and collected together.

Where a peer can be used in several ways, each is tried for a moment, and the fastest is measured. One contender runs at
a time. Memory is the highest sum over all of its processes, producers and consumers included: `rss` counts shared pages
in each process, `pss` once. Processor time is that of its processes during the measurement; it says more than the rates
if the machine is busy with other things. A peer that is not installed is reported as such. Writes
results/transport.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import shared
from benchmarks.peers.processes import ContenderFailed, run
from benchmarks.results import write

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "transport.json"
PEERS = ROOT / "build" / "peers" / "bin" / "python"
PACKAGES = ("ray", "TransferQueue", "pyzmq", "torch", "tensordict", "numpy")
OURS = "ours"
START_SECONDS = 240.0
"""The time that a contender may take to start and to end."""
ATTEMPTS = 3
"""Ray gives its own processes half a minute to start, and gives up on a busy machine."""
TABLE_WIDTH = 140
MB_PER_STEP = shared.SCREENSHOT_BYTES / 1e6


@dataclass(frozen=True, slots=True)
class Contender:
    part: str
    name: str
    module: str
    does: str
    entry: str = ""
    """The module's name for the part, if it differs."""
    package: str = ""
    """The package that the peers' environment needs; empty: the project's own interpreter runs it."""
    variants: tuple[str, ...] = ("",)


CONTENDERS = (
    Contender("steps", OURS, "ours", "hashed, stored by the environment, read by the replica, judged, fed"),
    Contender("steps", "ours over the wire", "ours", "two hops, hashed, stored, judged, fed", "steps_over_the_wire"),
    Contender(
        "steps", "ray", "with_ray", "one hop, nothing stored", package="ray",
        variants=("1 process, bytes", "2 processes, bytes", "2 processes, arrays", "2 processes, bytes inlined",
                  "32 processes, bytes"),
    ),
    Contender(
        "steps", "ray with policy", "with_ray", "two hops, nothing stored", "steps_with_policy", "ray",
        ("2 processes, bytes", "2 processes, arrays", "2 processes, bytes inlined"),
    ),
    Contender("steps", "grpc", "raw_grpc", "one hop, nothing stored: the ceiling of ours"),
    Contender(
        "steps", "zeromq", "with_zeromq", "one hop, nothing stored", package="pyzmq",
        variants=("tcp, 1 process", "tcp, 2 processes", "ipc, 1 process", "ipc, 2 processes"),
    ),
    Contender("whole", OURS, "ours", "a batch at a time, read from the store, answered"),
    Contender("whole", "ours over the wire", "ours", "a batch at a time, answered", "whole_over_the_wire"),
    Contender("whole", "ours with history", "ours", "the same, five screenshots a step", "whole_with_history"),
    Contender(
        "whole", "ray", "with_ray", "asked for one by one", package="ray",
        variants=("1 process, bytes", "1 process, arrays", "2 processes, bytes", "2 processes, arrays"),
    ),
    Contender(
        "whole", "transfer_queue", "with_transfer_queue", "put, got, cleared; account is kept", package="TransferQueue",
        variants=("1 per batch", "4 per batch", "8 per batch"),
    ),
    Contender(
        "whole", "zeromq", "with_zeromq", "pushed, not answered", package="pyzmq", variants=("tcp", "ipc")
    ),
    Contender("small", OURS, "ours", "two round trips a step, nothing stored"),
    Contender("small", "ray", "with_ray", "calls of an actor", package="ray", variants=("1 process", "2 processes")),
    Contender("small", "grpc", "raw_grpc", "echo: the ceiling of ours"),
    Contender(
        "small", "zeromq", "with_zeromq", "echo", package="pyzmq",
        variants=("tcp, 64 at once", "tcp, 1000 at once", "ipc, 64 at once", "ipc, 1000 at once"),
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each contender's measurement")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="a contender, a part, or PART/CONTENDER; may be repeated; nothing is written without --out",
    )
    parser.add_argument(
        "--first", action="store_true", help="use the first variant of each peer instead of the fastest"
    )
    parser.add_argument("--out", type=Path, help=f"where the result goes; without --only it is {RESULT.name}")
    options = parser.parse_args()
    chosen = [
        one
        for one in CONTENDERS
        if not options.only or {one.name, one.part, f"{one.part}/{one.name}"} & set(options.only)
    ]
    if not chosen:
        parser.error(
            f"--only {' '.join(options.only)}: known are {', '.join(f'{c.part}/{c.name}' for c in CONTENDERS)}"
        )
    installed = _installed()
    results: dict[str, dict[str, Any]] = {}
    for contender in chosen:
        results.setdefault(contender.part, {})[contender.name] = row = measure(contender, installed, options)
        print(json.dumps({"part": contender.part, "contender": contender.name} | row), flush=True)
    for rows in results.values():
        compare(rows)
    show(results)
    if out := options.out or (None if options.only else RESULT):
        settings = {
            "seconds": options.seconds,
            "steps_per_trajectory": shared.STEPS,
            "screenshot_bytes": shared.SCREENSHOT_BYTES,
            "environments": shared.ENVIRONMENTS,
            "trajectories_under_way": shared.AHEAD,
        }
        what = "real transports and coordinator; random bytes as screenshots, and workers that take no time"
        write(out, "transport", what, {"settings": settings, **results}, versions=installed)
        print(out)


def _installed() -> dict[str, str]:
    """The peers' installed packages and their versions."""
    code = (
        "import json, sys; from importlib import metadata\n"
        "found = {d.metadata['Name']: d.version for d in metadata.distributions()}\n"
        "print(json.dumps({name: found[name] for name in sys.argv[1:] if name in found}))"
    )
    if not PEERS.exists():
        return {}
    made = subprocess.run([PEERS, "-c", code, *PACKAGES], capture_output=True, text=True, timeout=60, check=False)
    found: dict[str, str] = json.loads(made.stdout or "{}")
    return found


def measure(contender: Contender, installed: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """The contender's results with its fastest variant, or `error`."""
    if contender.package and contender.package not in installed:
        return {"error": f"not installed: {contender.package} is not in build/peers; run `make peers`"}
    trials: dict[str, Any] = {}
    variants = contender.variants[:1] if options.first else contender.variants
    if len(variants) > 1:
        for variant in variants:
            try:
                tried = _figures(contender, _run(contender, variant, max(1.0, options.seconds / 4)))
                trials[variant] = tried[_rate(contender.part)]
            except ContenderFailed as error:
                trials[variant] = f"failed: {error}"
        working = {variant: rate for variant, rate in trials.items() if isinstance(rate, float)}
        if not working:
            return {"error": "every variant failed", "trials": trials}
        variants = (max(working, key=lambda variant: working[variant]),)
    try:
        figures = _figures(contender, _run(contender, variants[0], options.seconds))
    except ContenderFailed as error:
        return {"error": str(error), "trials": trials}
    return {"does": contender.does, "variant": variants[0], **figures, "trials": trials}


def _run(contender: Contender, variant: str, seconds: float) -> dict[str, Any]:
    warm = min(2.0, max(0.5, seconds / 4))
    command = [
        str(PEERS) if contender.package else sys.executable, "-m", f"benchmarks.peers.{contender.module}",
        contender.entry or contender.part, "--variant", variant, "--warm", str(warm), "--seconds", str(seconds),
    ]  # fmt: skip
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return run(command, ROOT, START_SECONDS + warm + 2 * seconds)
        except ContenderFailed as error:
            if attempt == ATTEMPTS:
                raise
            print(f"{contender.name} ({variant}) is retried: {error}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns or raises")


def _rate(part: str) -> str:
    return "round_trips_per_second" if part == "small" else "trajectories_per_second"


def _figures(contender: Contender, reported: dict[str, Any]) -> dict[str, Any]:
    """Raises ContenderFailed if nothing ended within the measurement."""
    seconds, steps, trajectories = reported.pop("seconds"), reported.pop("steps"), reported.pop("trajectories")
    processor = reported.pop("processor_seconds")
    if not steps or not seconds:
        raise ContenderFailed("too little ended within the measurement: give it more --seconds")
    if contender.part == "small":
        trips = steps * reported.pop("round_trips_per_step", 1)
        rates = {
            "round_trips_per_second": round(trips / seconds, 1),
            "processor_us_per_round_trip": 1e6 * processor / trips,
        }
    else:
        rates = {
            "trajectories_per_second": round(trajectories / seconds, 2),
            "steps_per_second": round(steps / seconds, 1),
            "mb_per_second": round(steps * MB_PER_STEP / seconds, 1),
            "processor_ms_per_step": 1e3 * processor / steps,
        }
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in (rates | reported).items()}


COMPARED = (
    "trajectories_per_second", "round_trips_per_second", "peak_rss_mb", "peak_pss_mb", "processor_ms_per_step",
    "processor_us_per_round_trip",
)  # fmt: skip


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Each contender's results as multiples of ours."""
    ours = rows.get(OURS, {})
    for row in rows.values():
        over = {name: round(row[name] / ours[name], 3) for name in COMPARED if row.get(name) and ours.get(name)}
        if over:
            row["over_ours"] = over


def show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    for part, rows in results.items():
        rate = _rate(part)
        processor = "processor_us_per_round_trip" if part == "small" else "processor_ms_per_step"
        columns = {
            rate: rate.partition("_per_")[0].replace("_", " ") + "/s",
            "mb_per_second": "MB/s",
            "p50_ms": "p50 ms",
            "p99_ms": "p99 ms",
            processor: "CPU µs/trip" if part == "small" else "CPU ms/step",
            "peak_rss_mb": "RSS MB",
            "peak_pss_mb": "PSS MB",
        }
        ratios = {rate: "rate ÷ ours", processor: "CPU ÷ ours", "peak_rss_mb": "RSS ÷ ours"}
        table = Table("contender", *columns.values(), *ratios.values(), title=part)
        for name, row in rows.items():
            if "error" in row:
                continue
            over = row.get("over_ours", {})
            label = f"{name} ({row['variant']})" if row["variant"] else name
            table.add_row(label, *(_shown(row.get(one)) for one in columns), *(_shown(over.get(one)) for one in ratios))
        console.print(table)
        for name, row in rows.items():
            if "error" in row:
                console.print(f"{part}/{name}: {row['error']}", markup=False)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    main()
