"""What a run is doing, as one record, used for Control's answers, events, summaries and terminals.

`coordinator.service.status` builds it, `wire.status` converts it to and from its message field by field (names are the
same in both), `inspection.wording` turns it into text. To add a live number, add a counter to `core.progress` or a
field here, the line that counts it, and a field of the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from dart.core.json_text import JSON
from dart.core.progress import Counts


@dataclass(frozen=True, slots=True)
class Usage:
    """Utilisation (shares from 0 to 1) and throughput, since training began or was last resumed."""

    env_utilisation: float = 0.0
    rollout_utilisation: float = 0.0
    trainer_utilisation: float = 0.0
    trained_actions_per_minute: float = 0.0
    sampled_actions_per_minute: float = 0.0
    trained_tokens_per_minute: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """A training run in numbers. `to_json` is the form in an "update" event, and `from_json` reads it back."""

    counts: Counts = field(default_factory=Counts)
    usage: Usage = field(default_factory=Usage)
    success_rate: float | None = None
    """Success rate of the last `stop.window` training trajectories; None before the first, and for imitation."""
    success_by_task: Mapping[str, float] = field(default_factory=dict)
    train_seconds: float = 0.0

    def to_json(self) -> dict[str, JSON]:
        return {
            **self.counts.to_json(),
            "train_seconds": round(self.train_seconds, 2),
            "success_rate": None if self.success_rate is None else round(self.success_rate, 4),
            "success_by_task": dict(self.success_by_task),
            **asdict(self.usage),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, JSON]) -> Figures:
        """Reads what `to_json` made; missing numbers become 0. Earlier versions of dart wrote a success rate of 0 where
        nothing had been sampled."""
        by_task, counts, success = told.get("success_by_task"), Counts.from_json(told), told.get("success_rate")
        return cls(
            counts,
            Usage(**{name: _number(told.get(name)) for name in asdict(Usage())}),
            float(success) if isinstance(success, int | float) and (success or counts.trajectories) else None,
            {task: _number(rate) for task, rate in by_task.items()} if isinstance(by_task, Mapping) else {},
            _number(told.get("train_seconds")),
        )


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Slot-seconds of one kind of worker since training began or was last resumed, by state."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    idle_because: Mapping[str, float] = field(default_factory=dict)
    """Idle slot-seconds by cause; only environments have causes."""
    queued_because: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One connected worker. `worker_id` and `doing` may hold whatever a worker said: `inspection.wording.plain`
    shows them."""

    worker_id: str
    role: str
    """ "env", "rollout" or "train"."""
    state: str
    """ "starting", "ready", "syncing"; for a failing replica also "quarantined" or "probing"."""
    slots: int
    busy: int
    weight_version: int
    seconds_since_heard: float
    doing: str
    """What its slots do now, and why some of them wait: "12 acting, 4 idle: the run is paused".

    For a quarantined replica also its last failure, in its own words."""


LEARNING = "learning"
"""The kind of what `core.learning.diagnosis` finds, beside the kinds of `core.watchdog`: everything moves, and nothing
is learnt. It is not a fault of a part of the run, so health checks stay as they are and the run does not end."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Something that makes no progress, as found by `core.watchdog` or `core.learning.diagnosis`. `culprit` and
    `failure` may be a worker's words."""

    kind: str
    waits: str
    """What waits: "update 12"; of LEARNING, what does not happen: "nothing is learnt"."""
    waits_for: str
    """Of LEARNING: why."""
    seconds: float
    """Seconds since its last progress; of LEARNING, since it was found."""
    culprit: str
    """A worker, with its rank; a role; or a queue. Of LEARNING, the cause in a word or two."""
    failure: str = ""
    """The culprit's last failure, in its own words. Of LEARNING, what the policy wrote last, or what failed last."""
    advice: str = ""
    """What a person can do."""
    deliberate: bool = False
    """It is not a fault: a person caused it on purpose, or, of LEARNING, it may still be chance."""

    @property
    def name(self) -> tuple[str, str]:
        """Identifies the stall while it lasts: its kind, and the replica if it concerns one, or what keeps the policy
        from learning. Other culprits may change."""
        return self.kind, self.culprit.partition(", ")[0] if self.kind in ("weights", LEARNING) else ""

    @property
    def may_be_chance(self) -> bool:
        return self.kind == LEARNING and self.deliberate

    @property
    def told(self) -> str:
        """The stall in one clause."""
        verb = ":" if self.kind == LEARNING else " waits for"
        return f"{self.waits}{verb} {self.waits_for}"

    @classmethod
    def from_json(cls, told: Mapping[str, JSON]) -> Stall:
        """Reads what `asdict` made; missing fields are empty."""
        names = ("kind", "waits", "waits_for", "culprit", "failure", "advice")
        text = {name: str(told.get(name, "")) for name in names}
        return cls(**text, seconds=_number(told.get("seconds")), deliberate=bool(told.get("deliberate")))


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What gets no work because it kept failing while others worked, or broke rules. `reason` may be a worker's
    words."""

    kind: str
    """ "task"; "environments" of one worker; "worker"; or "refused", a worker that was not taken into service."""
    name: str
    """The task, or the worker."""
    seconds_left: float
    """0 if only the worker knows; its `reason` then says for how long."""
    reason: str


@dataclass(frozen=True, slots=True)
class Status:
    run_id: str
    phase: str
    """As in `Progress.phase`; for a run that is over, its state."""
    figures: Figures = field(default_factory=Figures)
    elapsed_seconds: float = 0.0
    """Seconds since this process of the run began."""
    activity: str = ""
    """Progress within a phase other than training: "17/200 episodes"."""
    share_done: float = 0.0
    """From 0 to 1: how much of the evaluation under way is done, else of the way to the nearest stop condition."""
    env_time: TimeSpent = field(default_factory=TimeSpent)
    rollout_time: TimeSpent = field(default_factory=TimeSpent)
    trainer_time: TimeSpent = field(default_factory=TimeSpent)
    workers: tuple[WorkerStatus, ...] = ()
    """Sorted by role and name."""
    doing: Mapping[str, str] = field(default_factory=dict)
    """By role: what the slots of all its workers together do, in the words of `WorkerStatus.doing`."""
    control_address: str = ""
    quiet: Mapping[str, float] = field(default_factory=dict)
    """Seconds since each kind of progress: "worker" (one became ready), "step", "episode", "update"."""
    stalls: tuple[Stall, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    paused: bool | None = None
    """A person has paused sampling for training; the phase goes on. None: an older coordinator does not say."""


def _number(told: JSON) -> float:
    return float(told) if isinstance(told, int | float) else 0.0
