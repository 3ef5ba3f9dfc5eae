"""A training run on GPUs, started as a user would start it, and what its events say of it.

The tiny policy learns the example's coloured boxes (examples/python/own_world.py), from pixels and without a browser.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
CONFIG = ROOT / "configs" / "miniwob_cpu.yaml"
WORLD = ROOT / "examples" / "python"
"""The folder in which `own_world` is found."""
LONGEST_SECONDS = 900.0
"""Of one run; one that hangs is ended then, which is a failure."""
LOOK_SECONDS = 0.5
KILLED_AFTER = 2
"""Updates; the next transfers then follow one another, and one is likely to be under way."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    events: Sequence[Event]
    summary: Mapping[str, Any]
    """summary.json; empty if there is none."""
    code: int | None
    """The run's exit code; None if it had to be ended."""
    killed: tuple[str, int] | None
    """The replica that was killed, and the number of events before that."""
    seconds: float

    @property
    def updates(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "update"]

    @property
    def syncs(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "sync"]


def overrides(folder: Path, updates: int, episodes: int) -> list[str]:
    """What every run changes in `CONFIG`. `episodes`: of each evaluation; 0: there is none."""
    return [
        f"run.directory={folder}", "model.dtype=bfloat16", "environment.kind=own_world:Boxes",
        "environment.tasks.names=[boxes]", "environment.slots=32", "rollout.slots=32", "trainer.threads=null",
        f"stop.updates={updates}", "stop.train_seconds=null", "stop.success_rate=null",
        f"evaluation.episodes={episodes}", "server.port=0", "dashboard.enabled=false",
    ]  # fmt: skip


def train(changes: Sequence[str], folder: Path, *, kill: bool = False) -> Trial:
    """`dart train` to its end. `changes`: of `CONFIG`. `kill`: one replica gets SIGKILL after some updates."""
    choices = [part for change in changes for part in ("--set", change)]
    began = time.monotonic()
    killed: tuple[str, int] | None = None
    command = [sys.executable, "-m", "dart", "train", str(CONFIG), "--quiet", *choices]
    with subprocess.Popen(command, cwd=WORLD) as process:
        while (code := process.poll()) is None and time.monotonic() - began < LONGEST_SECONDS:
            time.sleep(LOOK_SECONDS)
            if kill and killed is None:
                seen = events_of(folder)
                enough = sum(event["event"] == "update" for event in seen) >= KILLED_AFTER
                if enough and (name := _kill_replica(process.pid)):
                    killed = name, len(seen)
        if code is None:
            process.send_signal(signal.SIGINT)
            process.wait()
    written = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/summary.json")]
    return Trial(events_of(folder), written[0] if written else {}, code, killed, time.monotonic() - began)


def events_of(folder: Path) -> list[Event]:
    """The lines of the run's metrics.jsonl that are complete."""
    found = sorted(folder.glob("*/metrics.jsonl"))
    if not found:
        return []
    lines = found[0].read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


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


def findings(trial: Trial, *, updates: int, most_difference: float) -> list[str]:
    """What is not as it should be of any run: its end, its updates, its transfers and its parity."""
    wrong = []
    if trial.code != 0:
        wrong.append("the run did not end by itself" if trial.code is None else f"the exit code is {trial.code}")
    if len(trial.updates) < updates:
        wrong.append(f"{len(trial.updates)} of {updates} updates were made")
    if not trial.syncs:
        wrong.append("no weights arrived")
    if trial.killed is None:
        failed = (event for event in trial.events if event["event"] == "sync_failed")
        wrong += [f"a transfer failed: {event['why']}" for event in failed]
    difference, tokens = parity(trial.updates)
    if tokens == 0:
        wrong.append("no token was trained on at the version that sampled it, so nothing is known of parity")
    elif difference > most_difference:
        wrong.append(f"log-probabilities differ by {difference:.4f} on average, more than {most_difference}")
    return wrong


def parity(updates: Sequence[Event]) -> tuple[float, float]:
    """(mean difference, tokens) over all updates' tokens of the trainer's own version."""
    told = [event.get("trainer", {}) for event in updates]
    tokens = sum(one.get("same_version_tokens", 0.0) for one in told)
    weighted = sum(one.get("same_version_tokens", 0.0) * one.get("same_version_difference", 0.0) for one in told)
    return (weighted / tokens if tokens else 0.0), tokens


def told(trial: Trial) -> dict[str, object]:
    """What a result file says of any run."""
    difference, tokens = parity(trial.updates)
    return {
        "seconds": round(trial.seconds, 1), "updates": len(trial.updates), "syncs": len(trial.syncs),
        "sync_seconds": [event["seconds"] for event in trial.syncs],
        "sync_bytes": trial.syncs[-1]["bytes"] if trial.syncs else 0, "same_version_difference": difference,
        "same_version_tokens": tokens, "killed": trial.killed[0] if trial.killed else None,
    }  # fmt: skip
