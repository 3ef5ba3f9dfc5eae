"""Runs in virtual time in which a replica fails, or a weight transfer hangs, and what the other replicas did meanwhile.

The coordinator with its pools, curation and protocol messages is real; environments, replicas, the trainer and time are
simulated (`benchmarks.simulation`). The failing replica answers a request with an engine failure after 50 ms, where a
good one takes seconds; without health tracking, it would always be the least busy one and get nearly all requests.

A transfer that hangs, as over NCCL when its other end is lost, parks the engine of one of several replicas: it serves
nothing and answers nothing, ends `sync.timeout_seconds` and ten seconds later, and is started again.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from benchmarks.simulation.cluster import DECOUPLED, SetUp, simulate
from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import SimulatedReplica
from dart.config import Sync
from dart.coordinator.fleet.sessions import Fleet
from dart.v1 import session_pb2 as pb
from dart.workers.rollout.engine import GRACE_SECONDS

FAILING = "rollout-0"
FAILURE_SECONDS = 0.05
WINDOW_SECONDS = 30.0
HUNG_SET_UP = SetUp("80 environments, 4 replicas", 80, 4)
HANGS_AFTER_SECONDS = 3600.0
STARTING_SECONDS = 90.0
"""How long a replica needs for its start."""

Fails = Callable[[float, random.Random], bool]
"""Whether a request fails, given how many seconds after the replica's start it comes."""


@dataclass(slots=True)
class Requests:
    """When each replica was asked, and when the failing one served, in seconds since it began."""

    asked: dict[str, list[float]] = field(default_factory=dict)
    served: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The share of all requests that went to the failing replica."""
        return len(self.asked[FAILING]) / sum(map(len, self.asked.values()))

    def asked_within(self, name: str, start: float, end: float) -> int:
        return sum(start <= at < end for at in self.asked[name])


class FlakyReplica(SimulatedReplica):
    """The replica `FAILING` fails when `fails` says so; the others never do."""

    def __init__(self, fleet: Fleet, name: str, timings: Timings, seed: int, fails: Fails, requests: Requests) -> None:
        self._name, self._fails, self._requests = name, fails, requests
        self._luck = random.Random(f"{name}/{seed}/luck")
        requests.asked[name] = []
        super().__init__(fleet, name, timings, seed)
        self._began = self._loop.time()

    def generate(self, command: pb.Generate) -> None:
        at = self._loop.time() - self._began
        self._requests.asked[self._name].append(at)
        if self._name == FAILING and self._fails(at, self._luck):
            failure = pb.Failure(code=pb.FAILURE_CODE_ENGINE, message="CUDA error: out of memory")
            self.answer(command, FAILURE_SECONDS, failure=failure)
            return
        if self._name == FAILING:
            self._requests.served.append(at)
        super().generate(command)


@dataclass(slots=True)
class Hang:
    """What the replicas note of the transfer that hangs. Times are in seconds of the loop's clock."""

    due: float
    began: float | None = None
    serves_again: float | None = None
    asked: dict[str, list[float]] = field(default_factory=dict)
    pauses: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


class HangingReplica(SimulatedReplica):
    """The first update of `FAILING` after an hour never ends; its worker then does, and is started again."""

    def __init__(self, fleet: Fleet, name: str, timings: Timings, seed: int, hang: Hang) -> None:
        self._hang, self._again = hang, lambda: HangingReplica(fleet, name, timings, seed, hang)
        self._name, self._hung, self._updating = name, False, 0.0
        hang.asked.setdefault(name, [])
        hang.pauses.setdefault(name, [])
        super().__init__(fleet, name, timings, seed)

    def generate(self, command: pb.Generate) -> None:
        now = self._loop.time()
        self._hang.asked[self._name].append(now)
        if self._name == FAILING and self._hang.began is not None and self._hang.serves_again is None:
            self._hang.serves_again = now
        super().generate(command)

    def load_weights(self, command: pb.LoadWeights) -> None:
        now = self._updating = self._loop.time()
        if self._name == FAILING and self._hang.began is None and now >= self._hang.due:
            self._hang.began, self._hung = now, True
            self.forget()
            self._loop.call_later(Sync().timeout_seconds + GRACE_SECONDS, self._end)
            return
        super().load_weights(command)

    def answer(self, command: Any, seconds: float, **reply: Any) -> None:
        if "weights_loaded" in reply:
            self._hang.pauses[self._name].append((self._updating, self._loop.time() + seconds))
        super().answer(command, seconds, **reply)

    def carry_out(self, message: pb.SessionResponse) -> None:
        if not self._hung:
            super().carry_out(message)

    def _end(self) -> None:
        self._fleet.lose(self.worker, "its engine has failed")
        self._loop.call_later(STARTING_SECONDS, self._again)


def hung_transfer(hours: float, seed: int = 0) -> dict[str, Any]:
    """What became of a transfer that hangs; `hours` have to be enough for it and for the replica to come back."""
    hang = Hang(math.inf)

    def replica(fleet: Fleet, name: str, timings: Timings, seed: int) -> SimulatedReplica:
        hang.due = min(hang.due, asyncio.get_running_loop().time() + HANGS_AFTER_SECONDS)
        return HangingReplica(fleet, name, timings, seed, hang)

    summary = simulate(HUNG_SET_UP, DECOUPLED, Timings(failures_per_step=0.0), hours, seed, replica)
    assert hang.began is not None and hang.serves_again is not None, "the run is too short"
    start, length = hang.began, hang.serves_again - hang.began
    others = [name for name in hang.asked if name != FAILING]
    earlier = [at for at, _ in hang.pauses[FAILING] if at + length <= start]

    def serving(since: float) -> float:
        pauses = (pause for name in others for pause in hang.pauses[name])
        paused = sum(max(0.0, min(until, since + length) - max(at, since)) for at, until in pauses)
        return 1 - paused / (length * len(others))

    def asked(since: float) -> int:
        return sum(since <= at < since + length for name in others for at in hang.asked[name])

    updates = {name: sum(start <= at < start + length for at, _ in hang.pauses[name]) for name in others}
    before = mean(map(serving, earlier))
    return {
        "seed": seed,
        "seconds_until_it_serves": round(length, 1),
        "share_of_time_that_others_serve": round(serving(start), 4),
        "the_same_before": round(before, 4),
        "share_against_before": round(serving(start) / before, 4),
        "requests_of_others_against_before": round(asked(start) / mean(map(asked, earlier)), 3),
        "fewest_updates_of_another": min(updates.values()),
        "attempts_lost": summary["infrastructure_failures"],
        "given_up": summary["events"]["given_up"],
    }


def always(at: float, luck: random.Random) -> bool:
    return True


def never(at: float, luck: random.Random) -> bool:
    return False


def between(start: float, end: float) -> Fails:
    return lambda at, luck: start <= at < end


def measure(fails: Fails, hours: float, set_up: SetUp, seed: int = 0) -> tuple[dict[str, Any], Requests]:
    """The run's figures, and its requests."""
    requests = Requests()

    def replica(fleet: Fleet, name: str, timings: Timings, seed: int) -> SimulatedReplica:
        return FlakyReplica(fleet, name, timings, seed, fails, requests)

    timings = Timings(failures_per_step=0.0)
    summary = simulate(set_up, DECOUPLED, timings, hours, seed, replica)
    return {
        "trajectories_per_hour": round(summary["trajectories"] / hours, 1),
        "share_of_requests": round(requests.share, 4),
        "attempts_lost": summary["infrastructure_failures"],
        "given_up": summary["events"]["given_up"],
        "environment_seconds_at_rest": summary["time"]["env"]["seconds"].get("resting", 0.0),
    }, requests


def recovery(requests: Requests, repaired: float) -> dict[str, float | None]:
    """How soon after its repair the replica serves again; None: never."""
    served = [at for at in requests.served if at >= repaired]
    last = max(map(max, requests.asked.values()))
    other = next(name for name in requests.asked if name != FAILING)
    equal, start = None, repaired
    while equal is None and start + WINDOW_SECONDS <= last:
        asked = [requests.asked_within(name, start, start + WINDOW_SECONDS) for name in (FAILING, other)]
        equal = start + WINDOW_SECONDS - repaired if asked[0] >= 0.9 * asked[1] > 0 else None
        start += WINDOW_SECONDS
    return {"seconds_until_it_serves": round(served[0] - repaired, 1) if served else None,
            "seconds_until_an_equal_share": equal}  # fmt: skip
