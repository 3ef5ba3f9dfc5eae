"""Is the run still moving, and if not, what is to blame? Pure: facts and the time go in, what is overdue comes out.

`Watchdog.look` compares a `Pulse`, cheap enough to take every few seconds, with the earlier ones, and reports what has
made no progress for longer than its bound. The bounds follow the run's own time scale: `factor` times the slowest
recent trajectory or update, and at least what `Limits` says, so that a desktop trajectory of eight minutes is not a
stall. The first update may take `factor` times what `Limits` says, because nothing is known of it yet. Nor is anything
a stall that an environment does for no longer than its world says it may take. Only then is a `Scene` needed, from
which `explain` (`core.culprits`) finds the culprit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

FAILING_SECONDS = 60.0
"""The bound when every attempt fails, which is shorter than `Limits.sampling`."""
UNSTORED_SECONDS = 20.0
"""The bound of a store that waits, if `Limits.sampling` is not shorter: a backup may lock the database for a moment."""
GROUPS_OF_BATCHES = 4
"""How many batches' worth of trajectories may finish without an update before that is a stall: groups with equal
rewards are dropped, and some tasks have many of them."""


class Kind(StrEnum):
    STORE = "store"
    """What has finished cannot be stored: the machine is short of something, or the database is away."""
    START = "start"
    """A worker that the run needs in order to begin is missing."""
    STEP = "step"
    """No environment has answered a reset or an action."""
    EPISODE = "episode"
    """Environments answer, and no episode finishes."""
    BATCH = "batch"
    """Trajectories finish, and all are dropped, so that no update begins."""
    TRAINER = "trainer"
    """An update or a checkpoint does not finish."""
    WEIGHTS = "weights"
    """A replica does not get the newest weights."""
    HELD = "held"
    """Sampling is held back for the trainer, but the trainer has nothing to do."""
    PAUSED = "paused"
    """A person paused the run: not a fault, but reported all the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds in seconds without progress. Those for sampling and updates grow when the run itself is slower."""

    start: float = 600.0
    sampling: float = 300.0
    update: float = 600.0
    weights: float = 600.0
    factor: float = 4.0
    """Multiplies the duration of the slowest recent trajectory, step or update."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What shows whether the run moves: counts that only grow, and what it is expected to do now."""

    phase: str
    ready: int = 0
    """Workers that have become ready so far."""
    answers: int = 0
    """Resets and actions that environments have answered."""
    unstored: float = 0.0
    """Seconds for which what has finished has waited to be stored."""
    episodes: int = 0
    """Trajectories that have finished, for training or any other purpose."""
    failures: int = 0
    """Failed attempts since each worker's last good one, summed over workers; 0 unless all of them fail."""
    updates: int = 0
    trainer: str = ""
    """ "training" or "saving"; empty while it has nothing to do."""
    version: int = 0
    """The newest published version."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """The version of each replica."""
    environments: int = 0
    sampling: bool = False
    """Episodes are wanted in this phase."""
    busy: bool = False
    """An episode is under way."""
    held_back: str = ""
    """Why no episode may begin; empty if one may."""
    paused: bool = False
    trajectories_per_update: int = 0
    """0 when the run does not train."""
    slowest_trajectory: float = 0.0
    """Seconds; estimated from the pace of steps until one has finished."""
    slowest_update: float = 0.0
    seconds_per_step: float = 0.0
    longest_answer: float = 0.0
    """The longest that the worlds say a reset or an action may take, in seconds; 0: they do not say."""
    longest_boot: float = 0.0
    """The same of a boot or a renewal, while no environment does anything else."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """`seconds`: since its last progress. `subject`: the replica, if a replica is overdue; empty when new weights reach
    none of several."""

    kind: Kind
    seconds: float
    subject: str = ""


@dataclass(slots=True)
class _Mark:
    """The last value of something that should change, and since when it has had that value."""

    seen: object = None
    since: float = 0.0

    def overdue(self, seen: object, now: float, bound: float) -> float | None:
        """How long the value has been the same, in seconds, if that is at least `bound`."""
        if seen != self.seen:
            self.seen, self.since = seen, now
        seconds = now - self.since
        return seconds if seconds >= bound else None

    def restart(self, now: float) -> None:
        self.since = now


class Watchdog:
    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._phase = ""
        self._marks = {kind: _Mark(since=now) for kind in Kind}
        self._replicas: dict[str, _Mark] = {}
        self._arrivals = 0
        """New versions that have arrived at a replica."""
        self._arrivals_then: dict[str, int] = {}
        """How many there were when this replica last got one, or was up to date."""
        self._arrived = now
        """When weights last reached a replica, or one of them had the newest, or there was only one."""
        self._episodes_at_update = (0, 0)
        """Updates so far, and the number of episodes at the last one."""
        self._last: dict[str, tuple[int, float]] = {}

    def quiet(self, now: float) -> dict[str, float]:
        """Seconds since each kind of progress ("step", "episode", "update", "worker"); without those never made."""
        return {name: now - at for name, (_, at) in self._last.items()}

    def look(self, pulse: Pulse, now: float) -> list[Overdue]:
        """What has made no progress for longer than its bound. Every call has a later `now` than the one before."""
        self._note(pulse, now)
        if pulse.paused:  # the time until an update counts from when the run goes on
            self._marks[Kind.BATCH].restart(now)
            if "update" in self._last:
                self._last["update"] = pulse.updates, now
        if pulse.phase != self._phase:
            self._phase = pulse.phase
            for mark in (*self._marks.values(), *self._replicas.values()):
                mark.restart(now)
            self._arrived = now
        if pulse.unstored >= min(UNSTORED_SECONDS, self._limits.sampling):  # whatever else waits, waits for that
            return [Overdue(Kind.STORE, pulse.unstored)]
        found = [
            Overdue(kind, seconds)
            for kind, seen, bound, expected in self._expectations(pulse)
            if (seconds := self._checked(kind, seen, bound, expected, now)) is not None
        ]
        if any(one.kind is Kind.STEP for one in found):  # that also explains why no episode finishes
            found = [one for one in found if one.kind is not Kind.EPISODE]
        behind = self._behind(pulse, now)
        if any(one.kind is Kind.TRAINER for one in found):  # a trainer that hangs sends no weights either
            behind = []
        return found + behind

    def _expectations(self, pulse: Pulse) -> list[tuple[Kind, object, float, bool]]:
        """(kind, what should change, the bound, whether it is expected to change now)."""
        limits = self._limits
        sampling = pulse.sampling and not pulse.paused and (pulse.busy or not pulse.held_back)
        failing = pulse.failures >= 2 * max(1, pulse.environments)
        least = min(FAILING_SECONDS, limits.sampling) if failing else limits.sampling
        pace = 0.0 if failing else limits.factor
        answer = 0.0 if failing else pulse.longest_answer + pulse.longest_boot
        step = max(least, pace * pulse.seconds_per_step, answer)
        episode = max(least, pace * pulse.slowest_trajectory, answer)
        update = max(limits.update, limits.factor * pulse.slowest_update)
        trainer = update if pulse.slowest_update else limits.factor * limits.update
        sent = any(version < pulse.version for version in pulse.versions.values())  # which sampling may wait for, too
        held = pulse.sampling and bool(pulse.held_back) and not (pulse.paused or pulse.busy or pulse.trainer or sent)
        moves = (pulse.answers, pulse.updates, pulse.trainer, pulse.held_back)
        return [
            (Kind.START, pulse.ready, max(limits.start, pulse.longest_boot), pulse.phase == "starting"),
            (Kind.STEP, pulse.answers, step, sampling),
            (Kind.EPISODE, pulse.episodes, episode, sampling),
            (Kind.BATCH, pulse.updates, update, sampling and not pulse.trainer and self._all_dropped(pulse)),
            (Kind.TRAINER, (pulse.updates, pulse.trainer), trainer, bool(pulse.trainer)),
            (Kind.HELD, moves, limits.sampling, held),
            (Kind.PAUSED, pulse.paused, limits.sampling, pulse.paused),
        ]

    def _checked(self, kind: Kind, seen: object, bound: float, expected: bool, now: float) -> float | None:
        if not expected and kind is not Kind.BATCH:
            self._marks[kind].restart(now)
        seconds = self._marks[kind].overdue(seen, now, bound)
        return seconds if expected else None

    def _all_dropped(self, pulse: Pulse) -> bool:
        """Many batches' worth of trajectories have finished since the last update."""
        updates, episodes = self._episodes_at_update
        if pulse.updates != updates or pulse.episodes < episodes or not pulse.trajectories_per_update:
            self._episodes_at_update = pulse.updates, pulse.episodes
            return False
        enough = GROUPS_OF_BATCHES * pulse.trajectories_per_update
        return 0 < enough <= pulse.episodes - episodes

    def _behind(self, pulse: Pulse, now: float) -> list[Overdue]:
        """Replicas whose weights have been outdated and unchanged for too long; all as one where no weights arrive."""
        marks, bound = self._replicas, self._limits.weights
        for name in marks.keys() - pulse.versions.keys():
            del marks[name]
            self._arrivals_then.pop(name, None)
        if self._arrive(pulse):
            if now - self._arrived >= bound:  # until now they were not at fault
                for mark in marks.values():
                    mark.restart(now)
            self._arrived = now
        found = []
        for name, version in pulse.versions.items():
            mark = marks.setdefault(name, _Mark(since=now))
            changed = version != mark.seen
            self._arrivals += changed and mark.seen is not None
            if changed or version >= pulse.version:
                mark.restart(now)
                self._arrivals_then[name] = self._arrivals
            seconds = mark.overdue(version, now, bound)
            # They take turns: while it has not been this one's, it is not at fault.
            turns = self._arrivals - self._arrivals_then.get(name, 0)
            others = [one for other, one in pulse.versions.items() if other != name]
            had_one = turns > len(others) or all(one >= pulse.version for one in others)
            if seconds is not None and (had_one or seconds >= self._limits.factor * bound):
                found.append(Overdue(Kind.WEIGHTS, seconds, name))
        stuck = now - self._arrived
        return [Overdue(Kind.WEIGHTS, stuck)] if stuck >= bound else found

    def _arrive(self, pulse: Pulse) -> bool:
        """Whether new weights have reached a replica since the last look, or one of them has the newest, or there is
        only one, which may be at fault itself."""
        if len(pulse.versions) < 2 or max(pulse.versions.values()) >= pulse.version:
            return True
        return any(
            name in self._replicas and version != self._replicas[name].seen for name, version in pulse.versions.items()
        )

    def _note(self, pulse: Pulse, now: float) -> None:
        counts = {"worker": pulse.ready, "step": pulse.answers, "episode": pulse.episodes, "update": pulse.updates}
        for name, count in counts.items():
            before, _ = self._last.get(name, (0, 0.0))
            if count != before:
                self._last[name] = count, now
