"""TransferQueue, the queue of verl, as a contender of `benchmarks.transport`.

It is used through its key-value interface, as in verl: a producer puts a batch of trajectories (a row each) with
`kv_batch_put`, the metadata that this returns goes to the consumer, which gets the rows with `kv_batch_get_by_meta` and
clears them. Storage is the default, SimpleStorage with two storage units: in memory, nothing on disk. It keeps track of
what was produced and consumed; it judges nothing. Producer and consumer are Ray actors, because TransferQueue needs
Ray. Run by the peers' interpreter.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from typing import Any

os.environ["TQ_LOGGING_LEVEL"] = "ERROR"

# Imported before transfer_queue, which imports Ray: this sets the variables that Ray then reads.
from benchmarks.peers import shared, with_ray  # isort: skip
import ray
import torch
import transfer_queue
from tensordict import TensorDict

CORES = 8
"""For Ray's scheduler: each actor requests one core, whatever it uses."""
PARTITION, FIELD = "train", "screenshots"
LEAST_UNDER_WAY = 2
"""Batches in flight: one is put while another is taken."""


class Producer:
    def __init__(self, batch: int) -> None:
        transfer_queue.init()
        ring = shared.trajectories()
        rows = torch.frombuffer(bytearray(b"".join(itertools.chain(*ring))), dtype=torch.uint8)
        rows = rows.reshape(len(ring), shared.STEPS, -1)
        self._batches = deque(TensorDict({FIELD: some}, batch_size=len(some)) for some in rows.split(batch))

    def put(self, number: int) -> tuple[Any, float]:
        """(the batch's metadata, when it began)."""
        began = time.perf_counter()
        self._batches.rotate()
        fields = self._batches[0]
        keys = [f"{number}-{place}" for place in range(fields.batch_size[0])]
        return transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields), began


class Consumer:
    def __init__(self) -> None:
        transfer_queue.init()

    def take(self, put: tuple[Any, float]) -> tuple[int, float]:
        """(trajectories, when their producer began)."""
        meta, began = put
        trajectories = transfer_queue.kv_batch_get_by_meta(meta)[FIELD]
        for trajectory in trajectories:
            for screenshot in trajectory:
                shared.touch(screenshot.numpy())
        transfer_queue.kv_clear(keys=meta.keys, partition_id=PARTITION)
        return len(trajectories), began


def whole(variant: str, warm: float, seconds: float) -> None:
    """Keeps as many trajectories in flight as the other contenders, and at least two batches."""
    batch = int(variant.split(maxsplit=1)[0])
    under_way_at_once = max(LEAST_UNDER_WAY, shared.AHEAD // batch)
    with with_ray.cluster(CORES):
        transfer_queue.init()
        remote = ray.remote(num_cpus=0)
        producer, consumer = remote(Producer).remote(batch), remote(Consumer).remote()
        ray.get([actor.__ray_ready__.remote() for actor in (producer, consumer)])
        numbers = itertools.count()

        def begin() -> Any:
            return consumer.take.remote(producer.put.remote(next(numbers)))

        tally = shared.Tally(warm, seconds)
        under_way = deque(begin() for _ in range(under_way_at_once))
        while not tally.over:
            count, began = ray.get(under_way.popleft())
            # All processes share the machine's clock.
            tally.ended(began, steps=count * shared.STEPS, trajectories=count)
            under_way.append(begin())
        tally.report()
        ray.get(list(under_way))
        transfer_queue.close()


if __name__ == "__main__":
    shared.run({"whole": whole})
