"""What only two or more GPUs with vLLM can show: `python -m benchmarks.gpu.pair`. Unrun: nobody has had such a machine.

Real training runs of the demo (configs/ladder_demo.yaml, so Chromium is needed) with `sync.transport: nccl` and
bfloat16, one after another, and what is expected of each:

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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dart.config import Config, load
from dart.coordinator.summary import machine, software, write_json
from dart.processes.gpus import cards_of, gpus_here

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
CONFIG = ROOT / "configs" / "ladder_demo.yaml"
MOST_DIFFERENCE = 0.05
"""Mean |log π_trainer − log π_engine| of a token at the same version, in nats [ours: bfloat16 puts each by about 0.01
off]."""
UPDATES = 8
LONGEST_SECONDS = 900.0
"""Of one set-up; a run that hangs is ended then, which is a failure."""
LOOK_SECONDS = 0.5

Event = Mapping[str, Any]


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
            f"run.directory={folder}", "model.dtype=bfloat16", "sync.transport=nccl", "evaluation.episodes=0",
            f"trainer.ranks={self.ranks}", f"rollout.replicas={self.replicas}",
            f"rollout.tensor_parallel={self.tensor_parallel}",
            "sync.max_unavailable=1", f"stop.updates={UPDATES}", "stop.train_seconds=null", "trainer.threads=null",
        ]  # fmt: skip


SET_UPS = (
    SetUp("transfer, TP 1", replicas=1, tensor_parallel=1),
    SetUp("transfer, TP 2", replicas=1, tensor_parallel=2),
    SetUp("two ranks", replicas=1, tensor_parallel=1, ranks=2),
    SetUp("killed replica", replicas=2, tensor_parallel=1, kill=True),
)


def config_of(set_up: SetUp, folder: Path) -> Config:
    return load(CONFIG, set_up.overrides(folder))


def findings(set_up: SetUp, events: Sequence[Event], code: int | None, killed: tuple[str, int] | None) -> list[str]:
    """What is not as it should be; empty if everything is.

    code: the run's exit code, None if it had to be ended. killed: the replica that was killed, and the number of events
    before that.
    """
    wrong = []
    if code != 0:
        wrong.append("the run did not end by itself" if code is None else f"the run's exit code is {code}")
    updates = [event for event in events if event["event"] == "update"]
    if len(updates) < UPDATES:
        wrong.append(f"{len(updates)} of {UPDATES} updates were made")
    syncs = [event for event in events if event["event"] == "sync"]
    if not syncs:
        wrong.append("no weights arrived")
    if not set_up.kill:
        wrong += [f"a transfer failed: {event['why']}" for event in events if event["event"] == "sync_failed"]
    difference, tokens = parity(updates)
    if tokens == 0:
        wrong.append("no token was trained on at the version that sampled it, so nothing is known of parity")
    elif difference > MOST_DIFFERENCE:
        wrong.append(f"log-probabilities differ by {difference:.4f} on average, more than {MOST_DIFFERENCE}")
    if set_up.kill:
        if killed is None:
            wrong.append("no replica was killed")
        else:
            name, before = killed
            later = [event for event in events[before:] if event["event"] == "sync"]
            if not any(event["replica"] == name for event in later):
                wrong.append(f"{name}, which was killed, got no weights afterwards")
            if not any(event["replica"] != name for event in later):
                wrong.append(f"no other replica got weights after {name} was killed")
    return wrong


def parity(updates: Sequence[Event]) -> tuple[float, float]:
    """(mean difference, tokens) over all updates' tokens of the trainer's own version."""
    told = [event.get("trainer", {}) for event in updates]
    tokens = sum(one.get("same_version_tokens", 0.0) for one in told)
    weighted = sum(one.get("same_version_tokens", 0.0) * one.get("same_version_difference", 0.0) for one in told)
    return (weighted / tokens if tokens else 0.0), tokens


def events_of(folder: Path) -> list[Event]:
    """The lines of the run's metrics.jsonl that are complete."""
    found = sorted(folder.glob("*/metrics.jsonl"))
    if not found:
        return []
    lines = found[0].read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(set_up: SetUp, folder: Path) -> dict[str, object]:
    choices = [part for override in set_up.overrides(folder) for part in ("--set", override)]
    began = time.monotonic()
    killed: tuple[str, int] | None = None
    command = [sys.executable, "-m", "dart", "train", str(CONFIG), "--quiet", *choices]
    with subprocess.Popen(command, cwd=ROOT) as process:
        while (code := process.poll()) is None and time.monotonic() - began < LONGEST_SECONDS:
            time.sleep(LOOK_SECONDS)
            if set_up.kill and killed is None:
                seen = events_of(folder)
                if sum(event["event"] == "update" for event in seen) >= 2 and (name := _kill_replica(process.pid)):
                    killed = name, len(seen)
        if code is None:
            process.send_signal(signal.SIGINT)
            process.wait()
    events = events_of(folder)
    updates = [event for event in events if event["event"] == "update"]
    syncs = [event for event in events if event["event"] == "sync"]
    difference, tokens = parity(updates)
    wrong = findings(set_up, events, code, killed)
    return {
        "ok": not wrong, "findings": wrong, "seconds": round(time.monotonic() - began, 1), "updates": len(updates),
        "syncs": len(syncs), "sync_seconds": [event["seconds"] for event in syncs],
        "sync_bytes": syncs[-1]["bytes"] if syncs else 0, "same_version_difference": difference,
        "same_version_tokens": tokens, "killed": killed[0] if killed else None,
    }  # fmt: skip


def _kill_replica(parent: int) -> str | None:
    """Send SIGKILL to one of the run's roll-out workers; its name, or None if there is none."""
    for child in psutil.Process(parent).children(recursive=True):
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if "--role" in words and words[words.index("--role") + 1] == "rollout":
            child.kill()
            return words[words.index("--id") + 1]
    return None


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
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"pair-{'-'.join(cards).replace(' ', '-') or 'unknown'}.json"
    results: dict[str, object] = {}
    for set_up in possible(len(gpus)):
        with tempfile.TemporaryDirectory() as folder:
            results[set_up.name] = run(set_up, Path(folder))
        print(json.dumps({set_up.name: results[set_up.name]}), flush=True)
        write_json(
            path,
            {
                "name": "gpu_pair",
                "real_or_simulated": "real: training runs of the demo with weights over NCCL",
                "cards": cards,
                "machine": machine(),
                "versions": software(),
                "date": time.strftime("%Y-%m-%d"),
                "results": results,
            },
        )
    print(path)


if __name__ == "__main__":
    main()
