"""What can go wrong in a simulated run, one class each, and when: drawn from a seed before the run begins."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    REPLICA_FAILS = "a replica fails every request"
    REPLICA_HANGS = "a replica hangs behind its heartbeats"
    ENVIRONMENTS_FAIL = "an env worker fails every command"
    ENVIRONMENTS_HANG = "an env worker hangs behind its heartbeats"
    TRAINER_HANGS = "the trainer hangs behind its heartbeats"
    TRAINER_FAILS = "the trainer fails an update"
    STREAM_CUT = "a stream is cut, and dialled again soon"
    STREAM_LOST = "a stream is cut for longer than the coordinator waits"
    WORKER_KILLED = "an env worker or a replica is killed"
    DUPLICATES = "messages come twice"
    LATE = "messages come late and out of order"
    GARBAGE = "a reply says what no rule allows"
    TWIN = "another worker with a live one's name and rank"
    SLOW_DISK = "the database is slow"
    NO_FILES = "the coordinator has no file descriptor left for a while"
    DISK_FULL = "the coordinator's disk is full for a while"
    CLOCK = "the coordinator stands still"
    WALL_CLOCK = "the wall clock is set"
    COORDINATOR_KILLED = "the coordinator is killed"
    TRAINER_KILLED = "the trainer is killed"


LASTING: dict[Fault, tuple[float, float]] = {
    Fault.REPLICA_FAILS: (30.0, 400.0),
    Fault.REPLICA_HANGS: (30.0, 400.0),
    Fault.ENVIRONMENTS_FAIL: (30.0, 400.0),
    Fault.ENVIRONMENTS_HANG: (30.0, 400.0),
    Fault.TRAINER_HANGS: (60.0, 1500.0),
    Fault.STREAM_CUT: (0.1, 8.0),
    Fault.STREAM_LOST: (20.0, 90.0),
    Fault.WORKER_KILLED: (10.0, 60.0),
    Fault.DUPLICATES: (30.0, 300.0),
    Fault.LATE: (30.0, 300.0),
    Fault.SLOW_DISK: (30.0, 200.0),
    Fault.NO_FILES: (30.0, 200.0),
    Fault.DISK_FULL: (30.0, 200.0),
    Fault.CLOCK: (3.0, 120.0),
}
"""The shortest and longest duration in seconds; the other faults are instantaneous."""
ROLES: dict[Fault, tuple[str, ...]] = {
    Fault.REPLICA_FAILS: ("rollout",),
    Fault.REPLICA_HANGS: ("rollout",),
    Fault.ENVIRONMENTS_FAIL: ("env",),
    Fault.ENVIRONMENTS_HANG: ("env",),
    Fault.TRAINER_HANGS: ("train",),
    Fault.TRAINER_FAILS: ("train",),
    Fault.TRAINER_KILLED: ("train",),
    Fault.STREAM_CUT: ("env", "rollout", "train"),
    Fault.STREAM_LOST: ("env", "rollout"),
    Fault.WORKER_KILLED: ("env", "rollout"),
    Fault.DUPLICATES: ("env", "rollout", "train"),
    Fault.LATE: ("env", "rollout", "train"),
    Fault.GARBAGE: ("env", "rollout", "train"),
    Fault.TWIN: ("env", "rollout", "train"),
}
"""The roles of the workers that it may happen to; the other faults happen to the coordinator."""
FAILING_SECONDS = 30.0
"""How long TRAINER_FAILS lasts; it does nothing if no update meets it."""
WALL_CLOCK_SECONDS = 4 * 3600.0
"""The wall clock is set by up to half of this, forward or back."""
ENDS_THE_PROCESS = (Fault.COORDINATOR_KILLED, Fault.TRAINER_KILLED)
"""After these, the run continues in another coordinator process, with `--resume`."""


@dataclass(frozen=True, slots=True)
class Planned:
    """`at`, `seconds`: in the run's virtual time. `draw`: from 0 to 1, picks the worker that it happens to."""

    fault: Fault
    at: float
    seconds: float
    draw: float


def plan(seed: int, hours: float, gap_seconds: float) -> list[Planned]:
    """The faults of one run, in order of time; the last ten minutes are calm."""
    chance = random.Random(f"faults/{seed}")
    planned: list[Planned] = []
    at = 120.0
    while (at := at + chance.expovariate(1 / gap_seconds)) < 3600 * hours - 600:
        fault = chance.choice(list(Fault))
        if fault in ENDS_THE_PROCESS and chance.random() < 0.5:
            fault = Fault.STREAM_CUT  # a restart calms everything else
        seconds = chance.uniform(*LASTING.get(fault, (0.0, 0.0)))
        planned.append(Planned(fault, at, seconds, chance.random()))
    return planned
