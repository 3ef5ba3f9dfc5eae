"""Random histories of replicas: who takes a request, and who is updated next, whatever happens to them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dart.core.fleet.health import RETURN_SECONDS, Condition
from dart.core.fleet.invariants import validate
from dart.core.fleet.replica import Replica, Request
from dart.core.fleet.replicas import Replicas

EVENTS = ("ask", "ask", "ask", "serve", "serve", "fail", "decline", "end", "withdraw", "join", "leave", "publish",
          "publish", "resize", "settle", "begin", "pause", "update", "break", "break", "rested", "rested", "exclude",
          "second", "minute")  # fmt: skip
HISTORY = st.integers(0, 80).flatmap(
    lambda length: st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3)), min_size=length, max_size=length)
)
"""Without a length of their own, Hypothesis makes lists of eight events on average."""


class Life:
    """Plays the part of the coordinator, and checks what has to hold after every event."""

    def __init__(self, most: int = 1, together: bool = False, every: int = 1, staleness: int | None = None) -> None:
        self.replicas: Replicas[None] = Replicas(
            0.0, 0, most, together=together, every_updates=every, max_staleness=staleness
        )
        self.now = 0.0
        self.running: list[Request[None]] = []
        self.line: list[Request[None]] = []
        self.transfers: dict[Replica[None], int] = {}
        self.served: dict[Replica[None], bool] = {}
        """Whether it did when its transfer began."""
        self.resting: list[Replica[None]] = []
        self.replicas.on_change.append(self.grant)

    def grant(self) -> None:
        for request in self.replicas.grants(self.now):
            self.line.remove(request)
            self.begun(request)

    def ask(self, request: Request[None]) -> None:
        if self.replicas.take(request, self.now):
            self.begun(request)
        else:
            self.replicas.wait(request)
            self.line.append(request)

    def begun(self, request: Request[None]) -> None:
        replica = request.replica
        assert replica is not None and replica.serving and not replica.gone
        self.running.append(request)
        if replica.name in request.failed_on:
            others = [r for r in self.replicas if r.capacity > r.busy and r.name not in request.failed_on]
            assert not others, "another first, if there is one"
        if replica.health.condition is Condition.PROBING and any(r.capacity > r.busy for r in self.replicas):
            assert replica.probes == 1, "one at a time"

    def event(self, kind: str, number: int) -> None:
        replicas = self.replicas
        match kind:
            case "ask":
                self.ask(Request("abcd"[number]))
            case "serve" if self.running:
                replicas.served(self.running.pop(0), self.now)
            case "fail" if self.running:
                request = self.running.pop(0)
                replicas.failed(request, "no memory", self.now)
                self.ask(request)
            case "decline" if self.running:
                replicas.declined(request := self.running.pop(0), self.now)
                assert request.replica is not None and request.replica.name in request.failed_on
                self.ask(request)
            case "end" if self.running:
                replicas.ended(request := self.running.pop(), self.now)
                if number % 2:  # a weight update ended it
                    self.ask(request)
            case "withdraw" if self.line:
                replicas.withdraw(self.line.pop())
            case _:
                self.change(kind, number)
        self.check()

    def change(self, kind: str, number: int) -> None:
        """Of the replicas."""
        replicas, replica = self.replicas, self.replicas.get("abcd"[number])
        match kind:
            case "join":
                replicas.join("abcd"[number], 2, max(0, replicas.version - number % 2), None, self.now)
            case "leave" if replica:
                replicas.leave(replica, self.now, for_good=number % 2 == 0)
            case "resize" if replica:
                replicas.resize(replica, 1 + (replica.slots + number) % 3, self.now)
            case "publish":
                replicas.staged(replicas.newest + 1, self.now)
            case "settle":
                replicas.publish_newest(self.now)
            case "begin":
                self.begin()
            case "pause" if self.transfers:
                replicas.pause(next(iter(self.transfers)), self.now)
            case "update" if self.transfers:
                replicas.updated(*self.transfers.popitem(), self.now)
            case "break" if self.transfers or self.begin():
                self.broke(self.transfers.popitem()[0], untouched=number % 2 == 0)
            case "rested" if self.resting:
                serving = (tried := self.resting.pop(0)).serving
                replicas.update_failed(tried, self.now)
                newer = any(one.capacity and one.version > tried.version for one in replicas)
                assert newer or tried.serving == serving, "old weights serve where no newer ones do"
            case "exclude" if replica and replica.version < replicas.version:
                replicas.exclude(replica, self.now)
            case "second" | "minute":
                self.now += 1.0 if kind == "second" else 60.0
                replicas.time_passed(self.now)

    def begin(self) -> bool:
        if chosen := self.replicas.next_update():
            self.transfers[chosen[0]], self.served[chosen[0]] = chosen[1], chosen[0].serving
        return chosen is not None

    def broke(self, broken: Replica[None], *, untouched: bool) -> None:
        before, serve = broken.serving, untouched and self.served[broken]
        self.replicas.update_broke(broken, self.now, serve=serve)
        self.resting.append(broken)
        newer = any(one.capacity and one.version > broken.version for one in self.replicas)
        may = serve and not (broken.gone or broken.excluded or self.replicas.together)
        assert broken.serving == before or (may and broken.serving), "the one that went on"
        assert broken.serving or not may or newer, "old weights serve where no newer ones do"

    def check(self) -> None:
        self.grant()
        assert not self.replicas.grants(self.now), "nobody waits for what is there"
        assert self.replicas.waiting == len(self.line)
        validate(self.replicas)
        held = {id(replica): 0 for replica in self.replicas}
        for request in self.running:
            if request.replica is not None and not request.replica.gone:
                held[id(request.replica)] += 1
        assert all(replica.busy == held[id(replica)] for replica in self.replicas)

    def next_update(self) -> tuple[Replica[None], int] | None:
        """At once, or when lost replicas are not expected back any more."""
        if (chosen := self.replicas.next_update()) is None:
            self.now += RETURN_SECONDS
            self.replicas.time_passed(self.now)
            chosen = self.replicas.next_update()
        return chosen

    def finish(self) -> None:
        """All updates succeed and every request is served, however bad the replicas were."""
        while self.resting:
            self.event("rested", 0)
        while self.transfers:
            self.event("update", 0)
        while chosen := self.next_update():
            self.replicas.updated(*chosen, self.now)
        assert self.replicas.settled
        assert all(replica.serving or replica.excluded for replica in self.replicas), "none is left out for good"
        for _ in range(10 * (1 + len(self.running) + len(self.line))):
            if not self.running and not self.line:
                return
            while self.running:
                self.event("serve", 0)
            alarm = self.replicas.next_alarm(self.now)
            if self.line and alarm < float("inf"):
                self.now = alarm
                self.replicas.time_passed(alarm)
                self.check()
        raise AssertionError(f"{len(self.line)} requests wait for ever")


@settings(max_examples=300, deadline=None)
@given(HISTORY, st.integers(1, 2), st.booleans(), st.sampled_from([1, 3]), st.sampled_from([None, 0, 2]))
def test_any_history(
    events: list[tuple[str, int]], most: int, together: bool, every: int, staleness: int | None
) -> None:
    life = Life(most, together, every, staleness)
    life.event("join", 0)
    for kind, number in events:
        life.event(kind, number)
    life.event("join", 2)
    life.finish()


@settings(deadline=None)
@given(HISTORY)
def test_the_choice_is_that_of_a_pass_over_all_replicas(events: list[tuple[str, int]]) -> None:
    life = Life()
    for kind, number in events:
        life.event(kind, number)
        if any(r.health.condition is not Condition.HEALTHY for r in life.replicas):
            continue
        offers = {r.name: (r.busy + r.health.price, -r.version, r.name) for r in life.replicas if r.busy < r.capacity}
        request: Request[None] = Request()
        chosen = life.replicas.take(request, life.now)
        assert (chosen.name if chosen else None) == (min(offers, key=lambda name: offers[name]) if offers else None)
        if chosen:
            life.replicas.ended(request, life.now)
