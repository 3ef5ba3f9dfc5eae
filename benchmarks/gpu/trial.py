"""A training run on GPUs, started as a user would start it, and what its events say of it.

The tiny policy learns the example's coloured boxes (examples/python/own_world.py), from pixels and without a browser.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.trials.pieces import ENDING_SECONDS, as_sets, tied

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "miniwob_cpu.yaml"
WORLD = ROOT / "examples" / "python"
"""The folder in which `own_world` is found."""
LONGEST_SECONDS = 900.0
"""Of one run; one that hangs is ended then, which is a failure."""
LOOK_SECONDS = 0.05
"""Shorter than a transfer over gloo, within which a replica is to be killed."""
KILLED_AFTER, KILLED_BY = 2, 12
"""Updates before a replica is killed: within a transfer after the first number, at any moment after the second."""
STOPPED_AFTER = 2
"""Transfers to a replica before it is stopped."""
MOST_DIFFERENCE = 0.05
"""Mean |log π_trainer − log π_engine| of a token at the same version, in nats [ours: bfloat16 puts each by about 0.01
off]."""
TOLD = ("env_steps", "train_seconds", "env_utilisation", "trainer_utilisation")
"""Of summary.json, for the result file."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a replica, and when."""

    inject: Callable[[psutil.Process], None]
    """Given the replica's worker process."""
    due: Callable[[Sequence[Event], str], bool]
    """Whether it is time, given the events since the fault before and the replica's name."""


@dataclass(frozen=True, slots=True)
class Injected:
    """The faults of a run so far, all of one replica."""

    replica: str = ""
    at: tuple[int, ...] = ()
    """The number of events before each fault; empty if there was none."""


@dataclass(frozen=True, slots=True)
class Trial:
    events: Sequence[Event]
    summary: Mapping[str, Any]
    """summary.json; empty if there is none."""
    code: int | None
    """The run's exit code; None if it had to be ended."""
    injected: Injected
    seconds: float

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def later_updates(self) -> list[Event]:
        """All but the first, which is of the weights that both ends read from the disk: what these train on at the
        trainer's own version was sampled with weights that arrived."""
        return self.of("update")[1:]


def overrides(updates: int, episodes: int) -> list[str]:
    """What every run changes in `CONFIG`. `episodes`: of each evaluation; 0: there is none."""
    return [
        "model.dtype=bfloat16", "environment.kind=own_world:Boxes", "environment.tasks.names=[boxes]",
        "environment.slots=32", "rollout.slots=32", "trainer.threads=null", f"stop.updates={updates}",
        "stop.train_seconds=null", "stop.success_rate=null", f"evaluation.episodes={episodes}", "server.port=0",
        "dashboard.enabled=false",
    ]  # fmt: skip


def tried(
    changes: Sequence[str],
    judge: Callable[[Trial], list[str]],
    faults: Sequence[Fault] = (),
    environment: Sequence[tuple[str, str]] = (),
) -> dict[str, object]:
    """A run with what `judge` finds wrong with it; its folder is kept if that is anything.

    `changes`: of `CONFIG`; `faults`: of one replica, in turn; `environment`: variables beside this process's.
    """
    folder = Path(tempfile.mkdtemp(prefix="dart-gpu-"))
    trial = train([*changes, f"run.directory={folder}"], folder, faults, environment)
    wrong = judge(trial)
    if wrong:
        print(f"{folder} is kept, with the logs of its workers", flush=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return {"ok": not wrong, "findings": wrong} | _told(trial)


def train(
    changes: Sequence[str],
    folder: Path,
    faults: Sequence[Fault] = (),
    environment: Sequence[tuple[str, str]] = (),
) -> Trial:
    """`dart train` to its end, with the run's directory in `folder`."""
    began = time.monotonic()
    command = tied([sys.executable, "-m", "dart", "train", str(CONFIG), "--quiet", *as_sets(changes)])
    injected = Injected()
    with subprocess.Popen(command, cwd=WORLD, env={**os.environ, **dict(environment)}) as process:
        while (code := process.poll()) is None and time.monotonic() - began < LONGEST_SECONDS:
            time.sleep(LOOK_SECONDS)
            if len(injected.at) < len(faults):
                injected = _inject(faults[len(injected.at)], injected, events_of(folder), process.pid)
        if code is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
            process.kill()
    written = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/summary.json")]
    return Trial(events_of(folder), written[0] if written else {}, code, injected, time.monotonic() - began)


def events_of(folder: Path) -> list[Event]:
    """The lines of the run's metrics.jsonl that are complete."""
    found = sorted(folder.glob("*/metrics.jsonl"))
    if not found:
        return []
    lines = found[0].read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def within_transfer(events: Sequence[Event], replica: str) -> bool:
    """After `KILLED_AFTER` updates; at any moment after `KILLED_BY`."""
    updates = sum(event["event"] == "update" for event in events)
    return updates >= KILLED_BY or (updates >= KILLED_AFTER and _transfers(events, replica)[-1:] == ["sync_started"])


def between_transfers(events: Sequence[Event], replica: str) -> bool:
    """After `STOPPED_AFTER` transfers to the replica, before the next one."""
    told = _transfers(events, replica)
    return told.count("sync") >= STOPPED_AFTER and told[-1] == "sync"


def given_up(events: Sequence[Event], replica: str) -> bool:
    """A transfer to the replica has failed, and one to another has gone well after that."""
    kinds = [(event["event"], event.get("replica") == replica) for event in events]
    failed = ("sync_failed", True)
    return failed in kinds and ("sync", False) in kinds[kinds.index(failed) :]


def _transfers(events: Sequence[Event], replica: str) -> list[str]:
    """What was told of transfers to the replica: sync_started, sync, sync_failed."""
    return [event["event"] for event in events if event["event"].startswith("sync") and event["replica"] == replica]


def _stop(worker: psutil.Process) -> None:
    """SIGSTOP for the worker and all that it has started."""
    for one in (worker, *worker.children(recursive=True)):
        one.suspend()


KILLED = (Fault(psutil.Process.kill, within_transfer),)
"""SIGKILL for the worker alone; its engine is to end by itself."""
STOPPED_AND_KILLED = (Fault(_stop, between_transfers), Fault(psutil.Process.kill, given_up))
"""Over NCCL a transfer takes milliseconds, so nobody can come in its middle. A replica that was stopped before lets the
trainer wait in its broadcast."""


def _inject(fault: Fault, injected: Injected, events: Sequence[Event], parent: int) -> Injected:
    """Inject the fault if it is due: the first into any replica, the others into the same one."""
    since = events[injected.at[-1] if injected.at else 0 :]
    names = {event["replica"] for event in since if event["event"] == "sync_started"}
    for name in [injected.replica] if injected.at else sorted(names):
        with contextlib.suppress(psutil.Error):  # the process may end at this moment
            if fault.due(since, name) and (worker := _worker(parent, name)) is not None:
                fault.inject(worker)
                return Injected(name, (*injected.at, len(events)))
    return injected


def _worker(parent: int, replica: str) -> psutil.Process | None:
    """The process of the run's worker of this name, if it is there."""
    for child in psutil.Process(parent).children(recursive=True):
        words = child.cmdline()
        if "--id" in words and words[words.index("--id") + 1] == replica:
            return child
    return None


def findings(trial: Trial, *, updates: int) -> list[str]:
    """What is not as it should be of any run: its end, its updates and its transfers."""
    wrong, injected = [], trial.injected
    if trial.code != 0:
        wrong.append("the run did not end by itself" if trial.code is None else f"the exit code is {trial.code}")
    if (made := len(trial.of("update"))) < updates:
        wrong.append(f"{made} of {updates} updates were made")
    if not trial.of("sync"):
        wrong.append("no weights arrived")
    for number, event in enumerate(trial.events):
        may_fail = event.get("replica") == injected.replica and number >= injected.at[0]
        if event["event"] == "sync_failed" and not may_fail:
            wrong.append(f"a transfer failed: {event['why']}")
    return wrong + [f"the trainer was lost: {event['why']}" for event in trial.of("trainer_lost")]


def disagreement(updates: Sequence[Event], most_difference: float = MOST_DIFFERENCE) -> list[str]:
    """What is not as it should be of the parity of these updates."""
    difference, tokens = parity(updates)
    if tokens == 0:
        return ["no token was trained on at the version that sampled it, so nothing is known of parity"]
    if difference > most_difference:
        return [f"log-probabilities differ by {difference:.4f} on average, more than {most_difference}"]
    return []


def parity(updates: Sequence[Event]) -> tuple[float, float]:
    """(mean difference, tokens) over all updates' tokens of the trainer's own version. The difference is infinite if
    one of them has a log-probability that is no number, which JSON has as null."""
    told = [event.get("trainer", {}) for event in updates]
    counted = [
        (one["same_version_tokens"], one["same_version_difference"]) for one in told if one.get("same_version_tokens")
    ]
    tokens = sum(count for count, _ in counted)
    weighted = sum(count * (math.inf if difference is None else difference) for count, difference in counted)
    return (weighted / tokens if tokens else 0.0), tokens


def _told(trial: Trial) -> dict[str, object]:
    """What a result file says of any run."""
    syncs = trial.of("sync")
    difference, tokens = parity(trial.of("update"))
    later_difference, later_tokens = parity(trial.later_updates)
    return {
        "seconds": round(trial.seconds, 1), "updates": len(trial.of("update")), "syncs": len(syncs),
        "sync_seconds": [event["seconds"] for event in syncs],
        "sync_bytes": syncs[-1]["bytes"] if syncs else 0, "same_version_difference": difference,
        "same_version_tokens": tokens, "later_same_version_difference": later_difference,
        "later_same_version_tokens": later_tokens, "killed": trial.injected.replica or None,
        "syncs_failed": [event["why"] for event in trial.of("sync_failed")],
        "success_before": _rates(trial.summary.get("success_before")),
        "success_after": _rates(trial.summary.get("success_after")),
    } | {name: trial.summary.get(name) for name in TOLD}  # fmt: skip


def _rates(success: Mapping[str, Mapping[str, object]] | None) -> dict[str, dict[str, object]]:
    """By decoding (greedy, sampled): the rate with its 95 % interval."""
    kept = ("mean", "low", "high", "episodes", "temperature")
    return {decoding: {name: one[name] for name in kept} for decoding, one in (success or {}).items()}
