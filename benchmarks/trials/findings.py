"""From runs to findings: each arm's success with its t-interval, and the comparisons that a protocol asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from benchmarks.trials import sources
from benchmarks.trials.inference import Estimate, compare, estimate, holm, smallest_detectable
from benchmarks.trials.protocol import Endpoint, Protocol
from benchmarks.trials.records import Record
from dart.core.curation.judging import STALE
from dart.core.evaluation.documents import ByDecoding

Runs = Mapping[str, Mapping[int, Record]]
"""Arm → seed → its run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The reference minus another arm at one endpoint. `p_holm`: corrected over the family; None for a secondary one.
    `p_unpaired`: of Welch's test, never corrected.

    `smallest`: the smallest true difference that these runs would have found with the protocol's power, from the spread
    that they had; for a primary endpoint at the family's level.
    """

    endpoint: str
    primary: bool
    reference: str
    arm: str
    difference: Estimate
    p: float | None
    p_holm: float | None
    p_unpaired: float | None
    smallest: float | None


@dataclass(frozen=True, slots=True)
class ArmRow:
    """An arm's runs together. `endpoints`: held-out success by the endpoint's name. `stale`: the share of sampled
    trajectories that were dropped as too old."""

    arm: str
    runs: int
    endpoints: Mapping[str, Estimate]
    env_steps: Estimate
    trajectories: Estimate
    updates: Estimate
    staleness: Estimate
    stale: Estimate
    pooled: Estimate
    train_seconds: Estimate


def success(after: ByDecoding, endpoint: Endpoint, protocol: Protocol) -> float:
    """The mean over the tasks of the endpoint's levels."""
    rates = after[endpoint.decoding]["per_task"]
    tasks = [task for level in endpoint.levels for task in protocol.tasks_of(level, tuple(rates))]
    return fmean(rates[task]["mean"] for task in tasks)


def successes(runs: Mapping[int, Record], endpoint: Endpoint, protocol: Protocol) -> dict[int, float]:
    """By seed; runs without an evaluation are left out."""
    return {seed: success(run["after"], endpoint, protocol) for seed, run in runs.items() if run["after"]}


def arm_rows(runs: Runs, protocol: Protocol) -> list[ArmRow]:
    endpoints = (*protocol.primary, *protocol.secondary)
    rows = []
    for arm, made in runs.items():
        found = {one.name: successes(made, one, protocol) for one in endpoints}
        each = list(made.values())
        rows.append(
            ArmRow(
                arm, len(each),
                {name: estimate(list(values.values())) for name, values in found.items() if values},
                *(estimate(values) for values in (
                    [run["env_steps"] for run in each], [run["trajectories"] for run in each],
                    [run["updates"] for run in each], [run["staleness"]["mean"] for run in each],
                    [stale(run) for run in each], [run["pooled"] for run in each],
                    [run["train_seconds"] for run in each],
                )),
            )
        )  # fmt: skip
    return rows


def stale(run: Record) -> float:
    """The share of its sampled trajectories that were dropped as too old; 0 for a run that samples nothing."""
    return run["dropped"].get(STALE, 0) / run["trajectories"] if run["trajectories"] else 0.0


def notes(runs: Runs) -> list[str]:
    """What has to be said beside the results: by which code runs were made, unless all were by one commit as it is, and
    which runs were started more than once."""
    each = {f"{arm}-{seed}": run for arm, of in runs.items() for seed, run in of.items()}
    said = sources.told({name: run.get("pieces", []) for name, run in each.items()})
    lacking = {
        name: sum(len(result.get("not_evaluated", [])) for result in (run.get("after") or {}).values())
        for name, run in each.items()
    }
    if some := [f"{name} ({count})" for name, count in lacking.items() if count]:
        said.append(
            f"held-out instances had no result in {len(some)} of the {len(each)} runs: {sources.shortened(some)}"
        )
    if again := [f"{name} ({run['starts']} starts)" for name, run in each.items() if run.get("starts", 1) > 1]:
        said.append(
            f"training was started more than once in {len(again)} of the {len(each)} runs: {sources.shortened(again)}"
        )
    return said


def findings(runs: Runs, protocol: Protocol, against: Sequence[str] | None = None) -> list[Finding]:
    """The protocol's comparisons, primary endpoints first; or those with the arms of `against`, without correction."""
    found = []
    for endpoint in (*protocol.primary, *protocol.secondary):
        primary = against is None and endpoint in protocol.primary
        for arm in protocol.against if against is None else against:
            if (one := _finding(runs, protocol, endpoint, arm, primary=primary)) is not None:
                found.append(one)
    return _corrected(found, protocol.family)


def _finding(runs: Runs, protocol: Protocol, endpoint: Endpoint, arm: str, *, primary: bool) -> Finding | None:
    ours = successes(runs.get(protocol.reference, {}), endpoint, protocol)
    compared = compare(ours, successes(runs.get(arm, {}), endpoint, protocol))
    if compared is None:
        return None
    difference, smallest = compared.difference, None
    if difference.sd is not None:
        family = protocol.family if primary else 1
        smallest = smallest_detectable(difference.sd, difference.n, family, protocol.alpha, protocol.power)
    return Finding(
        endpoint.name, primary, protocol.reference, arm, difference, compared.p, None, compared.p_unpaired, smallest
    )


def _corrected(found: list[Finding], family: int) -> list[Finding]:
    """With Holm's correction over the whole family, where comparisons that cannot be made yet count as p = 1."""
    tested = [one for one in found if one.primary and one.p is not None]
    p_values = [one.p for one in tested if one.p is not None]
    adjusted = holm([*p_values, *[1.0] * max(0, family - len(tested))])
    p_holm = {(one.endpoint, one.arm): p for one, p in zip(tested, adjusted, strict=False)}
    return [replace(one, p_holm=p_holm[one.endpoint, one.arm]) if one in tested else one for one in found]


def as_json(runs: Runs, protocol: Protocol, missing: Sequence[tuple[str, int]]) -> dict[str, object]:
    """The findings as a results file has them."""
    return {
        "question": protocol.question.strip(),
        "said_in_advance": list(protocol.said_in_advance),
        "complete": not missing,
        "missing": [f"{arm}-{seed}" for arm, seed in missing],
        "notes": notes(runs),
        "family": protocol.family,
        "arms": [asdict(row) for row in arm_rows(runs, protocol)],
        "comparisons": [asdict(one) for one in findings(runs, protocol)],
    }
