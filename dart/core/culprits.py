"""What keeps the run from moving: turns what is overdue, and the state of every worker, into a readable `Stall`.

The rules, in this order: a worker that is missing; a worker whose attempts all fail, with its last failure in its own
words; the worker that has owed an answer for longest; else what the environments themselves wait for. Pure:
`core.watchdog` decides when to ask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dart.core.curation.judging import STALE
from dart.core.fates import cause_of
from dart.core.status import Stall, Status, WorkerStatus
from dart.core.watchdog import Kind, Overdue

SAMPLERS = ("env", "rollout")
MOST_LOST, MOST_NAMED = 100, 3
"""How many lost workers of a role are remembered, and how many of them a stall names."""
GROUPS = "groups"
"""The culprit where no update begins for what the groups' roll-outs came to."""
END_TRAINER = "if it hangs, end that process: `dart train` then resumes by itself, other runs need --resume"


@dataclass(frozen=True, slots=True)
class Owed:
    """What the coordinator knows about a worker besides its status."""

    label: str
    """Its name, and its rank if it has one."""
    command: str = ""
    """The kind of its oldest command without an answer; empty when it owes nothing."""
    seconds: float = 0.0
    """How long it has owed it."""
    failures: int = 0
    """Its failed attempts since the last good one."""
    last_failure: str = ""
    """In the worker's own words."""


class Lost:
    """Workers that were lost and have not come back, and why: the newest of each role.

    A name that holds a process id, or a pod's, never comes back, so their number grows with every preemption.
    """

    def __init__(self) -> None:
        self._why: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """By role and name, oldest first."""

    def left(self, role: str, name: str, why: str) -> None:
        workers = self._why[role]
        workers.pop(name, None)
        workers[name] = why
        if len(workers) > MOST_LOST:
            del workers[next(iter(workers))]

    def joined(self, role: str, name: str) -> None:
        self._why[role].pop(name, None)

    def told(self, roles: Sequence[str]) -> str:
        """The newest few of these roles, newest first, and how many more; "" if there are none."""
        said = []
        for role in roles:
            workers = self._why.get(role, {})
            said += [f"{name} is lost: {why}" for name, why in islice(reversed(workers.items()), MOST_NAMED)]
            if (more := len(workers) - MOST_NAMED) > 0:
                least = "at least " if len(workers) == MOST_LOST else ""
                said.append(f"{least}{more} more {role} workers were lost before")
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that may explain a stall, as of now."""

    status: Status
    wanted: Mapping[str, int] = field(default_factory=dict)
    """By role: how many workers the run needs."""
    owed: Mapping[str, Owed] = field(default_factory=dict)
    """By worker."""
    lost: Lost = field(default_factory=Lost)
    held_back: str = ""
    unstored: str = "the store, which is away"
    """Why nothing can be stored, if nothing can."""
    before: Mapping[str, int] = field(default_factory=dict)
    """The fates of trajectories when the last update was made."""

    def workers(self, *roles: str) -> list[WorkerStatus]:
        return [worker for worker in self.status.workers if worker.role in roles]

    def of(self, worker: WorkerStatus) -> Owed:
        return self.owed.get(worker.worker_id, Owed(worker.worker_id))

    def ready(self, role: str) -> int:
        """Workers of the role that can be used: of env workers, those with at least one booted environment."""
        return sum(one.state in ("ready", "syncing") and not _bare(one) for one in self.workers(role))


def explain(overdue: Overdue, scene: Scene) -> Stall:
    """What waits, for whom, since when, why, and what a person can do."""
    match overdue.kind:
        case Kind.STORE:
            return Stall(
                overdue.kind, "storing what has finished", scene.unstored, overdue.seconds, "the coordinator's machine",
                advice="the run goes on by itself once that is mended, and ends after run.database_wait_seconds",
            )  # fmt: skip
        case Kind.START:
            return _missing(overdue, scene, "the start of the run", _lacking(scene))
        case Kind.STEP | Kind.EPISODE:
            return _sampling(overdue, scene)
        case Kind.BATCH:
            return _dropped(overdue, scene)
        case Kind.TRAINER:
            return _trainer(overdue, scene)
        case Kind.WEIGHTS:
            return _weights(overdue, scene)
        case Kind.HELD:
            return Stall(
                overdue.kind, "sampling", f"the trainer: {scene.held_back}", overdue.seconds, "the trainer",
                advice="this is a bug in the coordinator: report it with coordinator.log, then continue with --resume",
            )  # fmt: skip
        case Kind.PAUSED:
            return Stall(
                overdue.kind, "sampling", "a person: the run was paused", overdue.seconds, "a person",
                advice="resume it with `dart control resume` or in the dashboard", deliberate=True,
            )  # fmt: skip


def _bare(worker: WorkerStatus) -> bool:
    """True for an env worker with no environment that has booted or been renewed."""
    return worker.role == "env" and worker.state == "ready" and worker.slots == 0


def _lacking(scene: Scene) -> list[str]:
    return [role for role, number in scene.wanted.items() if scene.ready(role) < number]


def _missing(overdue: Overdue, scene: Scene, what: str, roles: Sequence[str]) -> Stall:
    """Describe the workers that are absent or not ready."""
    waits_for = " and ".join(_absent(scene, role) for role in roles) or "the next worker"
    failed = scene.lost.told(roles) or next(
        (f.last_failure for w in scene.workers(*roles) if (f := scene.of(w)).last_failure), ""
    )
    address = scene.status.control_address or "ADDRESS"
    start = " or ".join(f"dart worker --role {role} --coordinator {address}" for role in roles)
    advice = f"look at its log (logs/ in the run directory, for a worker of this machine), or start one with: {start}"
    return Stall(overdue.kind, what, waits_for, overdue.seconds, ", ".join(roles), failed, advice)


def _absent(scene: Scene, role: str) -> str:
    wanted, ready = scene.wanted[role], scene.ready(role)
    starting = ", ".join(worker.worker_id for worker in scene.workers(role) if worker.state == "starting")
    bare = ", ".join(worker.worker_id for worker in scene.workers(role) if _bare(worker))
    if bare:
        how = f"{bare} dialled in but has no environment ready"
    else:
        how = f"{starting} dialled in but is still preparing" if starting else "not dialled in"
    return f"{wanted - ready} of {wanted} {role} workers ({how})"


def _sampling(overdue: Overdue, scene: Scene) -> Stall:
    what = f"sampling ({'no environment answers' if overdue.kind is Kind.STEP else 'no episode finishes'})"
    if gone := [role for role in SAMPLERS if scene.wanted.get(role) and not scene.ready(role)]:
        return _missing(overdue, scene, what, gone)
    environments = scene.workers("env")
    failing = max(environments, key=lambda worker: scene.of(worker).failures, default=None)
    if failing is not None and (facts := scene.of(failing)).failures and facts.failures >= failing.slots:
        return Stall(
            overdue.kind, what, f"a successful attempt: the last {facts.failures} on {facts.label} all failed",
            overdue.seconds, facts.label, facts.last_failure,
            f"look at the log of {facts.label}, and run `dart doctor` on its machine",
        )  # fmt: skip
    if debtor := _debtor(scene, SAMPLERS):
        return _unanswered(overdue, what, debtor, "its attempt is given up after server.reply_timeout_seconds, "
                           "or its world's own time limit; end the worker to restart it now")  # fmt: skip
    doing = scene.status.doing.get("env", "")
    if any(state in doing for state in ("renewing", "booting")) and "queued" not in doing:
        advice = "look at the env workers' logs; an environment that exceeds the world's timeouts is restarted"
        return Stall(overdue.kind, what, f"environments, which are {doing}", overdue.seconds, "the environments",
                     advice=advice)  # fmt: skip
    return Stall(overdue.kind, what, f"replicas: the environments are {doing}", overdue.seconds, "the queue of turns",
                 advice="add replicas, or look at the replicas' logs")  # fmt: skip


def _trainer(overdue: Overdue, scene: Scene) -> Stall:
    debtors = [scene.of(worker) for worker in scene.workers("train") if scene.of(worker).command]
    saves = any(one.command == "save_checkpoint" for one in debtors)
    what = "a checkpoint" if saves else f"update {scene.status.figures.counts.updates + 1}"
    advice = f"look at logs/train*.log; {END_TRAINER}"
    if not debtors:
        return Stall(overdue.kind, what, "the trainer", overdue.seconds, "train", advice=advice)
    worst = max(debtors, key=lambda one: one.seconds)
    return _unanswered(overdue, what, debtors if len(debtors) > 1 else [worst], advice)


def _weights(overdue: Overdue, scene: Scene) -> Stall:
    version = scene.status.figures.counts.version
    if not overdue.subject:
        return _unsent(overdue, scene, version)
    worker = next((one for one in scene.workers("rollout") if one.worker_id == overdue.subject), None)
    facts = scene.of(worker) if worker else Owed(overdue.subject)
    has = f", which has version {worker.weight_version}" if worker else ""
    owes = f" and has not answered {facts.command} for {facts.seconds:.0f} s" if facts.command else ""
    waits_for, culprit = f"replica {facts.label}{has}{owes}", facts.label
    for sender in _debtor(scene, ["train"], "send_weights"):  # either may hold the other up
        waits_for += f"; {sender.label} has not answered {sender.command} for {sender.seconds:.0f} s"
        culprit += f", {sender.label}"
    return Stall(
        overdue.kind, f"version {version}", waits_for, overdue.seconds, culprit,
        facts.last_failure, f"look at the log of {facts.label}, and whether it reaches the trainer's machine "
        "(docs/machines.md); end it if it hangs: it will be replaced",
    )  # fmt: skip


def _unsent(overdue: Overdue, scene: Scene, version: int) -> Stall:
    """None of several replicas gets the version, so it is not they."""
    trainer = _debtor(scene, ["train"]) or [scene.of(worker) for worker in scene.workers("train")] or [Owed("train")]
    facts = trainer[0]
    owes = f", and which has not answered {facts.command} for {facts.seconds:.0f} s" if facts.command else ""
    return Stall(
        overdue.kind, f"version {version}", f"{facts.label}, whose weights reach no replica{owes}", overdue.seconds,
        facts.label, facts.last_failure, f"look at the log of {facts.label}, and whether replicas reach its machine "
        f"(docs/machines.md); {END_TRAINER}",
    )  # fmt: skip


def _dropped(overdue: Overdue, scene: Scene) -> Stall:
    fates = {name: count - scene.before.get(name, 0) for name, count in scene.status.figures.counts.fates.items()}
    lost = [fate for fate, count in fates.items() if count > 0 and cause_of(fate) is not None]
    worst = max(lost, key=lambda fate: fates[fate], default="nothing yet")
    culprit = GROUPS if lost and cause_of(worst) != STALE else "curation"
    advice = "look at some trajectories (`dart show`), and choose other tasks (environment.tasks)"
    if cause_of(worst) == STALE:
        advice = (
            "what replicas sample is too old when its turn to be trained on comes: see in `dart status` which replica "
            "lacks the newest weights, or raise curation.max_staleness or sync.max_unavailable"
        )
    waits_for = f"groups that can be trained on; most trajectories since the last one were {worst}"
    return Stall(overdue.kind, "the next update", waits_for, overdue.seconds, culprit, advice=advice)


def _debtor(scene: Scene, roles: Sequence[str], command: str = "") -> list[Owed]:
    """The worker that has owed an answer for the longest time, if any. `command`: to this kind alone."""
    owed = [scene.of(worker) for worker in scene.workers(*roles)]
    owing = [one for one in owed if one.command and command in ("", one.command)]
    return [max(owing, key=lambda one: one.seconds)] if owing else []


def _unanswered(overdue: Overdue, what: str, debtors: Sequence[Owed], advice: str) -> Stall:
    names = ", ".join(one.label for one in debtors)
    owed = max(debtors, key=lambda one: one.seconds)
    have = "have" if len(debtors) > 1 else "has"
    return Stall(
        overdue.kind, what, f"{names}, which {have} not answered {owed.command} for {owed.seconds:.0f} s",
        overdue.seconds, names, owed.last_failure, advice,
    )  # fmt: skip
