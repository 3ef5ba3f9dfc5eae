"""Where the time of environments, replicas and the trainer goes: slot-seconds by state, kept as events come in.

Each slot of a worker is in one state at a time. A `Ledger` knows, per worker and in total, how many slots are in each
state and their summed time in it. The cost of a change does not depend on the number of workers. Time (seconds, any
origin, never backwards) is an argument.

A worked example: an env worker with two environments joins at 0 s. At 2 s one of them begins an episode, and at 5 s it
waits for a replica. At 10 s somebody asks.

    ledger = Ledger(busy={ACTING, QUEUED}, now=0)
    ledger.joined("env-0", IDLE, slots=2, now=0)
    ledger.move("env-0", IDLE, ACTING, now=2)
    ledger.move("env-0", ACTING, QUEUED, now=5)
    ledger.seconds(now=10)      # IDLE 12 = 2 environments x 2 s + 1 x 8 s;  ACTING 3;  QUEUED 5
    ledger.utilisation(now=10)  # 8 busy of 20 slot-seconds: 0.4

Answering needs no search: for each state the account keeps the number of slots and Σ (time of leaving) -
Σ (time of entering), here QUEUED: 1 slot and -5, so that its seconds are 1 x 10 - 5 = 5.

`blame` books the time of a waiting state under a cause as well: the reason why environments are idle or queued from now
on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EnvState(StrEnum):
    """The state of one environment."""

    RESETTING = "resetting"
    ACTING = "acting"
    QUEUED = "queued"
    """Its episode needs a turn, and no replica has capacity."""
    GENERATING = "generating"
    """A replica, or another source of turns such as a teacher, works on its turn."""
    IDLE = "idle"
    RESTING = "resting"
    """Its worker's attempts have failed in a row: the next one has to wait (`rest_seconds`)."""
    BOOTING = "booting"
    """It is being started, and no episode can begin on it."""
    RENEWING = "renewing"
    """Its last episode is over, and it is being made ready for the next one."""
    QUARANTINED = "quarantined"
    """Its episodes failed one after the other while others of its worker ended well."""
    MISSING = "missing"
    """There was no room for it, or its boot failed: its worker asks again later."""
    LOST = "lost"
    """Its worker is gone and has not come back."""


WITHIN_EPISODE = frozenset({EnvState.RESETTING, EnvState.ACTING, EnvState.QUEUED, EnvState.GENERATING})


class ReplicaState(StrEnum):
    BUSY = "busy"
    """It has at least one request, including one that it finishes before it takes new weights."""
    IDLE = "idle"
    SYNCING = "syncing"
    """It takes new weights: it is out of the rotation and has no requests left."""
    QUARANTINED = "quarantined"
    """Its last requests failed: it gets none, or one at a time to see whether it works again."""
    LOST = "lost"


class TrainerState(StrEnum):
    TRAINING = "training"
    SAVING = "saving"
    IDLE = "idle"
    """No batch is complete; or, if sampling and training alternate, replicas are still taking weights."""


MOST_ABSENT = 100
"""How many workers that were lost, and have not come back, are counted: one that is started again may have a new name,
and the old name then never comes."""
MOST_REST_SECONDS = 60.0


def rest_seconds(failures: int, slots: int) -> float:
    """How long an environment rests after `failures` failed attempts in a row on its worker.

    It does not rest before as many attempts have failed as the worker has slots: a browser that dies takes all its
    pages with it. Then it rests 1 s, and twice as long for each further such number of failures. Without this, a
    machine with a full disk would take every roll-out that is given out again, and fail it at once.
    """
    rounds = failures // slots
    return min(MOST_REST_SECONDS, 2.0 ** (min(rounds, 10) - 1)) if rounds else 0.0


State = EnvState | ReplicaState | TrainerState
_LOST = (EnvState.LOST, EnvState.MISSING, ReplicaState.LOST)
"""What nobody could use: it counts in no utilisation."""


@dataclass(slots=True)
class _Tally:
    """Slots in one state. A state's seconds are its balance + count × now."""

    count: int = 0
    balance: float = 0.0
    """Σ times of leaving − Σ times of entering."""

    def add(self, slots: int, now: float) -> None:
        self.count += slots
        self.balance -= slots * now


class _Account(dict[State, _Tally]):
    """The slots of one worker, or of all, by state."""

    def __missing__(self, state: State) -> _Tally:
        made = self[state] = _Tally()
        return made

    def seconds(self, now: float) -> dict[State, float]:
        return {state: max(0.0, tally.balance + tally.count * now) for state, tally in self.items()}

    def restart(self) -> None:
        """Reset all times to 0."""
        for tally in self.values():
            tally.balance = 0.0


@dataclass(slots=True)
class _Blame:
    """since: seconds in the state when the cause began."""

    cause: str = ""
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class Ledger:
    """`busy`: utilisation is the share of slot-seconds spent in these states."""

    def __init__(self, busy: Iterable[State], now: float) -> None:
        self._busy = frozenset(busy)
        self._all = _Account()
        self._workers: dict[str, _Account] = {}
        self._absent: dict[str, None] = {}
        """Lost workers that may come back, the one that was lost first at the beginning."""
        self._blames: dict[State, _Blame] = {}
        self._origin = now

    def restart(self, now: float) -> None:
        """Forget all times; slots stay in their states."""
        self._origin = now
        for account in (self._all, *self._workers.values()):
            account.restart()
        for blame in self._blames.values():
            blame.since, blame.seconds = 0.0, {}

    def joined(self, worker: str, state: State, slots: int, now: float) -> None:
        self._absent.pop(worker, None)
        self._workers[worker] = _Account()
        self._add(worker, state, slots, now)

    def left(self, worker: str, now: float) -> None:
        """The worker is gone for good, with its slots."""
        self._absent.pop(worker, None)
        for state, tally in self._workers.pop(worker).items():
            self._all[state].add(-tally.count, now - self._origin)

    def lost(self, worker: str, state: State, now: float, *, for_good: bool) -> None:
        """The worker is gone: for good, or all its slots are in `state` until it has `joined` again, or `MOST_ABSENT`
        others have been lost since."""
        if for_good:
            self.left(worker, now)
            return
        for old, count in dict(self.counts(worker)).items():
            self.move(worker, old, state, now, count)
        self._absent[worker] = None
        if len(self._absent) > MOST_ABSENT:
            self.left(next(iter(self._absent)), now)

    def move(self, worker: str, old: State, new: State, now: float, slots: int = 1) -> None:
        """`slots` of the worker change from `old` to `new`. Slots of a worker that is gone do not move."""
        if old is new or (account := self._workers.get(worker)) is None:
            return
        weight = slots * (now - self._origin)
        for tallies in (self._all, account):
            left, entered = tallies[old], tallies[new]  # inlined `add`: every step of every episode comes here twice
            left.count -= slots
            left.balance += weight
            entered.count += slots
            entered.balance -= weight

    def resize(self, worker: str, state: State, slots: int, now: float) -> None:
        """Set how many slots the worker has in `state`; slots are added or removed as needed."""
        if worker in self._workers:
            self._add(worker, state, slots - self._workers[worker][state].count, now)

    def counts(self, worker: str | None = None) -> Mapping[State, int]:
        """Slots now in each state, of one worker or, with None, of all."""
        account = self._all if worker is None else self._workers.get(worker, _Account())
        return {state: tally.count for state, tally in account.items() if tally.count}

    def busy(self, worker: str) -> int:
        """How many of the worker's slots are in a busy state now."""
        return sum(count for state, count in self.counts(worker).items() if state in self._busy)

    def seconds(self, now: float, worker: str | None = None) -> dict[State, float]:
        """Slot-seconds in each state since `restart`."""
        return (self._all if worker is None else self._workers.get(worker, _Account())).seconds(now - self._origin)

    def utilisation(self, now: float) -> float:
        """Share of slot-seconds that were busy, without those of lost workers and missing environments; 0 before there
        were any."""
        seconds = {state: spent for state, spent in self.seconds(now).items() if state not in _LOST}
        offered = sum(seconds.values())
        return sum(spent for state, spent in seconds.items() if state in self._busy) / offered if offered else 0.0

    def blame(self, state: State, cause: str, now: float) -> None:
        """From now on, time in `state` is due to `cause`; empty means no particular cause."""
        blame = self._blames.setdefault(state, _Blame())
        spent = self.seconds(now).get(state, 0.0)
        if blame.cause and spent > blame.since:
            blame.seconds[blame.cause] = blame.seconds.get(blame.cause, 0.0) + spent - blame.since
        blame.cause, blame.since = cause, spent

    def cause(self, state: State) -> str:
        """The cause to which time in `state` is due now."""
        return self._blames[state].cause if state in self._blames else ""

    def causes(self, state: State, now: float) -> dict[str, float]:
        """Slot-seconds in `state` by cause."""
        self.blame(state, self.cause(state), now)
        return dict(self._blames[state].seconds)

    def _add(self, worker: str, state: State, slots: int, now: float) -> None:
        for account in (self._all, self._workers[worker]):
            account[state].add(slots, now - self._origin)
