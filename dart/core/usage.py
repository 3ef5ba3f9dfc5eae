"""Where the time of environments, replicas and the trainer goes: slot-seconds by state, kept as events come in.

A worker's slots are each in one state at a time. A `Ledger` knows how many are in which state, and for how long all of
them together have been in it, per worker and over all. A change costs the same however many workers there are. Time
(seconds, any origin, never backwards) is an argument.

A worked example: an env worker with two environments joins at 0 s. At 2 s one of them begins an episode, and at 5 s it
waits for a replica. At 10 s somebody asks.

    ledger = Ledger(busy={ACTING, QUEUED}, now=0)
    ledger.joined("env-0", IDLE, slots=2, now=0)
    ledger.move("env-0", IDLE, ACTING, now=2)
    ledger.move("env-0", ACTING, QUEUED, now=5)
    ledger.seconds(now=10)      # IDLE 12 = 2 environments x 2 s + 1 x 8 s;  ACTING 3;  QUEUED 5
    ledger.utilisation(now=10)  # 8 busy of 20 slot-seconds: 0.4

Nothing is gone through to answer: for each state the account keeps the number of slots and Σ (time of leaving) -
Σ (time of entering), here QUEUED: 1 slot and -5, so that its seconds are 1 x 10 - 5 = 5.

`blame` books the time of a waiting state under a cause as well: what makes environments idle or queued from now on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EnvState(StrEnum):
    """Of one environment. `RESETTING`, `ACTING`, `QUEUED` and `GENERATING` are within an episode."""

    RESETTING = "resetting"
    ACTING = "acting"
    QUEUED = "queued"
    """Its episode wants a turn, and no replica has capacity."""
    GENERATING = "generating"
    """A replica, or whoever writes its turns, is at its turn."""
    IDLE = "idle"
    RESTING = "resting"
    """Its worker's attempts have failed one after the other: the next has to wait (`rest_seconds`)."""
    BOOTING = "booting"
    """It is being started, and nothing can be begun on it."""
    RENEWING = "renewing"
    """Its last episode is over, and it is made ready for the next one."""
    LOST = "lost"
    """Its worker is gone and has not come back."""


class ReplicaState(StrEnum):
    BUSY = "busy"
    """It has at least one request; also one that it finishes before it takes new weights."""
    IDLE = "idle"
    SYNCING = "syncing"
    """It takes new weights: out of the rotation, and nothing is left to generate."""
    QUARANTINED = "quarantined"
    """Its last requests failed: it gets none, or one at a time to see whether it works again."""
    LOST = "lost"


class TrainerState(StrEnum):
    TRAINING = "training"
    SAVING = "saving"
    IDLE = "idle"
    """No batch has come together; or, where sampling and training take turns, weights are waited for."""


MOST_REST_SECONDS = 60.0


def rest_seconds(failures: int, slots: int) -> float:
    """How long an environment of a worker rests after its worker's `failures` failed attempts in a row.

    Not at all before as many have failed as it has slots: a browser that dies takes all its pages with it. Then 1 s,
    and twice as long each time as many more have. Without this, a machine whose disk is full would take every roll-out
    that is given out again, and fail it at once.
    """
    rounds = failures // slots
    return min(MOST_REST_SECONDS, 2.0 ** (min(rounds, 10) - 1)) if rounds else 0.0


State = EnvState | ReplicaState | TrainerState
_LOST = (EnvState.LOST, ReplicaState.LOST)


@dataclass(slots=True)
class _Account:
    """counts: slots now in each state. balances: Σ times of leaving − Σ times of entering, so that a state's seconds
    are its balance + count × now."""

    counts: dict[State, int] = field(default_factory=dict)
    balances: dict[State, float] = field(default_factory=dict)

    def add(self, state: State, slots: int, now: float) -> None:
        self.counts[state] = self.counts.get(state, 0) + slots
        self.balances[state] = self.balances.get(state, 0.0) - slots * now

    def move(self, old: State, new: State, slots: int, now: float) -> None:
        self.add(old, -slots, now)
        self.add(new, slots, now)

    def seconds(self, now: float) -> dict[State, float]:
        return {state: max(0.0, balance + self.counts[state] * now) for state, balance in self.balances.items()}

    def restart(self) -> None:
        """Time begins at 0 again."""
        self.balances = dict.fromkeys(self.counts, 0.0)


@dataclass(slots=True)
class _Blame:
    """since: seconds in the state when the cause began."""

    cause: str = ""
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class Ledger:
    """`busy`: the states whose share of all slot-seconds is the utilisation."""

    def __init__(self, busy: Iterable[State], now: float) -> None:
        self._busy = frozenset(busy)
        self._all = _Account()
        self._workers: dict[str, _Account] = {}
        self._blames: dict[State, _Blame] = {}
        self._origin = now

    def restart(self, now: float) -> None:
        """Forget what was; slots stay where they are."""
        self._origin = now
        for account in (self._all, *self._workers.values()):
            account.restart()
        for blame in self._blames.values():
            blame.since, blame.seconds = 0.0, {}

    def joined(self, worker: str, state: State, slots: int, now: float) -> None:
        self._workers[worker] = _Account()
        self._add(worker, state, slots, now)

    def left(self, worker: str, now: float) -> None:
        """It is gone for good: its slots are not there any more."""
        for state, count in self._workers.pop(worker).counts.items():
            self._all.add(state, -count, now - self._origin)

    def lost(self, worker: str, state: State, now: float, *, for_good: bool) -> None:
        """It is gone: for good, or all its slots are in `state` until it has `joined` again."""
        counts = dict(self.counts(worker))
        if for_good:
            self.left(worker, now)
            return
        for old, count in counts.items():
            self.move(worker, old, state, now, count)

    def move(self, worker: str, old: State, new: State, now: float, slots: int = 1) -> None:
        """`slots` of the worker change from `old` to `new`. What is not there any more does not move."""
        if old is new or (account := self._workers.get(worker)) is None:
            return
        at = now - self._origin
        self._all.move(old, new, slots, at)
        account.move(old, new, slots, at)

    def resize(self, worker: str, state: State, slots: int, now: float) -> None:
        """The worker has so many slots in `state` from now on; others come from nowhere, or are gone."""
        if worker in self._workers:
            self._add(worker, state, slots - self._workers[worker].counts.get(state, 0), now)

    def counts(self, worker: str | None = None) -> Mapping[State, int]:
        """Slots now in each state; `worker` None: of all."""
        account = self._all if worker is None else self._workers.get(worker, _Account())
        return {state: count for state, count in account.counts.items() if count}

    def busy(self, worker: str) -> int:
        """Its slots that are in a busy state now."""
        return sum(count for state, count in self.counts(worker).items() if state in self._busy)

    def seconds(self, now: float, worker: str | None = None) -> dict[State, float]:
        """Slot-seconds in each state since `restart`."""
        return (self._all if worker is None else self._workers.get(worker, _Account())).seconds(now - self._origin)

    def utilisation(self, now: float) -> float:
        """Share of the slot-seconds that were busy, those of lost workers left out; 0 before there were any."""
        seconds = {state: spent for state, spent in self.seconds(now).items() if state not in _LOST}
        offered = sum(seconds.values())
        return sum(spent for state, spent in seconds.items() if state in self._busy) / offered if offered else 0.0

    def blame(self, state: State, cause: str, now: float) -> None:
        """From now on, time in `state` is due to `cause`; empty: to nothing in particular."""
        blame = self._blames.setdefault(state, _Blame())
        spent = self.seconds(now).get(state, 0.0)
        if blame.cause and spent > blame.since:
            blame.seconds[blame.cause] = blame.seconds.get(blame.cause, 0.0) + spent - blame.since
        blame.cause, blame.since = cause, spent

    def cause(self, state: State) -> str:
        """What time in `state` is due to now."""
        return self._blames[state].cause if state in self._blames else ""

    def causes(self, state: State, now: float) -> dict[str, float]:
        """Slot-seconds in `state` by cause."""
        self.blame(state, self.cause(state), now)
        return dict(self._blames[state].seconds)

    def _add(self, worker: str, state: State, slots: int, now: float) -> None:
        for account in (self._all, self._workers[worker]):
            account.add(state, slots, now - self._origin)
