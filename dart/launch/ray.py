"""`dart launch ray`: a run on a Ray cluster.

An actor holds the place of each process, with its cores and GPUs, and supervises it (`dart.launch.supervisor`). This
driver is the run's only mind: it waits for what happens, asks `dart.launch.restarts` what follows, and does it. Actors
are never restarted by Ray itself: one that is lost with its node is made again here, and Ray finds it another place.

Only the coordinator's and the trainer's nodes need RUN: how to dial the coordinator is read by its actor and handed to
the others by this process, in memory.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from dart import __version__
from dart.config import Config, load
from dart.errors import INTERRUPTED, USER_ERROR, UserError
from dart.inspection.condition import go_on
from dart.launch.plan import Group, ending_seconds, plan
from dart.launch.ray_cluster import Actor, RayCluster
from dart.launch.restarts import COORDINATOR, Action, End, Finish, Restarts, Say, Start, Stop
from dart.launch.supervisor import FILES, Listening, Order, Place, Unusable
from dart.processes.secrets import AUTHORITY
from dart.processes.settings import ending_signals
from dart.rundir import HERE, RunDirectory
from dart.store.records import RunKind
from dart.wire.channel import TOKEN_ENVIRONMENT

LOOK_SECONDS = 0.5
"""How soon a signal or a delayed start is noticed."""
WAITING_SECONDS = 30.0
"""A process that has had no place for this long is reported."""
WORKER_SECONDS = 10.0
"""Time to end after SIGTERM, of replicas and trainer ranks."""
GOODBYE_SECONDS = 10.0
"""Time for workers to end after the coordinator's goodbye."""
CONFIG = "config.yaml"


@dataclass(slots=True)
class Process:
    """One process of the run, and the actor that has its place. `rank`: of a trainer rank, else its number."""

    name: str
    group: Group
    rank: int
    actor: Actor | None = None
    place: Place | None = None
    starts: int = 0
    running: bool = False
    asked: float | None = None
    """When a place was asked for, while there is none."""

    @property
    def worker_id(self) -> str:
        return self.group.name(self.rank)


@dataclass(frozen=True, slots=True)
class _Awaited:
    """What a pending answer of an actor is about."""

    process: Process
    actor: Actor
    start: int


def processes_of(groups: tuple[Group, ...]) -> dict[str, Process]:
    """By name: of a rank among several, train-N; else as the coordinator knows it."""
    found = [
        Process(f"train-{n}" if group.part == "train" and group.count > 1 else group.name(n), group, n)
        for group in groups
        for n in range(group.count)
    ]
    return {process.name: process for process in found}


def words(process: Process, run: str, host: str, address: str) -> tuple[str, ...]:
    """The command line after `dart`."""
    if process.group.part == "coordinator":
        return ("coordinator", f"{FILES}/{CONFIG}", "--run", run, "--host", host, "--quiet")
    authority = ("--tls-ca", f"{FILES}/{AUTHORITY}")
    return ("worker", "--role", process.group.part, "--id", process.worker_id, "--coordinator", address, *authority)


def rank_environment(process: Process, first: Place) -> dict[str, str]:
    """The environment of a trainer rank; `first`: where rank 0 is, which has the meeting point and sends weights."""
    transfer = {"DART_TRANSFER_HOST": first.host}
    if process.group.count == 1:
        return transfer
    return transfer | {
        "RANK": str(process.rank),
        "WORLD_SIZE": str(process.group.count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": first.host,
        "MASTER_PORT": str(first.port),
    }


def launch(config_file: Path, overrides: tuple[str, ...], run: Path | None, *, dry_run: bool) -> None:
    """Returns when the run is finished; exits with 130 when it was interrupted. Raises UserError."""
    config = load(config_file, overrides)
    if config.server.tls_client_ca is not None:
        raise UserError("server.tls_client_ca: `dart launch ray` gives workers no certificates: remove it; they prove "
                        "themselves with tokens")  # fmt: skip
    groups = plan(config)
    if dry_run:
        click.echo(yaml.safe_dump(_described(config, groups, run), sort_keys=False, width=1000), nl=False)
        return
    with RayCluster.joined(config.cluster.ray, groups) as cluster, _signals() as signals:
        given = [word for override in overrides for word in ("--set", override)]
        again = ("dart", "launch", "ray", str(config_file.absolute()), *given, "--run", HERE)
        end = Driver(config, groups, run, cluster, signals, again=again).run()
    if end.code in {0, INTERRUPTED}:
        say(end.message)
        sys.exit(end.code)
    raise UserError(end.message, exit_code=end.code)


def say(text: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {text}")


def _described(config: Config, groups: tuple[Group, ...], run: Path | None) -> list[dict[str, object]]:
    where = str(run.absolute() if run else config.run.directory.absolute() / f"{config.run.name}-TIME")
    described: list[dict[str, object]] = []
    for group in groups:
        process = Process(group.part, group, 0)
        command = ["dart", *words(process, where, "NODE", "COORDINATOR:PORT")]
        one = {"group": group.part, "count": group.count, "cpus": group.needs.cpus, "gpus": group.gpus}
        memory = {"memory_gb": group.needs.memory_gb} if group.needs.memory_gb else {}
        resource = {"resource": config.cluster.ray.coordinator_resource} if group.part == "coordinator" else {}
        environment = dict(group.environment)
        if group.part == "train":
            environment |= rank_environment(process, Place("HOST_OF_RANK_0", 0, ""))
            environment |= {"RANK": "N", "MASTER_PORT": "FREE_PORT"} if group.count > 1 else {}
        shown = {"environment": environment} if environment else {}
        described.append({**one, **memory, **resource, **shown, "command": " ".join(command).replace(FILES, "FILES")})
    return described


class _Signals(list[int]):
    """Signals that have arrived and end the run."""


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    arrived = _Signals()

    def note(number: int, frame: object) -> None:
        arrived.append(number)
        if len(arrived) > 1 and number == signal.SIGINT:  # a terminal that closes may send more than one other
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in ending_signals()}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(slots=True)
class Driver:
    config: Config
    groups: tuple[Group, ...]
    wanted_run: Path | None
    cluster: RayCluster
    signals: _Signals
    processes: dict[str, Process] = field(init=False)
    restarts: Restarts = field(init=False)
    listening: Listening | None = None
    run_directory: str = ""
    end: Finish | None = None
    again: tuple[str, ...] = ()
    """The command that continues the run."""
    _pending: dict[Any, _Awaited] = field(default_factory=dict)
    _later: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processes = processes_of(self.groups)
        named = {part: [name for name, each in self.processes.items() if each.group.part == part] for part in
                 ("env", "rollout", "train")}  # fmt: skip
        most = self.config.cluster.ray.restarts
        self.restarts = Restarts(named["env"] + named["rollout"], named["train"], most)

    def run(self) -> Finish:
        """How the run ended. Whatever happens, no process and no place is left."""
        try:
            self.cluster.reserve(say, lambda: bool(self.signals))
            self._act(self.restarts.begin(time.monotonic()))
            while self.end is None and not self.signals:
                self._start_what_is_due()
                for awaited, value in self._answers(LOOK_SECONDS):
                    self._answered(awaited, value)
                self._report_waiting()
            end = self.end or Finish(INTERRUPTED, self._interrupted())
        finally:
            self._end_all()
        return end if end.code else Finish(0, f"the run is finished: {self.run_directory}")

    # ---- answers ----

    def _answers(self, seconds: float) -> list[tuple[_Awaited, object]]:
        """What has been answered within that time; an End without a code where the actor is lost."""
        answers = self.cluster.answered(list(self._pending), seconds)
        return [(self._pending.pop(reference), value) for reference, value in answers]

    def _await(self, process: Process, reference: object) -> None:
        assert process.actor is not None
        self._pending[reference] = _Awaited(process, process.actor, process.starts)

    def _answered(self, awaited: _Awaited, value: object) -> None:
        process = awaited.process
        if process.actor is not awaited.actor:
            return  # of an actor that is given up
        match value:
            case Place():
                self._placed(process, value)
            case Unusable(why):
                self._unusable(process, why)
            case Listening() if process.running and awaited.start == process.starts:
                moved = self.listening is not None and self.listening != value
                self.listening = value
                say(f"the coordinator listens on {value.address}")
                if self.config.dashboard.enabled and process.starts == 1:
                    say(f"the dashboard's address is in {RunDirectory(Path(self.run_directory)).dashboard}")
                self._act(self.restarts.listening(time.monotonic(), moved=moved))
            case (str(directory), str(problem)):
                if problem:
                    self.end = Finish(USER_ERROR, problem)
                else:
                    self.run_directory = directory
                    say(f"run {directory}")
                    self._run(process)
            case End():
                self._ended(process, value)

    def _placed(self, process: Process, place: Place) -> None:
        if place.release != __version__:
            remedy = "install the same release there"
            self._unusable(process, f"{place.host} has dart {place.release}, and this machine {__version__}: {remedy}")
            return
        process.place, process.asked = place, None
        say(f"{process.name}: on {place.node}")
        if process.group.part != "train":
            self._run(process)
        elif all(rank.place for rank in self._ranks()):
            for rank in self._ranks():
                self._run(rank)

    def _unusable(self, process: Process, why: str) -> None:
        """Before it has ever run it is the user's error; later a node has joined that needs a repair, or is left."""
        if not process.starts:
            self.end = self.end or Finish(USER_ERROR, why)
            return
        self._give_up(process)
        say(f"{process.name}: {why}; a place for it is asked for again in {WAITING_SECONDS:g} s")
        self._later.append((time.monotonic() + WAITING_SECONDS, (process.name,)))

    def _ended(self, process: Process, end: End) -> None:
        process.running = False
        if end.code is None:
            self._give_up(process)
        if self.end is None:
            self._act(self.restarts.ended(process.name, end, time.monotonic()))

    # ---- actions ----

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Say(text):
                    say(text)
                case Finish():
                    self.end = action
                case Start(names, seconds):
                    self._later.append((time.monotonic() + seconds, names))
                case Stop(names):
                    for name in names:
                        self._stop(self.processes[name])

    def _start_what_is_due(self) -> None:
        now = time.monotonic()
        due = [names for at, names in self._later if at <= now]
        self._later = [(at, names) for at, names in self._later if at > now]
        for names in due:
            for name in names:
                self._place(self.processes[name])

    def _place(self, process: Process) -> None:
        """Ask for a place, or ask again whether the one that it has is still there."""
        process.place = None
        if process.actor is None:
            process.asked = time.monotonic()
            process.actor = self.cluster.actor(process.group, process.rank, f"{self.config.run.name}/{process.name}")
        self._await(process, self.cluster.ask_place(process.actor))

    def _run(self, process: Process) -> None:
        assert process.actor is not None and process.place is not None
        first = process.group.part == "coordinator" and not self.run_directory
        if first:
            run = str(self.wanted_run.absolute()) if self.wanted_run else None
            parent = str(self.config.run.directory.absolute())
            self._await(process, process.actor.directory.remote(run, parent, self.config.run.name))
            return
        process.starts += 1
        process.running = True
        self._await(process, process.actor.run.remote(process.starts, self._order(process)))
        if process.group.part == "coordinator":
            self._await(process, process.actor.listening.remote(process.starts, self.run_directory))

    def _order(self, process: Process) -> Order:
        assert process.place is not None
        listening, part = self.listening, process.group.part
        if part == "coordinator":
            environment: dict[str, str] = {}
            files = {CONFIG: self.config.as_yaml()}
        else:
            assert listening is not None
            environment = {**process.group.environment, TOKEN_ENVIRONMENT: listening.tokens[part]}
            files = {AUTHORITY: listening.authority}
        if part == "train" and (first := self._ranks()[0].place):
            environment |= rank_environment(process, first)
        address = listening.address if listening else ""
        line = words(process, self.run_directory, process.place.host, address)
        if part == "coordinator" and self.again:
            line += ("--again", shlex.join(self.again))
        return Order(
            process.name, line, self.run_directory,
            str(Path.cwd()), self.config.retention.log_bytes, environment, files,
        )  # fmt: skip

    def _stop(self, process: Process) -> None:
        """Its End arrives when it has ended; at once if it was not running yet."""
        seconds = self._ending_seconds(process)
        if process.running and process.actor is not None:
            self._await(process, process.actor.stop.remote(process.starts, seconds))
            return
        self._later = [
            (at, left) for at, names in self._later if (left := tuple(n for n in names if n != process.name))
        ]
        self._ended(process, End(None, "it had not started"))

    def _ending_seconds(self, process: Process) -> float:
        """How long it may take to end after SIGTERM."""
        match process.group.part:
            case "coordinator":
                return ending_seconds(self.config)
            case "env":
                return self.config.environment.timeouts.ending
            case _:
                return WORKER_SECONDS

    def _give_up(self, process: Process) -> None:
        if process.actor is not None:
            self.cluster.kill(process.actor)
        process.actor, process.place, process.asked = None, None, None

    # ---- the end ----

    def _end_all(self) -> None:
        """The coordinator first, which saves and sends its workers goodbye; then whatever is left."""
        self._later.clear()
        self.end = self.end or Finish(INTERRUPTED)
        with contextlib.suppress(KeyboardInterrupt):  # the user's second Ctrl-C: what is left dies with its actor
            coordinator = self.processes[COORDINATOR]
            if coordinator.running:
                say("stopping the coordinator")
                self._stop(coordinator)
                self._wait_for([coordinator], 2 * ending_seconds(self.config))
            self._wait_for(list(self.processes.values()), GOODBYE_SECONDS)
            left = [process for process in self.processes.values() if process.running]
            for process in left:
                self._stop(process)
            self._wait_for(left, WORKER_SECONDS + max(map(self._ending_seconds, left), default=0.0))
        for process in self.processes.values():
            self._give_up(process)

    def _wait_for(self, ending: list[Process], seconds: float) -> None:
        until = time.monotonic() + seconds
        while any(process.running for process in ending) and time.monotonic() < until:
            for awaited, value in self._answers(LOOK_SECONDS):
                if isinstance(value, End) and awaited.process.actor is awaited.actor:
                    self._ended(awaited.process, value)

    def _interrupted(self) -> str:
        if not self.run_directory:
            return "interrupted"
        return f"interrupted; {go_on(RunKind.TRAINING, Path(self.run_directory), self.again)}"

    def _report_waiting(self) -> None:
        for process in self.processes.values():
            if process.asked is not None and time.monotonic() - process.asked > WAITING_SECONDS:
                process.asked = None
                say(f"{process.name} has no place yet: {self.cluster.wanted(process.group)}")

    def _ranks(self) -> list[Process]:
        return [process for process in self.processes.values() if process.group.part == "train"]
