"""What only two or more GPUs with vLLM can show: `python -m benchmarks.gpu.pair`. Not run yet.

Real training runs of the tiny policy on the example's coloured boxes (examples/python/own_world.py, which needs no
browser) with `sync.transport: nccl` and bfloat16, one after another, and what is expected of each:

- *transfer, TP 1* (two GPUs) and *transfer, TP 2* (three): every update's weights reach the replica over NCCL; none
  fails. The replica's log-probabilities of its own samples, screenshots and all, agree with the trainer's forward pass
  of the same weights (`same_version_difference`, below `MOST_DIFFERENCE` on average), in every update but the first.
  Sampling and training alternate, so that all that such an update trains on was sampled with weights that arrived.
- *two ranks* (three GPUs): the same with a trainer whose weights are sharded over two GPUs.
- *killed replica* (three GPUs): one of two replicas is stopped (SIGSTOP, with its engine) after its second transfer, so
  that the trainer waits in the middle of the next broadcast to it. That must fail after `sync.timeout_seconds`, and not
  because the replica was lost; the trainer must then reach the other replica. Only then the stopped one gets SIGKILL:
  both must get weights after that, and the run must end by itself. What the events cannot show is that the trainer was
  within the broadcast; `SMALL_BUFFER` is there for that. An abort between two packs is not tried: the policy fits one.

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
from benchmarks.gpu.trial import CONFIG, STOPPED_AND_KILLED, Fault, Trial, disagreement, overrides, tried
from benchmarks.gpu.trial import findings as trial_findings
from dart.config import Config, load
from dart.processes.gpus import gpus_here

UPDATES = 8
"""The fewest."""
BUFFER_BYTES = 1 << 20
SMALL_BUFFER = (("NCCL_PROTO", "Simple"), ("NCCL_MAX_CTAS", "1"), ("NCCL_BUFFSIZE", str(BUFFER_BYTES)))
"""So that a broadcast waits for a replica that does not receive. By itself NCCL has 4 MiB for each of its channels, and
what fits them is sent without anybody receiving it (NVIDIA/nccl issues 358, 544 and 1450)."""
ALTERNATE = ("schedule.sampling=batch", "schedule.training=synchronous")
STOPPABLE = (
    "sync.mode=abort",  # what a stopped replica has begun never ends
    "sync.timeout_seconds=20",
    "server.lost_after_seconds=120",  # longer than that, or the replica is lost before the transfer has its timeout
    "stop.updates=null",
    "stop.train_seconds=300",  # the killed one's new engine must start meanwhile
)
TIMED_OUT = ("sync.timeout_seconds", "no answer within")
"""How a transfer fails by its timeout: in the coordinator's words, or, if it is told sooner, in the sender's."""


@dataclass(frozen=True, slots=True)
class SetUp:
    name: str
    replicas: int
    tensor_parallel: int
    ranks: int = 1
    changes: tuple[str, ...] = ALTERNATE
    faults: tuple[Fault, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def gpus(self) -> int:
        """Those of the trainer's ranks and of the replicas."""
        return self.ranks + self.replicas * self.tensor_parallel

    def overrides(self) -> list[str]:
        return [
            *overrides(UPDATES, episodes=0), "sync.transport=nccl", "sync.max_unavailable=1",
            f"trainer.ranks={self.ranks}", f"rollout.replicas={self.replicas}",
            f"rollout.tensor_parallel={self.tensor_parallel}", *self.changes,
        ]  # fmt: skip


SET_UPS = (
    SetUp("transfer, TP 1", replicas=1, tensor_parallel=1),
    SetUp("transfer, TP 2", replicas=1, tensor_parallel=2),
    SetUp("two ranks", replicas=1, tensor_parallel=1, ranks=2),
    SetUp(
        "killed replica", replicas=2, tensor_parallel=1, changes=STOPPABLE, faults=STOPPED_AND_KILLED,
        environment=SMALL_BUFFER,
    ),
)  # fmt: skip


def config_of(set_up: SetUp) -> Config:
    return load(CONFIG, set_up.overrides())


def findings(set_up: SetUp, trial: Trial) -> list[str]:
    """What is not as it should be; empty if everything is."""
    wrong = trial_findings(trial, updates=UPDATES)
    if set_up.faults:
        return wrong + disagreement(trial.of("update")) + _of_stopped(trial)
    later = enumerate(trial.later_updates, 2)
    return wrong + [f"update {number}: {why}" for number, update in later for why in disagreement([update])]


def _of_stopped(trial: Trial) -> list[str]:
    """What is not as it should be of the replica that was stopped, then killed, and of the other one."""
    name, at = trial.injected.replica, trial.injected.at
    if not at:
        return ["no replica was stopped"]
    if len(at) < len(STOPPED_AND_KILLED):
        return [f"{name} was stopped, and no transfer to it failed and was followed by one to another replica"]
    wrong = []
    if max(event["bytes"] for event in trial.of("sync")) <= BUFFER_BYTES:
        wrong.append(f"weights fit NCCL's buffer of {BUFFER_BYTES} bytes, so that no broadcast waits for a replica")
    failed = [event["why"] for event in trial.events[at[0] : at[1]] if event["event"] == "sync_failed"]
    if not any(words in why for why in failed for words in TIMED_OUT):
        wrong.append(f"no transfer to {name} ended by its timeout while it was stopped: {failed}")
    later = [event["replica"] for event in trial.events[at[1] :] if event["event"] == "sync"]
    if name not in later:
        wrong.append(f"{name}, which was killed, got no weights afterwards")
    if not {*later} - {name}:
        wrong.append(f"no other replica got weights after {name} was killed")
    return wrong


def run(set_up: SetUp) -> dict[str, object]:
    return tried(set_up.overrides(), lambda trial: findings(set_up, trial), set_up.faults, set_up.environment)


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
