"""Runs the watchdog: samples the run's progress, and reports stalls in the journal, health checks and status. If the
config says so, it ends a run that has made no progress for too long.

`core.watchdog` decides what is overdue, `core.culprits` what is to blame; `core.learning.diagnosis`, of a run that
moves, why nothing is learnt, which stands before the stalls and changes neither health nor the run's end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass

from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.coordinator.service.accounting import Accounting
from dart.coordinator.service.journal import Journal
from dart.coordinator.training.ranks import TRAINER
from dart.core.culprits import GROUPS, Lost, Owed, Scene, explain
from dart.core.fleet.replicas import Replicas
from dart.core.learning.diagnosis import Cause, LearningNumbers, diagnose
from dart.core.progress import Progress
from dart.core.status import LEARNING, Stall, Status
from dart.core.usage import WITHIN_EPISODE, EnvState, TrainerState
from dart.core.watchdog import Kind, Limits, Pulse, Watchdog
from dart.errors import ProcessLost
from dart.v1 import session_pb2 as pb
from dart.wire.role import ROLE_NAMES

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
LOOKS_PER_BOUND = 4
SAMPLES = {"evaluating", "collecting", "training"}
"""Phases in which it is told why nothing is learnt."""
COVERED = {Cause.FAILING: {Kind.STEP, Kind.EPISODE}, Cause.WEIGHTS: {Kind.WEIGHTS}}
"""What keeps the policy from learning → the stalls that say it better once they are due."""
PREPARING = {EnvState.BOOTING, EnvState.RENEWING, EnvState.LOST}
"""If these are the states of all environments, there is none on which an episode could be under way."""


class Stalled(ProcessLost):
    """The run has made no progress for `watchdog.end_after_seconds`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """`going_on`: episodes are wanted now. `beside`: finished episodes other than those of training."""

    going_on: bool
    beside: int = 0
    paused: bool = False


class Watch:
    """`wanted`: by role, the number of workers that the run cannot do without. `health`: called when health changes."""

    def __init__(
        self,
        settings: config.Config,
        wanted: Mapping[str, int],
        fleet: Fleet,
        envs: EnvPool,
        replicas: Replicas[Worker],
        accounting: Accounting,
        progress: Progress,
        journal: Journal,
        *,
        sampled: Callable[[], Sampled],
        status: Callable[[], Status],
        health: Callable[[bool], Awaitable[None]],
        unstored: Callable[[], tuple[float, str]] = lambda: (0.0, ""),
    ) -> None:
        """`unstored`: how long and why what has finished has waited to be stored."""
        bounds = settings.watchdog
        self._settings, self._wanted = settings, wanted
        self._envs, self._fleet, self._replicas, self._accounting = envs, fleet, replicas, accounting
        self._progress, self._journal = progress, journal
        self._sampled, self._status, self._health, self._unstored = sampled, status, health, unstored
        seconds = bounds.start_seconds, bounds.sampling_seconds, bounds.update_seconds, bounds.weights_seconds
        self._watchdog = Watchdog(Limits(*seconds, bounds.factor), time.monotonic())
        ends = [bounds.end_after_seconds] if bounds.end_after_seconds else []
        self._pause = min(LOOK_SECONDS, min((*seconds, *ends)) / LOOKS_PER_BOUND)
        self._ready = 0
        self._fates: tuple[int, Mapping[str, int]] = (-1, {})
        """The number of updates, and the fates of trajectories when the last one was made."""
        self._lost, self._serves = Lost(), True
        self._phase = ""
        self._found: dict[Cause, float] = {}
        """What keeps the policy from learning, and since when."""
        self.stalls: tuple[Stall, ...] = ()
        """Those found by the last `look`, first why nothing is learnt."""
        self._untold: tuple[Stall, ...] = ()
        """A stall that is due, while `stalls` say what causes it."""
        fleet.on_ready.append(self._joined)
        fleet.on_lost.append(self._left)

    def quiet(self) -> dict[str, float]:
        """Seconds since each kind of progress."""
        return {name: round(seconds, 1) for name, seconds in self._watchdog.quiet(time.monotonic()).items()}

    async def run(self) -> None:
        """Runs until cancelled. Raises Stalled if the config wants a stalled run to end."""
        while True:
            await self.look()
            await asyncio.sleep(self._pause)

    async def look(self) -> None:
        now, before = time.monotonic(), self.stalls
        overdue = self._watchdog.look(self._pulse(now), now)
        scene = self._scene(now) if overdue else None
        stalls = [explain(one, scene) for one in overdue] if scene else []
        # Whether it is chance that no group can be trained on, and why not, is for the diagnosis alone to say.
        undecided = [one for one in stalls if one.kind == Kind.BATCH and one.culprit == GROUPS]
        due = [one for one in stalls if one not in undecided]
        found = self._learning(now, {one.kind for one in due})
        lasts = any(not one.deliberate for one in found)
        self.stalls, self._untold = (*found, *due), tuple(undecided) if lasts else ()
        self._tell(before)
        serving = not any(map(self._stops, (*self.stalls, *self._untold)))
        if serving != self._serves:
            self._serves = serving
            await self._health(serving)
        self._end_when_long()

    def _tell(self, before: tuple[Stall, ...]) -> None:
        known = {stall.name: (stall.culprit, stall.deliberate) for stall in before}
        now = {stall.name for stall in self.stalls}
        for stall in self.stalls:
            news = known.get(stall.name) != (stall.culprit, stall.deliberate)
            # Of weights the name has the culprit: whether the trainer is sending at the moment is no news.
            if stall.name not in known or (stall.kind != Kind.WEIGHTS and news):
                since = "" if stall.kind == LEARNING else f"{stall.seconds:.0f} s without progress: "
                log.warning("%s%s", since, stall.told)
                self._journal.event("stalled", **asdict(stall))
        for stall in before:
            if stall.name not in now:
                self._journal.event("moving", kind=stall.kind, culprit=stall.culprit)

    def _stops(self, stall: Stall) -> bool:
        """Whether it keeps the run from moving. A replica without the newest weights does not while updates go on."""
        bounds = self._settings.watchdog
        usual = max(bounds.weights_seconds, bounds.factor * self._progress.slowest_update)
        goes_on = stall.kind == Kind.WEIGHTS and (self._progress.paused or self._since_update() < usual)
        return not (stall.deliberate or goes_on or stall.kind == LEARNING)

    def _since_update(self) -> float:
        return self._watchdog.quiet(time.monotonic()).get("update", math.inf)

    def _seconds(self, stall: Stall) -> float:
        """For how long the run has not moved because of it."""
        return min(stall.seconds, self._since_update()) if stall.kind == Kind.WEIGHTS else stall.seconds

    def _end_when_long(self) -> None:
        bounds = self._settings.watchdog
        stops = (one for one in (*self.stalls, *self._untold) if self._stops(one))
        longest = max(stops, key=self._seconds, default=None)
        if bounds.end_after_seconds and longest and self._seconds(longest) >= bounds.end_after_seconds:
            last = f", whose last failure was: {longest.failure}" if longest.failure else ""
            raise Stalled(
                f"no progress for {self._seconds(longest):.0f} s: {longest.told}{last}: {longest.advice}",
                exit_code=bounds.exit_code,
            )

    # ---- learning ----

    def _learning(self, now: float, stalled: set[str]) -> tuple[Stall, ...]:
        """What keeps the policy from learning, as far as no stall of these kinds says so."""
        if self._progress.phase != self._phase:
            self._phase = self._progress.phase
            self._envs.attempts.restart()
        found = diagnose(self._learning_numbers(now)) if self._phase in SAMPLES else []
        told = [one for one in found if not stalled & COVERED.get(one.cause, set())]
        self._found = {one.cause: self._found.get(one.cause, now) for one in told}
        return tuple([one.stall(now - self._found[one.cause]) for one in told])

    def _learning_numbers(self, now: float) -> LearningNumbers:
        progress, settings = self._progress, self._settings
        curates = self._phase == "training" and settings.algorithm != "sft"
        replica = min(self._replicas.wanted, key=lambda one: one.health.breaks, default=None)
        return LearningNumbers(
            now,
            self._envs.attempts.numbers(),
            progress.curation.groups() if curates else None,
            progress.curation.updates(),
            progress.success_rate,
            settings.trainer.gradient_clip,
            replica.health.breaks if replica else 0,
            replica.session.last_failure if replica else "",
        )

    # ---- facts ----

    def _pulse(self, now: float) -> Pulse:
        progress, sampled, pace = self._progress, self._sampled(), self._envs.pace
        if self._fates[0] != progress.counts.updates:
            self._fates = progress.counts.updates, progress.counts.fates
        states = self._envs.usage.counts()
        trainer = self._accounting.trainer.counts(TRAINER)
        failed = any(one.offered is not None and one.offered.reason for one in self._fleet.of_role(pb.ROLE_ENV))
        boots = not failed and states.keys() <= PREPARING
        failures = [self._envs.failures(one.id) for one in self._fleet.of_role(pb.ROLE_ENV) if one.slots]
        per_update = self._settings.trainer.trajectories_per_update
        return Pulse(
            phase=progress.phase,
            ready=self._ready,
            answers=pace.answers,
            unstored=self._unstored()[0],
            episodes=progress.counts.trajectories + sampled.beside,
            failures=sum(failures) if all(failures) else 0,
            updates=progress.counts.updates,
            trainer=next((str(s) for s in (TrainerState.TRAINING, TrainerState.SAVING) if trainer.get(s)), ""),
            version=self._replicas.version,
            versions={one.name: one.version for one in self._replicas.wanted},
            environments=self._envs.slots,
            sampling=sampled.going_on,
            busy=any(states.get(state) for state in WITHIN_EPISODE),
            held_back=self._envs.usage.cause(EnvState.IDLE),
            paused=sampled.paused,
            trajectories_per_update=per_update if progress.phase == "training" else 0,
            slowest_trajectory=progress.slowest_trajectory or pace.mean * self._settings.curation.step_limit,
            slowest_update=progress.slowest_update,
            seconds_per_step=pace.slowest,
            longest_answer=self._longest("reset", "act"),
            longest_boot=self._longest("boot", "renew") if boots else 0.0,
        )

    def _longest(self, *verbs: str) -> float:
        """How long one of these may take, as the env workers say of their worlds; 0 if none says it."""
        workers = self._fleet.of_role(pb.ROLE_ENV)
        return max((worker.ready.longest_seconds.get(verb, 0.0) for worker in workers for verb in verbs), default=0.0)

    def _scene(self, now: float) -> Scene:
        owed = {worker.id: self._owed(worker, now) for worker in self._fleet.workers.values()}
        held_back = self._envs.usage.cause(EnvState.IDLE)
        return Scene(self._status(), self._wanted, owed, self._lost, held_back, self._unstored()[1], self._fates[1])

    def _owed(self, worker: Worker, now: float) -> Owed:
        command, seconds = worker.end.oldest(now)
        label = f"{worker.id} (rank {worker.hello.rank})" if worker.role == pb.ROLE_TRAIN else worker.id
        return Owed(label, command, seconds, self._envs.failures(worker.id), worker.last_failure)

    def _joined(self, worker: Worker) -> None:
        self._ready += 1
        self._lost.joined(ROLE_NAMES[worker.role], worker.id)

    def _left(self, worker: Worker) -> None:
        if not worker.said_goodbye:
            self._lost.left(ROLE_NAMES[worker.role], worker.id, worker.why_lost)
