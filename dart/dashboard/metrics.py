"""`/metrics` for Prometheus: every run that is live, as its coordinator says at the moment of the scrape.

Counters are those of the whole run and go on when it is resumed; what a run that resumes from an earlier checkpoint
takes back is a gauge. Seconds of slots are of the coordinator's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from dart.core.status import Status

MOST_TASKS = 200
"""With more tasks than this, success by task is left out."""
_COUNTERS = {
    "trajectories": "Finished training trajectories.",
    "env_steps": "Steps of those trajectories, an unparsable last one included.",
    "unparsable": "Steps whose text could not be read as an action.",
    "pooled": "Copies of pooled successes that replaced failures.",
}
_TAKEN_BACK = {
    "updates": "Updates of the policy.",
    "trained_steps": "Steps that were trained on.",
    "trained_tokens": "Tokens that were trained on, of prompts and responses.",
    "weight_syncs": "Replicas that took new weights.",
    "infrastructure_failures": "Attempts that ended because of a worker and not because of the policy.",
}
"""Counts that are smaller after a run was resumed, because its checkpoint is of an earlier update or because they are
known as of the last update only. Prometheus would take that for a counter that begins again at 0."""
_Of: TypeAlias = Callable[[Status], Sequence[tuple[tuple[str, ...], float]]]
"""The values of one metric in a run, each with its labels."""
_PARTS = {"environments": "env_time", "replicas": "rollout_time", "trainer": "trainer_time"}


def _counted(name: str) -> _Of:
    return lambda it: [((), getattr(it.figures.counts, name))]


def _grown(name: str) -> _Of:
    """No series while it is 0, as it also is in a resumed run that has not read yet what it had."""
    return lambda it: [((), value)] if (value := getattr(it.figures.counts, name)) else []


def _spent(name: str) -> _Of:
    return lambda it: [((state,), spent) for state, spent in getattr(it, name).seconds.items()]


def _by_role(name: str) -> _Of:
    """The sum of a worker's field over each role."""
    return lambda it: [
        ((role,), sum(getattr(one, name) for one in it.workers if one.role == role))
        for role in sorted({one.role for one in it.workers})
    ]


class _Live(Collector):
    def __init__(self, statuses: Sequence[Status], unreadable: Sequence[str]) -> None:
        self._statuses, self._unreadable = statuses, unreadable

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("info", "A live run; always 1.", ("phase",), lambda it: [((it.phase,), 1.0)])
        yield self._gauge(
            "paused",
            "1 while a person has paused sampling, else 0.",
            (),
            lambda it: [] if it.paused is None else [((), float(it.paused))],
        )
        for name, told in _COUNTERS.items():
            yield self._counter(name, told, (), _grown(name))
        for name, told in _TAKEN_BACK.items():
            yield self._gauge(name, told, (), _counted(name))
        yield self._gauge(
            "fates", "Trajectories by what became of them.", ("fate",),
            lambda it: [((fate,), count) for fate, count in it.figures.counts.fates.items()],
        )  # fmt: skip
        for part, name in _PARTS.items():
            yield self._counter(
                f"{part}_slot_seconds", f"Slot-seconds of {part} since training began or was last resumed, by state.",
                ("state",), _spent(name),
            )  # fmt: skip
        told = "1 for a run that cannot be read, or that runs and whose coordinator gives no status."
        unreadable = GaugeMetricFamily("dart_unreadable", told, labels=("run",))
        for run in self._unreadable:
            unreadable.add_metric((run,), 1.0)
        yield unreadable
        yield from self._gauges()
        yield from self._workers()

    def _gauges(self) -> Iterator[Metric]:
        yield self._gauge(
            "success_ratio", "Success rate of the last training trajectories.", (),
            lambda it: [] if it.figures.success_rate is None else [((), it.figures.success_rate)],
        )  # fmt: skip
        yield self._gauge(
            "task_success_ratio", "Recent success rate by task; none with over 200 tasks.", ("task",),
            lambda it: [] if len(it.figures.success_by_task) > MOST_TASKS
            else [((task,), rate) for task, rate in it.figures.success_by_task.items()],
        )  # fmt: skip
        yield self._gauge(
            "utilisation_ratio", "Share of slot-seconds in use since training began or was last resumed.", ("part",),
            lambda it: [
                (("environments",), it.figures.usage.env_utilisation),
                (("replicas",), it.figures.usage.rollout_utilisation),
                (("trainer",), it.figures.usage.trainer_utilisation),
            ],
        )  # fmt: skip
        yield self._gauge(
            "prefix_cached_ratio", "Share of prompts' tokens that replicas had in their prefix cache.", (),
            lambda it: [] if it.figures.counts.prefix_cached is None else [((), it.figures.counts.prefix_cached)],
        )  # fmt: skip
        yield self._gauge(
            "staleness_versions", "Mean age of trained trajectories, in weight versions.", (),
            lambda it: [((), it.figures.counts.staleness.mean)],
        )  # fmt: skip
        yield self._gauge(
            "trained_weight_version", "The newest version that the trainer has made.", (),
            lambda it: [((), it.figures.counts.version)],
        )  # fmt: skip
        yield self._gauge(
            "progress_age_seconds", "Time since the last progress of each kind.", ("kind",),
            lambda it: [((kind,), seconds) for kind, seconds in it.quiet.items()],
        )  # fmt: skip
        yield self._gauge(
            "stalled_seconds", "What makes no progress, and for how long; no series if nothing is stalled.",
            ("kind", "culprit"),
            lambda it: [((one.kind, one.culprit), one.seconds) for one in it.stalls if not one.may_be_chance],
        )  # fmt: skip
        yield self._gauge(
            "quarantined", "Tasks, workers and workers' environments that get no work.", ("kind",),
            lambda it: [((kind,), n) for kind, n in Counter(one.kind for one in it.quarantined).items()],
        )  # fmt: skip

    def _workers(self) -> Iterator[Metric]:
        yield self._gauge(
            "workers", "Connected workers.", ("role", "state"),
            lambda it: [(each, n) for each, n in Counter((one.role, one.state) for one in it.workers).items()],
        )  # fmt: skip
        for name, told in (("slots", "Slots of connected workers."), ("busy", "Slots in use.")):
            yield self._gauge(
                f"worker_{name}", told, ("role",),
                _by_role(name),
            )  # fmt: skip
        yield self._gauge(
            "replica_weight_version", "The version that a replica serves.", ("replica",),
            lambda it: [((one.worker_id,), one.weight_version) for one in it.workers if one.role == "rollout"],
        )  # fmt: skip

    def _counter(self, name: str, told: str, labels: tuple[str, ...], of: _Of) -> Metric:
        return self._filled(CounterMetricFamily(f"dart_{name}", told, labels=("run", *labels)), of)

    def _gauge(self, name: str, told: str, labels: tuple[str, ...], of: _Of) -> Metric:
        return self._filled(GaugeMetricFamily(f"dart_{name}", told, labels=("run", *labels)), of)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, of: _Of) -> Metric:
        for status in self._statuses:
            for labels, value in of(status):
                family.add_metric((status.run_id, *labels), value)
        return family


def exposition(statuses: Sequence[Status], unreadable: Sequence[str] = ()) -> bytes:
    """The metrics in Prometheus' text format. `unreadable`: ids of runs that have no status, though they should."""
    registry = CollectorRegistry()
    registry.register(_Live(statuses, unreadable))
    return generate_latest(registry)
