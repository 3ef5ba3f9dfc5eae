"""Which workers the faults of a run harm and when, what the healthy ones must get done, and whom a stall may name.

**Throughput.** A run with faults must finish at least `SLACK` of the trajectories that its healthy time is worth. The
worth comes from a run of the same cluster without faults (`Curve`): c(t) is the number of trajectories that it finishes
in its first t seconds, so that a worker that begins anew is granted the time until its first episode ends. For each env
worker (one of W), let t be the healthy seconds since it last began anew; its healthy time is worth c(t) / W.

- t is 0 when a coordinator process begins, and after a fault that costs episodes (`LOST`).
- t stands still while the fault lasts, and `RECOVERY_SECONDS` longer, which is the longest time for which the
  coordinator lets an environment or a replica rest; and while the coordinator is down, or its clock or disk hangs.
- The trainer's faults count as those of every worker, because sampling is held back for it.
- Otherwise t grows by the share of the replicas that are healthy.

**Stalls.** A stall names a culprit: a worker, or a role. That worker, or a worker of that role, must have been harmed
since the time at which the stalled progress was last made, or `GIVEN_UP_SECONDS` before. Nothing is judged where the
watchdog names neither (`the environments`, or groups that are dropped).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.simulation.faults.plan import Fault, Planned

SLACK = 0.75
RECOVERY_SECONDS = 60.0
GIVEN_UP_SECONDS = 300.0
"""What a fault holds up may be answered, or be given up by the coordinator, only so long after the fault's end."""
STEP_SECONDS = 10.0
STRIKES, STRIKES_SECONDS = 3, 240.0
"""An env worker that breaks so many rules in this time is quarantined, and then tried with one episode at a time."""

LOST = {
    Fault.REPLICA_FAILS, Fault.REPLICA_HANGS, Fault.ENVIRONMENTS_FAIL, Fault.ENVIRONMENTS_HANG, Fault.TRAINER_HANGS,
    Fault.TRAINER_FAILS, Fault.TRAINER_KILLED, Fault.STREAM_LOST, Fault.WORKER_KILLED, Fault.GARBAGE,
}  # fmt: skip
"""These cost the worker the episodes, or the turns, that it works on."""
HELD_UP = {Fault.STREAM_CUT, Fault.LATE, Fault.SLOW_DISK, Fault.CLOCK}
"""After these it continues where it was; what is in neither of the two sets harms nobody."""
EVERYBODY = ""


@dataclass(frozen=True, slots=True)
class Harm:
    """`worker`: its name, or EVERYBODY. The times are virtual seconds; `end` is when the fault itself ends."""

    fault: Fault
    worker: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Curve:
    """`finished`: when each trajectory of a run of `seconds` without faults was finished, in order."""

    finished: Sequence[float]
    seconds: float

    def at(self, seconds: float) -> float:
        """How many had been finished by then; after the end, at the rate of the second half."""
        if seconds <= self.seconds:
            return bisect_right(self.finished, seconds)
        half = bisect_right(self.finished, self.seconds / 2)
        rate = (len(self.finished) - half) / (self.seconds / 2)
        return len(self.finished) + rate * (seconds - self.seconds)


@dataclass
class Harms:
    environments: Sequence[str]
    """The env workers."""
    replicas: Sequence[str]
    lives: list[tuple[float, float]] = field(default_factory=list)
    """When each coordinator process began and ended."""
    _harms: list[Harm] = field(default_factory=list)
    _past: list[Harm] = field(default_factory=list)
    """Those of earlier processes."""

    def happened(self, planned: Planned, worker: str, now: float, seconds: float) -> None:
        if planned.fault in LOST | HELD_UP:
            end = math.inf if planned.fault is Fault.TRAINER_KILLED else now + seconds
            self._harms.append(Harm(planned.fault, worker, now, end))

    def process_ended(self, began: float, now: float) -> None:
        """No fault outlasts the coordinator's process: the workers begin anew with the next one."""
        self.lives.append((began, now))
        self._past += [replace(one, end=min(one.end, now)) for one in self._harms]
        self._harms.clear()

    def may_end_the_run(self, now: float) -> bool:
        """Whether the trainer has, or had until a minute ago, a fault for which the coordinator ends the run: it fails,
        is dead, or its stream was cut again before it had been dialled."""
        late = [one.fault for one in self._harms if one.worker == "train" and one.end >= now - RECOVERY_SECONDS]
        return late.count(Fault.STREAM_CUT) > 1 or Fault.TRAINER_FAILS in late or Fault.TRAINER_KILLED in late

    # ---- stalls ----

    def wrongly_blamed(self, culprit: str, since: float) -> bool:
        """Whether a stall names only workers, or roles, that nothing has harmed since then."""
        names = {name.split(" (")[0] for name in culprit.split(", ")}
        if not names <= {*self.environments, *self.replicas, "train", "env", "rollout"}:
            return False
        harmed = {one.worker for one in self._harms if one.end >= since - GIVEN_UP_SECONDS}
        harmed |= {name.split("-")[0] for name in harmed}
        return EVERYBODY not in harmed and not harmed & names

    # ---- throughput ----

    def worth(self, curve: Curve) -> float:
        """The trajectories that the healthy time of all processes that have ended is worth."""
        return sum(self._worth(name, begin, end, curve) for name in self.environments for begin, end in self.lives)

    def _worth(self, name: str, begin: float, end: float, curve: Curve) -> float:
        during = [one for one in self._past if begin <= one.begin <= end]
        mine = [one for one in during if one.worker in (name, EVERYBODY) or (one.worker == "train" and _lost(one))]
        theirs = {replica: [one for one in during if one.worker == replica] for replica in self.replicas}
        made = healthy = 0.0
        at = begin
        while (at := at + STEP_SECONDS) <= end:
            up = sum(not _at(harms, at) for harms in theirs.values()) / len(theirs)
            now = _at(mine, at)
            if not up or any(_lost(one) for one in now) or _quarantined(mine, at):
                made, healthy = made + curve.at(healthy), 0.0
            elif not now:
                healthy += STEP_SECONDS * up
        return (made + curve.at(healthy)) / len(self.environments)


def _lost(harm: Harm) -> bool:
    return harm.fault in LOST


def _at(harms: Sequence[Harm], at: float) -> list[Harm]:
    """Those that last at this time, or have ended so recently that their workers may still rest."""
    return [one for one in harms if one.begin <= at <= max(one.end, one.begin + STEP_SECONDS) + RECOVERY_SECONDS]


def _quarantined(harms: Sequence[Harm], at: float) -> bool:
    """Whether an env worker has been quarantined: for the rest of the process, it may not do its share."""
    broke = [one.begin for one in harms if one.fault is Fault.GARBAGE and one.begin <= at]
    return any(last - first <= STRIKES_SECONDS for first, last in zip(broke, broke[STRIKES - 1 :], strict=False))
