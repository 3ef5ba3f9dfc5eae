"""What only two or more GPUs with vLLM can show: `python -m benchmarks.gpu.pair`. Not run yet.

Real training runs of the tiny policy on the example's coloured boxes (examples/python/own_world.py, which needs no
browser) with `sync.transport: nccl` and bfloat16, one after another, and what is expected of each:

- *transfer, TP 1* (two GPUs) and *transfer, TP 2* (three): every update's weights reach the replica over NCCL; none
  fails. The replica's log-probabilities of its own samples, screenshots and all, agree with the trainer's forward pass
  of the same weights (`same_version_difference`, below `MOST_DIFFERENCE` on average).
- *two ranks* (three GPUs): the same with a trainer whose weights are sharded over two GPUs.
- *killed replica* (three GPUs): after two updates one of two replicas gets SIGKILL, within a transfer if one is seen.
  The run must end by itself, with the other replica never left out, and the killed one serving newer weights than it
  had.

Set-ups for which there are too few GPUs are left out, and said to be. Writes results/gpu/pair-CARD.json after each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.record import RESULTS, file_of, name_of, record
from benchmarks.gpu.trial import CONFIG, Trial, overrides, tried
from benchmarks.gpu.trial import findings as trial_findings
from dart.config import Config, load
from dart.processes.gpus import gpus_here

UPDATES = 8


@dataclass(frozen=True, slots=True)
class SetUp:
    name: str
    replicas: int
    tensor_parallel: int
    kill: bool = False
    ranks: int = 1

    @property
    def gpus(self) -> int:
        """Those of the trainer's ranks and of the replicas."""
        return self.ranks + self.replicas * self.tensor_parallel

    def overrides(self) -> list[str]:
        return [
            *overrides(UPDATES, episodes=0), "sync.transport=nccl", "sync.max_unavailable=1",
            f"trainer.ranks={self.ranks}", f"rollout.replicas={self.replicas}",
            f"rollout.tensor_parallel={self.tensor_parallel}",
        ]  # fmt: skip


SET_UPS = (
    SetUp("transfer, TP 1", replicas=1, tensor_parallel=1),
    SetUp("transfer, TP 2", replicas=1, tensor_parallel=2),
    SetUp("two ranks", replicas=1, tensor_parallel=1, ranks=2),
    SetUp("killed replica", replicas=2, tensor_parallel=1, kill=True),
)


def config_of(set_up: SetUp) -> Config:
    return load(CONFIG, set_up.overrides())


def findings(set_up: SetUp, trial: Trial) -> list[str]:
    """What is not as it should be; empty if everything is."""
    wrong = trial_findings(trial, updates=UPDATES)
    if set_up.kill:
        if trial.killed is None:
            wrong.append("no replica was killed")
        else:
            name, before = trial.killed
            later = [event for event in trial.events[before:] if event["event"] == "sync"]
            if not any(event["replica"] == name for event in later):
                wrong.append(f"{name}, which was killed, got no weights afterwards")
            if not any(event["replica"] != name for event in later):
                wrong.append(f"no other replica got weights after {name} was killed")
    return wrong


def run(set_up: SetUp) -> dict[str, object]:
    return tried(set_up.overrides(), lambda trial: findings(set_up, trial), kill=set_up.kill)


def possible(gpus: int) -> Iterator[SetUp]:
    """Those that this many GPUs are enough for; the others are named."""
    for set_up in SET_UPS:
        if set_up.gpus <= gpus:
            yield set_up
        else:
            print(f"{set_up.name}: left out, because it needs {set_up.gpus} GPUs, and there are {gpus}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    gpus = gpus_here()
    if len(gpus) < 2:
        sys.exit(f"this machine has {len(gpus)} GPUs, and a transfer over NCCL needs two")
    cards = name_of(gpus)
    path = file_of(options.output, "pair", cards)
    what = "real: training runs with weights over NCCL"
    for set_up in possible(len(gpus)):
        result = run(set_up)
        print(json.dumps({set_up.name: result}), flush=True)
        record(path, {"name": "gpu_pair", "real_or_simulated": what, "cards": cards}, set_up.name, result)
    print(path)


if __name__ == "__main__":
    main()
