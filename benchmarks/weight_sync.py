"""What a weight update costs: `python -m benchmarks.weight_sync`.

Real: the coordinator's sync manager and its plan, the roll-out pool, sessions, server and database; gRPC to worker
processes; the transfer from the trainer's process (its staged snapshots and senders) into each replica's (the receiver,
staged as in vLLM's worker process, then copied over the tensors that represent the model's). Replicas serve requests
all the time, and there are more requests than slots.
Simulated: the engine. There is no vLLM: a request sleeps, so that it takes no processor time; the gate, the modes keep,
drain and abort and the order of an update are those of the roll-out worker (`benchmarks/syncing/engine.py`). So the
figures do not include vLLM's own 20 ms of waiting in a pause, its cache resets, and loading weights into layers. The
trainer's weights are random tensors, and an update makes a version at once.

A pause is the time that a replica is out of the rotation, as the coordinator sees it. It consists of waiting (for the
requests in flight), transfer (loading; over NCCL also joining the group and receiving, which over gloo happen while the
replica serves: "ahead") and the rest (messages; with schedule all, receiving and the wait for the other replicas). The
link is a plain torch.distributed send of the same bytes between the same two processes, before and after each cell;
figures over the link are multiples of its time. The first update of a cell, in which groups are joined, is reported
separately. Others' throughput: what the other replicas served during a pause, relative to the same span of time before
it (`benchmarks/syncing/watch.py`); "serving": the same for all replicas while one receives.

The smallest size is measured with all schedules and modes, the others only with drain. `relay` compares orders of
transfers (`benchmarks/syncing/relay.py`); the project itself has no relay. On loopback a transfer costs processor time
at both ends, so simultaneous transfers share the cores: their figures say little about a network.

Everything runs on this machine. --transport nccl needs a GPU for the trainer and one for each replica.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # no child uses gRPC after a fork, so it need not warn each time

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.results import record
from benchmarks.syncing import cell, relay
from benchmarks.syncing.cell import CellError, How, Setting
from benchmarks.syncing.crew import Crew, CrewError
from benchmarks.syncing.plan import TENSORS, tensor_list
from dart.coordinator.summary import write_json

RESULT = Path(__file__).parent / "results" / "weight_sync.json"
TARGETS = {"pause_over_link_at_most": 1.3, "others_throughput_at_least": 0.98}
SCHEDULES = ("rolling", "all")
MODES = ("drain", "keep", "abort")
LOOK_SECONDS = 120.0
WIDTH = 140
"""The width of the widest table, in characters."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's own variable: puts large tensors in huge pages. The processes inherit it, and it affects the figures."""
_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9}

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=_sizes, default="12.8MB,128MB,1GB", help="size of all weights, e.g. 12.8MB,1GB")
    parser.add_argument("--replicas", type=_counts, default="1,2,4")
    parser.add_argument("--repeats", type=int, default=3, help="updates counted in each cell")
    parser.add_argument("--transport", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--slots", type=int, default=8, help="slots of a replica")
    parser.add_argument(
        "--request-seconds",
        type=float,
        default=0.2,
        help="average sleep of a request; each takes 0.5 to 1.5 times as long",
    )
    parser.add_argument(
        "--before-seconds", type=float, default=1.0, help="how long to measure the throughput before each update"
    )
    parser.add_argument("--relay", type=_counts, default="4,8", help="numbers of replicas; none: leave it out")
    parser.add_argument("--relay-size", type=_sizes, default="128MB")
    parser.add_argument("--only", choices=("sync", "relay"), help="run only this part")
    parser.add_argument("--quick", action="store_true", help="12.8 MB, two replicas, one repeat; seconds")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.replicas, options.repeats = _sizes("12.8MB"), [2], 1
        options.relay, options.relay_size, options.before_seconds = [3], _sizes("12.8MB"), 0.5
    if options.repeats < 1 or options.slots < 1 or options.request_seconds <= 0 or options.before_seconds <= 0:
        parser.error("--repeats and --slots are 1 or more, and seconds are more than 0")
    try:
        report = uvloop.run(_measure(options))
    except CrewError as error:
        parser.exit(1, f"weight_sync: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"weight_sync: stopped; {options.out} has the finished cells\n")
    _show(report["results"])
    print(options.out)
    if failed := [row for row in report["results"]["not_measured"] if row["failed"]]:
        parser.exit(1, f"weight_sync: {len(failed)} of the cells failed\n")


def settings(sizes: Sequence[int], replicas: Sequence[int]) -> Iterator[Setting]:
    """The cells, smallest first."""
    for place, size in enumerate(sorted(sizes)):
        for count in replicas:
            for schedule in SCHEDULES:
                for mode in MODES if place == 0 else MODES[:1]:
                    yield Setting(size, count, schedule, mode)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    crew = Crew()
    try:
        (first,) = await crew.members(1)
        there = await first.ask("look", LOOK_SECONDS)
        report = _report(options, there)
        results = report["results"]
        counts = _with_gpus(options, there) if options.transport == "nccl" else None
        how = How(options.repeats, options.slots, options.request_seconds, options.before_seconds, options.transport)
        console = Console(stderr=True)

        async def take(into: str, about: Row, needed: float, replicas: int, measuring: Awaitable[Row]) -> None:
            """Measure one row and write it at once, because the run may be long."""
            console.print(" ".join(f"{key} {value}" for key, value in about.items()), style="dim")
            reason, failed = _why_not(needed, replicas, counts), False
            if reason is None:
                try:
                    results[into].append(await measuring)
                except CellError as error:
                    reason, failed = str(error), True
                    await crew.renew()
            else:
                measuring.close()  # type: ignore[attr-defined]
            if reason is not None:
                console.print(f"  {'failed' if failed else 'left out'}: {reason}", style="red")
                results["not_measured"].append(about | {"part": into, "failed": failed, "why": reason})
            report["load_average"]["after"] = _load_average()
            write_json(options.out, report)

        if options.only != "relay":
            for setting in settings(options.sizes, options.replicas):
                about = {"bytes": setting.bytes, "replicas": setting.replicas, "schedule": setting.schedule,
                         "mode": setting.mode}  # fmt: skip
                measuring = cell.measure(crew, setting, how)
                await take("sync", about, setting.memory, setting.replicas, measuring)
        if options.only != "sync":
            for size in options.relay_size:
                for count in options.relay:
                    measuring = relay.measure(crew, size, count, options.repeats, options.transport)
                    needed = cell.memory_needed(size, count, staged=count)
                    await take("relay", {"bytes": size, "replicas": count}, needed, count, measuring)
        return report
    finally:
        await crew.end()


def _report(options: argparse.Namespace, there: dict[str, Any]) -> dict[str, Any]:
    return record(
        "weight_sync",
        "real coordinator, gRPC, database and transfers between processes; "
        "replicas sleep in the place of vLLM, weights are random",
        {
            "targets": TARGETS,
            "settings": {
                "transport": options.transport,
                "tensors": TENSORS,
                "repeats": options.repeats,
                "slots": options.slots,
                "request_seconds": options.request_seconds,
                "clients_per_slot": cell.CLIENTS_PER_SLOT,
                "huge_pages": os.environ.get(HUGE_PAGES) == "1",
            },
            "sync": [],
            "relay": [],
            "not_measured": [],
        },
        versions={"torch": there["torch"]},
        load_average={"before": _load_average(), "after": _load_average()},
    )


def _with_gpus(options: argparse.Namespace, there: dict[str, Any]) -> int:
    """For how many replicas there are GPUs. Raises CrewError if NCCL cannot be measured here at all."""
    if there["gpus"] < 2:
        raise CrewError(
            f"--transport nccl needs two GPUs or more, one for the trainer and one for each replica; torch "
            f"{there['torch']} sees {there['gpus']} here: use --transport gloo, or a machine that has them"
        )
    return int(there["gpus"]) - 1


def _why_not(needed: float, replicas: int, replicas_with_gpu: int | None) -> str | None:
    """Why a cell cannot be measured here; None if it can."""
    if replicas_with_gpu is not None:
        return f"it needs {1 + replicas} GPUs" if replicas > replicas_with_gpu else None
    available = _available_memory()
    return f"it needs {needed / 1e9:.1f} GB and {available / 1e9:.1f} are available" if needed > available else None


def _available_memory() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return 1024 * float(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))


def _load_average() -> list[float]:
    return [round(value, 1) for value in os.getloadavg()]


def _show(results: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    if results["sync"]:
        table = Table(
            "MB", "replicas", "schedule", "mode", "link s", "MB/s", "pause s", "waiting", "transfer", "rest",
            "pause/link", "no waiting", "others", "ahead s", "serving", "all serve s",
            title="weight sync, medians: a pause and its parts; over the link, a plain send; the others' throughput",
        )  # fmt: skip
        for row in results["sync"]:
            table.add_row(*_cells(row))
        console.print(table)
    if results["relay"]:
        table = Table(
            "MB", "replicas", "in turn s", "at once s", "relay s", "in turn / relay", "one transfer s", "rounds",
            title="until all replicas hold the bytes, by the order of transfers",
        )  # fmt: skip
        for row in results["relay"]:
            seconds = row["seconds"]
            table.add_row(
                f"{row['bytes'] / 1e6:.1f}", str(row["replicas"]), f"{seconds['in_turn']:.3f}",
                f"{seconds['at_once']:.3f}", f"{seconds['relay']:.3f}", f"{row['in_turn_over_relay']:.2f}",
                f"{row['single_transfer_seconds']:.3f}", str(row["rounds"]),
            )  # fmt: skip
        console.print(table)
    for row in results["not_measured"]:
        console.print(f"{'failed' if row['failed'] else 'left out'}: {row}")


def _cells(row: Row) -> list[str]:
    seconds, over, others, ahead = row["seconds"], row["over_link"], row["others_throughput"], row["received_ahead"]
    return [
        f"{row['bytes'] / 1e6:.1f}", str(row["replicas"]), row["schedule"], row["mode"],
        f"{row['link']['seconds']:.3f}", f"{row['link']['megabytes_per_second']:.0f}",
        *(f"{seconds[part]:.3f}" for part in ("pause", "waiting", "transfer", "rest")),
        f"{over['pause']:.2f}", f"{over['pause_without_waiting']:.2f}",
        "" if others is None else f"{others:.1%}",
        *((f"{ahead['seconds']:.3f}", f"{ahead['throughput']:.1%}") if ahead else ("", "")),
        f"{row['all_serve_seconds']:.3f}",
    ]  # fmt: skip


def _sizes(text: str) -> list[int]:
    """Parse sizes in bytes, for example "12.8MB,1GB"."""
    made = []
    for each in text.split(","):
        found = re.fullmatch(r"\s*([\d.]+)\s*([kmg]b)\s*", each, re.IGNORECASE)
        try:
            size = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
            tensor_list(size)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{each!r} is not a size such as 12.8MB or 1GB ({error})") from None
        made.append(size)
    return made


def _counts(text: str) -> list[int]:
    """Parse numbers of replicas, for example "1,2,4"; "none" is an empty list."""
    try:
        made = [] if text == "none" else [int(each) for each in text.split(",")]
    except ValueError:
        made = [0]
    if any(count < 1 for count in made):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of replicas such as 1,2,4")
    return made


if __name__ == "__main__":
    main()
