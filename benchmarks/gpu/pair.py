"""What only two or more GPUs with vLLM can show: `python -m benchmarks.gpu.pair`. Unrun: nobody has had such a machine.

Real training runs of the tiny policy on the example's coloured boxes (examples/python/own_world.py, which needs no
browser) with `sync.transport: nccl` and bfloat16, one after another, and what is expected of each:

- *transfer, TP 1* (two GPUs) and *transfer, TP 2* (three): every update's weights reach the replica over NCCL; none
  fails. The replica's log-probabilities of its own samples, screenshots and all, agree with the trainer's forward pass
  of the same weights (`same_version_difference`, below `MOST_DIFFERENCE` on average).
- *two ranks* (three GPUs): the same with a trainer whose weights are sharded over two GPUs.
- *killed replica* (three GPUs): after two updates one of two replicas gets SIGKILL, in all likelihood within a
  transfer, because they follow one another. The run must end by itself, with the other replica never left out, and the
  killed one serving newer weights than it had.

Set-ups for which there are too few GPUs are left out, and said to be. Writes results/gpu/pair-CARD.json after each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.record import file_of, record
from benchmarks.gpu.trial import CONFIG, RESULTS, Trial, overrides, told, train
from benchmarks.gpu.trial import findings as trial_findings
from dart.config import Config, load
from dart.processes.gpus import cards_of, gpus_here

MOST_DIFFERENCE = 0.05
"""Mean |log π_trainer − log π_engine| of a token at the same version, in nats [ours: bfloat16 puts each by about 0.01
off]."""
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

    def overrides(self, folder: Path) -> list[str]:
        return [
            *overrides(folder, UPDATES, episodes=0), "sync.transport=nccl", "sync.max_unavailable=1",
            f"trainer.ranks={self.ranks}", f"rollout.replicas={self.replicas}",
            f"rollout.tensor_parallel={self.tensor_parallel}",
        ]  # fmt: skip


SET_UPS = (
    SetUp("transfer, TP 1", replicas=1, tensor_parallel=1),
    SetUp("transfer, TP 2", replicas=1, tensor_parallel=2),
    SetUp("two ranks", replicas=1, tensor_parallel=1, ranks=2),
    SetUp("killed replica", replicas=2, tensor_parallel=1, kill=True),
)


def config_of(set_up: SetUp, folder: Path) -> Config:
    return load(CONFIG, set_up.overrides(folder))


def findings(set_up: SetUp, trial: Trial) -> list[str]:
    """What is not as it should be; empty if everything is."""
    wrong = trial_findings(trial, updates=UPDATES, most_difference=MOST_DIFFERENCE)
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


def run(set_up: SetUp, folder: Path) -> dict[str, object]:
    trial = train(set_up.overrides(folder), folder, kill=set_up.kill)
    wrong = findings(set_up, trial)
    return {"ok": not wrong, "findings": wrong} | told(trial)


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
    cards = sorted({card.name for card in cards_of(gpus).values()})
    path = file_of(options.output, "pair", "-".join(cards) or "unknown")
    what = "real: training runs with weights over NCCL"
    for set_up in possible(len(gpus)):
        with tempfile.TemporaryDirectory() as folder:
            result = run(set_up, Path(folder))
        print(json.dumps({set_up.name: result}), flush=True)
        record(path, {"name": "gpu_pair", "real_or_simulated": what, "cards": cards}, set_up.name, result)
    print(path)


if __name__ == "__main__":
    main()
