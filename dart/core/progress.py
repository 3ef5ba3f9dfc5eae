"""How far a run has come: its counters, which change only through the events of `Progress`.

`Progress.counts` is a frozen record of all counters; every event replaces it. `Counts.to_json` is what the "update"
events of metrics.jsonl hold, and `Counts.from_json` reads it back when the run is resumed. A new whole-number
counter is a field of `Counts` and a line in the event that counts it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from dart.core.curation.batches import ReleasedGroup
from dart.core.fates import TRAINED
from dart.core.json_text import JSON
from dart.core.learning.recent import Curation
from dart.core.types import Termination, Trajectory, plain_fields

T = TypeVar("T")

RECENT_PER_TASK = 128
"""The success rate of one task is taken over this many trajectories."""
RECENT_TIMES = 64
"""The durations of this many trajectories and updates are remembered, to know what is slow for this run."""
WHOLE = (int,)


@dataclass(frozen=True, slots=True)
class StalenessCounts:
    """Staleness, in weight versions, of the trajectories that updates trained on."""

    sum: int = 0
    max: int = 0
    trajectories: int = 0

    @property
    def mean(self) -> float:
        return self.sum / self.trajectories if self.trajectories else 0.0

    def to_json(self) -> dict[str, JSON]:
        return {"mean": round(self.mean, 4), "max": self.max, "trajectories": self.trajectories}

    def with_more(self, staleness: Sequence[int]) -> StalenessCounts:
        """The counts after a batch whose trajectories had these stalenesses."""
        return StalenessCounts(
            self.sum + sum(staleness), max((self.max, *staleness)), self.trajectories + len(staleness)
        )

    def share(self, share: float) -> StalenessCounts:
        """About this share of what was counted."""
        return StalenessCounts(round(self.sum * share), self.max, round(self.trajectories * share))


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of the whole run, including its earlier processes."""

    updates: int = 0
    version: int = 0
    """The newest weight version that the trainer has made."""
    trajectories: int = 0
    """Finished training trajectories."""
    env_steps: int = 0
    """Steps of those trajectories, an unparsable last one included."""
    weight_syncs: int = 0
    infrastructure_failures: int = 0
    """Attempts that ended because of a worker, not because of the policy."""
    unparsable: int = 0
    pooled: int = 0
    """Copies of pooled successes that replaced failures: they are not roll-outs, but they have fates."""
    trained_steps: int = 0
    trained_tokens: int = 0
    """Tokens of prompts and responses."""
    fates: Mapping[str, int] = field(default_factory=dict)
    """Trajectories by fate (`dart.core.fates`), the undecided ones left out."""
    staleness: StalenessCounts = field(default_factory=StalenessCounts)
    reading_rules: Mapping[str, int] = field(default_factory=dict)
    """Steps by the rule that reading their text took; a text in the strict grammar takes none."""
    prompt_tokens: int = 0
    """Tokens of the prompts in those trajectories, where the replica says how many its prefix cache had."""
    cached_tokens: int = 0
    """The tokens of them that the prefix cache had."""

    @property
    def prefix_cached(self) -> float | None:
        """The share of prompts' tokens that replicas had in their prefix cache; None if no replica says."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def to_json(self) -> dict[str, JSON]:
        """The form in the events of metrics.jsonl. `update` is the same as `updates`."""
        return {
            "update": self.updates,
            **self.whole(),
            "fates": dict(self.fates),
            "staleness": self.staleness.to_json(),
            "reading_rules": dict(self.reading_rules),
            "prefix_cached": None if self.prefix_cached is None else round(self.prefix_cached, 4),
        }

    def whole(self) -> dict[str, int]:
        """The counters that are whole numbers, by name."""
        return {name: getattr(self, name) for name in plain_fields(type(self), WHOLE)}

    @classmethod
    def from_json(cls, told: Mapping[str, JSON]) -> Counts:
        """Reads what `to_json` made. A counter that an older process did not write is 0."""
        staleness = told.get("staleness")
        return cls(
            **{name: _whole(told.get(name)) for name in plain_fields(cls, WHOLE)},
            fates=_counted(told.get("fates")),
            staleness=_staleness(staleness) if isinstance(staleness, Mapping) else StalenessCounts(),
            reading_rules=_counted(told.get("reading_rules")),
        )


@dataclass(frozen=True, slots=True)
class StoredCounts:
    """Training roll-outs as counted by the database: exact, whenever the previous process ended."""

    trajectories: int
    env_steps: int
    unparsable: int
    pooled: int
    trained_steps: int
    fates: Mapping[str, int]


class Progress:
    """The run's counters, and figures about its recent trajectories and updates.

    `window`: the number of trajectories that `success_rate` is taken over.
    """

    def __init__(self, window: int) -> None:
        self._phase = "starting"
        self.paused = False
        """A person has paused sampling for training."""
        self.curation = Curation()
        self._counts = Counts()
        self._new_trajectories = self._new_steps = self._new_unparsable = self._new_prompt = self._new_cached = 0
        self._new_fates: Counter[str] = Counter()
        self._new_rules: Counter[str] = Counter()
        """Not in `_counts` yet, because trajectories and groups end far more often than anybody reads the counters."""
        self._recent: deque[bool] = deque(maxlen=window)
        self._recent_by_task: dict[str, deque[bool]] = {}
        self._trajectory_seconds: deque[float] = deque(maxlen=RECENT_TIMES)
        self._update_seconds: deque[float] = deque(maxlen=RECENT_TIMES)

    @property
    def window(self) -> int:
        """The number of trajectories that `success_rate` is taken over."""
        assert self._recent.maxlen is not None
        return self._recent.maxlen

    @property
    def phase(self) -> str:
        """ "starting", "evaluating", "collecting", "training", "finished", "interrupted" or "failed"."""
        return self._phase

    @property
    def counts(self) -> Counts:
        if self._new_trajectories or self._new_fates:
            was = self._counts
            self._counts = replace(
                was,
                trajectories=was.trajectories + self._new_trajectories,
                env_steps=was.env_steps + self._new_steps,
                unparsable=was.unparsable + self._new_unparsable,
                prompt_tokens=was.prompt_tokens + self._new_prompt,
                cached_tokens=was.cached_tokens + self._new_cached,
                fates=dict(Counter(was.fates) + self._new_fates) if self._new_fates else was.fates,
                reading_rules=dict(Counter(was.reading_rules) + self._new_rules)
                if self._new_rules
                else was.reading_rules,
            )
            self._new_fates, self._new_rules = Counter(), Counter()
            self._new_trajectories = self._new_steps = self._new_unparsable = self._new_prompt = self._new_cached = 0
        return self._counts

    # ---- events ----

    def phase_changed(self, phase: str) -> None:
        """A pause, which concerns training alone, ends with its phase."""
        self._phase, self.paused = phase, False

    def resumed(self, update: int, version: int) -> None:
        """The run resumes after this update, with the weights of this version."""
        self._counts = replace(self.counts, updates=update, version=version)

    def trajectory_finished(self, trajectory: Trajectory) -> None:
        """A training trajectory is stored."""
        self._new_trajectories += 1
        self._new_steps += len(trajectory.steps)
        self._new_unparsable += trajectory.termination == Termination.UNPARSABLE
        for turn in [step.generation for step in trajectory.steps]:
            if turn.cached_tokens is not None:
                self._new_prompt += len(turn.prompt_token_ids)
                self._new_cached += turn.cached_tokens
        for rules in [step.reading_rules for step in trajectory.steps if step.reading_rules]:
            self._new_rules.update(rules.split())
        self._ended(trajectory.task.name, trajectory.success)
        self._trajectory_seconds.append(trajectory.finished - trajectory.started)

    def _ended(self, task: str, success: bool) -> None:
        self._recent.append(success)
        recent = self._recent_by_task.get(task)
        if recent is None:
            recent = self._recent_by_task[task] = deque(maxlen=RECENT_PER_TASK)
        recent.append(success)

    def attempt_failed(self) -> None:
        """A worker, not the policy, ended an attempt."""
        self._counts = replace(self.counts, infrastructure_failures=self.counts.infrastructure_failures + 1)

    def success_pooled(self) -> None:
        """A copy of a pooled success was added to a group."""
        self._counts = replace(self.counts, pooled=self.counts.pooled + 1)

    def dropped(self, fate: str, trajectories: int) -> None:
        """This many trajectories will not be trained on. `fate`: as stored."""
        self._new_fates[fate] += trajectories

    def version_made(self, version: int, seconds: float | None, metrics: Mapping[str, float] = {}) -> None:
        """An update has made this weight version. `seconds`: how long it took; None if that is not known."""
        self.curation.updated(metrics)
        self._counts = replace(self.counts, updates=self.counts.updates + 1, version=version)
        if seconds is not None:
            self._update_seconds.append(seconds)

    def batch_consumed(self, batch: Sequence[ReleasedGroup], staleness: Sequence[int]) -> None:
        """An update has trained on the batch. `staleness`: one value per trajectory, in versions."""
        turns = [step.generation for group in batch for one in group.trajectories for step in one.steps]
        was = self.counts
        self._counts = replace(
            was,
            trained_steps=was.trained_steps + len(turns),
            trained_tokens=was.trained_tokens + sum([len(one.prompt_token_ids) + len(one.token_ids) for one in turns]),
            staleness=was.staleness.with_more(staleness),
        )
        self._new_fates[TRAINED] += len(staleness)

    def weights_synced(self) -> None:
        """A replica has taken new weights."""
        self._counts = replace(self.counts, weight_syncs=self.counts.weight_syncs + 1)

    def restore(self, stored: StoredCounts, logged: Counts | None, recent: Iterable[tuple[str, bool]] = ()) -> None:
        """Continue counting where an earlier process ended.

        `logged`: what the database does not count, as of the last update; None before the first. Updates and version
        are the checkpoint's (`resumed`). `recent`: (task, success) of the last trajectories, oldest first.
        """
        for task, success in recent:
            self._ended(task, success)
        logged = logged or Counts()
        # Steps trained on after the last checkpoint no longer count as trained on. Tokens and staleness are not stored
        # by step, so they are estimated.
        share = stored.trained_steps / logged.trained_steps if logged.trained_steps else 0.0
        self._counts = replace(
            logged,
            updates=self.counts.updates,
            version=self.counts.version,
            trajectories=stored.trajectories,
            env_steps=stored.env_steps,
            unparsable=stored.unparsable,
            pooled=stored.pooled,
            trained_steps=stored.trained_steps,
            trained_tokens=round(logged.trained_tokens * share),
            staleness=logged.staleness.share(share),
            fates=dict(stored.fates),
        )

    def restore_imitation(self, logged: Counts | None) -> None:
        """Continue counting where an earlier process of an imitation run ended: `logged` as of its last update.

        Updates after the checkpoint are made again; what they had counted is left out by their share.
        """
        logged = logged or Counts()
        share = self.counts.updates / logged.updates if logged.updates else 0.0
        self._counts = replace(
            logged,
            updates=self.counts.updates,
            version=self.counts.version,
            trained_steps=round(logged.trained_steps * share),
            trained_tokens=round(logged.trained_tokens * share),
            fates={fate: round(count * share) for fate, count in logged.fates.items()},
        )

    # ---- recent trajectories and updates ----

    @property
    def success_rate(self) -> float | None:
        """Success rate of the last `window` training trajectories; None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def window_full(self) -> bool:
        return len(self._recent) == self._recent.maxlen

    @property
    def success_by_task(self) -> dict[str, float]:
        return {name: sum(recent) / len(recent) for name, recent in sorted(self._recent_by_task.items())}

    @property
    def slowest_trajectory(self) -> float:
        """Seconds that the slowest recent trajectory took; 0 before the first."""
        return max(self._trajectory_seconds, default=0.0)

    @property
    def slowest_update(self) -> float:
        """Seconds that the slowest recent update took; 0 before the first."""
        return max(self._update_seconds, default=0.0)


def take_up(updates: dict[int, T], number: int, update: T) -> None:
    """Add the update with this number to those before it, which are in ascending order.

    A run that resumed from an earlier checkpoint makes updates again, and perhaps fewer: those of the policy that it
    has abandoned go.
    """
    while updates and next(reversed(updates)) >= number:
        updates.popitem()
    updates[number] = update


def _whole(told: JSON) -> int:
    return int(told) if isinstance(told, int | float) else 0


def _counted(told: JSON) -> dict[str, int]:
    return {name: _whole(count) for name, count in told.items()} if isinstance(told, Mapping) else {}


def _staleness(told: Mapping[str, JSON]) -> StalenessCounts:
    mean, trajectories = told.get("mean"), _whole(told.get("trajectories"))
    total = round(mean * trajectories) if isinstance(mean, int | float) else 0
    return StalenessCounts(total, _whole(told.get("max")), trajectories)
