"""What is started again, and what ends the run, when one of its processes has ended. Pure: events in, actions out.

The coordinator and the trainer ranks live and die together: a rank cannot join a running trainer, and a coordinator
that has lost one cannot go on. So when one of them is lost, the others are stopped. When all have ended the coordinator
is started, which continues the run, and then every rank. Env workers and replicas dial the coordinator again by
themselves; they are started again when they end, or when the coordinator has moved.

Exit code 2 is a user's error: it ends everything with its message, but only where nothing has run yet. Later it may
also be a coordinator that has lost its trainer, or a node that lacks what the first one had: it counts as a failure.

Failures of an env worker or a replica are counted anew once it has lasted. The coordinator and the trainer begin again
from the newest checkpoint, so theirs are counted anew from each new checkpoint on, however long they took to fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dart.core.fleet.restarts import LASTING_SECONDS, pause_seconds
from dart.errors import INTERRUPTED, NOT_READY, USER_ERROR

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Start:
    """Start these together, because ranks have one meeting point. `seconds`: the delay."""

    names: tuple[str, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stop:
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over, for better or worse. `code`: of `dart launch`."""

    code: int
    message: str = ""


Action = Start | Stop | Say | Finish


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended. `code`: None if it was lost with its node, or its node cannot start it; negative: a signal.
    `said`: its last line. `checkpoints`: names of those that the run had then, as far as its machine sees them."""

    code: int | None
    said: str = ""
    checkpoints: frozenset[str] = frozenset()

    def __str__(self) -> str:
        if self.code is None:
            return f"was lost{self._said}"
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"
        return how + self._said

    @property
    def _said(self) -> str:
        return f" ({self.said})" if self.said else ""


@dataclass(slots=True)
class _Failures:
    """In a row. `began`: when what is counted here was last started, in seconds."""

    began: float = 0.0
    starts: int = 0
    count: int = 0

    def start(self, now: float) -> None:
        self.began, self.starts = now, self.starts + 1

    def failed(self, now: float, *, may_have_lasted: bool) -> int:
        lasted = may_have_lasted and now - self.began > LASTING_SECONDS
        self.count = 1 if lasted else self.count + 1
        return self.count


class Restarts:
    """The processes of one run. The caller carries out every action and reports each end, also of what it stopped."""

    def __init__(self, workers: Sequence[str], ranks: Sequence[str], most: int) -> None:
        """`workers`: env workers and replicas. `most`: restarts in a row."""
        self._workers, self._ranks, self._most = tuple(workers), tuple(ranks), most
        self._failures = {name: _Failures() for name in workers}
        self._core = _Failures()
        self._checkpoints: frozenset[str] = frozenset()
        """All that the run has ever been seen to have."""
        self._told: dict[str, int] = {}
        """Which start of the coordinator each worker was last started for."""
        self._up: set[str] = set()
        """Started and not ended, also before its delay is over."""
        self._stopping: set[str] = set()
        self._listening = False
        self._has_listened = False

    def begin(self, now: float) -> list[Action]:
        self._core.start(now)
        return [self._start((COORDINATOR,))]

    def listening(self, now: float, *, moved: bool) -> list[Action]:
        """The coordinator can be dialled. `moved`: not where its workers were told before."""
        self._listening = self._has_listened = True
        stale = tuple(name for name in self._workers if moved and name in self._up)
        actions: list[Action] = [self._stop(stale)] if stale else []
        actions += self._start_workers([name for name in self._workers if name not in self._up], now)
        return actions + ([self._start(self._ranks)] if self._ranks else [])

    def ended(self, name: str, end: End, now: float) -> list[Action]:
        self._up.discard(name)
        stopped = name in self._stopping
        self._stopping.discard(name)
        if name in self._failures:
            return self._worker_ended(name, end, now, stopped)
        if name == COORDINATOR:
            self._listening = False
            if end.code == 0:
                return [Finish(0)]
            if not stopped and end.code == INTERRUPTED:
                return [Finish(INTERRUPTED, "the coordinator was interrupted")]
            if end.code == USER_ERROR and not self._has_listened:
                return [Finish(USER_ERROR, end.said)]
        elif end.code == USER_ERROR and self._core.starts == 1 and not stopped:
            return [Finish(USER_ERROR, end.said)]
        elif end.code == 0 and not stopped and COORDINATOR in self._up:
            return []  # the coordinator has said goodbye, and ends as well
        return self._core_ended(name, end, now, stopped)

    def _core_ended(self, name: str, end: End, now: float, stopped: bool) -> list[Action]:
        actions: list[Action] = []
        if not stopped:
            if end.checkpoints - self._checkpoints:
                self._core.count = 0
            self._checkpoints |= end.checkpoints
            failures = self._core.failed(now, may_have_lasted=end.code is None)  # losing a node is not the run's fault
            if failures > self._most:
                return [Finish(1, _too_often(name, end, failures))]
            with_ranks = " with every trainer rank" if self._ranks else ""
            actions.append(Say(f"{name} {end}: the coordinator is started again{with_ranks}, and continues the run"))
            left = tuple(each for each in (COORDINATOR, *self._ranks) if each in self._up)
            self._listening = False
            if left:
                actions.append(self._stop(left))
        if not self._up & {COORDINATOR, *self._ranks}:
            pause = pause_seconds(self._core.count)
            self._core.start(now + pause)
            actions.append(self._start((COORDINATOR,), pause))
        return actions

    def _worker_ended(self, name: str, end: End, now: float, stopped: bool) -> list[Action]:
        failures = self._failures[name]
        if not stopped and self._listening:
            if end.code == 0:  # it was sent goodbye, by this coordinator or, if it is slow to end, by the one before
                return [] if self._told[name] == self._core.starts else self._start_workers([name], now)
            if end.code == USER_ERROR and failures.starts == self._core.starts == 1:
                return [Finish(USER_ERROR, end.said)]
            count = failures.failed(now, may_have_lasted=end.code != NOT_READY)
            if count > self._most:
                return [Finish(1, _too_often(name, end, count))]
            return [Say(f"{name} {end}: it is started again"), *self._start_workers([name], now, pause_seconds(count))]
        return self._start_workers([name], now) if self._listening else []

    def _start_workers(self, names: Iterable[str], now: float, delay: float = 0.0) -> list[Action]:
        names = tuple(names)
        for name in names:
            self._failures[name].start(now + delay)
            self._told[name] = self._core.starts
        return [self._start(names, delay)] if names else []

    def _start(self, names: tuple[str, ...], delay: float = 0.0) -> Start:
        self._up.update(names)
        return Start(names, delay)

    def _stop(self, names: tuple[str, ...]) -> Stop:
        self._stopping.update(names)
        return Stop(names)


def _too_often(name: str, end: End, failures: int) -> str:
    return f"{name} failed {failures} times in a row; the last time it {end}"
