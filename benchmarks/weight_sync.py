"""What new weights cost a replica on CPUs: `python -m benchmarks.weight_sync`.

Real: the trainer's sender and a replica's receiver over gloo, in two processes of this machine; everything received is
staged, then copied over the tensors that stand for the model's, as in vLLM's worker process. Made up: the weights, 64
tensors. There is no coordinator and no vLLM: a replica receives while it serves, and pauses for the requests in flight
and for loading.

The link is a plain broadcast of the same bytes in the same group, before each transfer; a transfer is compared with the
one before it. Both ends share this machine's cores, so the figures say little about a network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from multiprocessing.queues import Queue
from pathlib import Path

import torch

from benchmarks.results import write
from dart.v1 import weights_pb2 as wpb
from dart.workers.weights.gloo import GlooSender, Group, receive
from dart.workers.weights.transfer import spec_of

RESULT = Path(__file__).parent / "results" / "weight_sync.json"
TENSORS, COLUMNS = 64, 256
TIMEOUT_SECONDS = 120.0
Times = tuple[float, float, float]
"""Seconds of the link, of the transfer, and of loading what it brought."""


def weights(size: int, fill: float) -> dict[str, torch.Tensor]:
    """`size` bytes of bfloat16: an embedding of a quarter, and equal matrices."""
    rows = size // 2 // COLUMNS
    each = rows * 3 // 4 // (TENSORS - 1)
    counts = {"embedding": rows - each * (TENSORS - 1), **{f"layer-{n}": each for n in range(TENSORS - 1)}}
    return {name: torch.full((count, COLUMNS), fill, dtype=torch.bfloat16) for name, count in counts.items()}


def send(size: int, repeats: int, port: int) -> None:
    """The trainer's end."""
    torch.set_num_threads(1)
    made, plain = weights(size, 1.0), torch.ones(size, dtype=torch.uint8)
    link = Group("link", "127.0.0.1", port, rank=0, world_size=2, timeout_seconds=TIMEOUT_SECONDS)
    sender = GlooSender(TIMEOUT_SECONDS)
    group = wpb.TransferGroup(group_id="weights", transport="gloo", host="127.0.0.1", port=port + 1, world_size=2)
    sender.open(group)
    for _ in range(repeats):
        link.barrier()
        link.broadcast(plain)
        link.barrier()
        sender.send(made.items())
    sender.close()
    link.close()


def take(size: int, repeats: int, port: int, found: Queue[list[Times]]) -> None:
    """The replica's end."""
    torch.set_num_threads(1)
    model, plain = weights(size, 0.0), torch.empty(size, dtype=torch.uint8)
    link = Group("link", "127.0.0.1", port, rank=1, world_size=2, timeout_seconds=TIMEOUT_SECONDS)
    group = Group("weights", "127.0.0.1", port + 1, rank=1, world_size=2, timeout_seconds=TIMEOUT_SECONDS)
    specs, times = [spec_of(*one) for one in model.items()], []
    for _ in range(repeats):
        link.barrier()
        moments = [time.perf_counter()]
        link.broadcast(plain)
        moments.append(time.perf_counter())
        link.barrier()
        began = time.perf_counter()
        staged = list(receive(group, specs))
        moments.append(time.perf_counter())
        for name, tensor in staged:
            model[name].copy_(tensor)
        loaded = time.perf_counter()
        assert all(bool((tensor == 1.0).all()) for tensor in model.values()), "other weights arrived"
        times.append((moments[1] - moments[0], moments[2] - began, loaded - moments[2]))
        for tensor in model.values():
            tensor.zero_()
    found.put(times)
    group.close()
    link.close()


def measure(size: int, repeats: int) -> dict[str, float]:
    """Medians over `repeats` transfers; the first of each size, which allocates the buffers, is not counted."""
    start = multiprocessing.get_context("spawn")
    found: Queue[list[Times]] = start.Queue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    ends = [
        start.Process(target=send, args=(size, repeats + 1, port)),
        start.Process(target=take, args=(size, repeats + 1, port, found)),
    ]
    for end in ends:
        end.start()
    times = found.get(timeout=2 * TIMEOUT_SECONDS)[1:]
    for end in ends:
        end.join()
    link, transfer, load = (round(statistics.median(one), 4) for one in zip(*times, strict=True))
    moved, loaded = (statistics.median(one[part] / one[0] for one in times) for part in (1, 2))
    return {
        "bytes": size, "repeats": repeats, "link_seconds": link, "transfer_seconds": transfer, "load_seconds": load,
        "transfer_over_link": round(moved, 2), "load_over_link": round(loaded, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[12.8, 128.0, 1000.0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for megabytes in options.megabytes:
        rows.append(measure(int(megabytes * 1e6), options.repeats))
        print(rows[-1], flush=True)
    what = "real sender and receiver over gloo between two processes; made-up weights, no coordinator, no engine"
    write(options.out, "weight_sync", what, rows, versions={"torch": str(torch.__version__)})
    print(options.out)


if __name__ == "__main__":
    main()
