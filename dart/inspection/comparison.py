"""Two evaluations on the same instances: the difference, and where one succeeds and the other fails."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from sqlalchemy import case, func, select

from dart.core.evaluation import outcomes
from dart.inspection.opening import NotFound, RunFiles
from dart.inspection.records import Comparison, Pair, Side, TrajectoryRow
from dart.inspection.trajectories import rows_with_kind, trajectory_row
from dart.store import tables as t
from dart.store.records import GroupKind

MOST_PAIRS = 2000
_c, _g = t.trajectories.c, t.groups.c
_NAME = re.compile(r"(?P<label>.*?)(?:-(?P<decoding>sampled|greedy))?(?:-v(?P<version>\d+))?")


async def sides(files: RunFiles) -> list[Side]:
    """The run's evaluations, in the order in which they began."""
    won = func.sum(case((_c.success, 1), else_=0))
    wanted = (
        select(_g.id, _g.task_name, func.count(_c.id).label("count"), won.label("successes"))
        .join(t.trajectories, _c.group_id == _g.id)
        .where(_g.run_id == files.run_id, _g.kind == GroupKind.EVALUATION)
        .group_by(_g.id)
        .order_by(_g.opened)
    )
    episodes: dict[str, int] = defaultdict(int)
    successes: dict[str, int] = defaultdict(int)
    for row in await files.rows(wanted):
        name = _evaluation(row["id"], row["task_name"])
        episodes[name] += row["count"]
        successes[name] += row["successes"]
    return [
        Side(files.run_id, name, _title(name), count, successes[name] / count)
        for name, count in episodes.items()
        if count
    ]


def _evaluation(group_id: str, task_name: str) -> str:
    """A group of an evaluation is called eval-EVALUATION-TASK (`coordinator.sampling.evaluation`)."""
    return group_id.removeprefix("eval-").removesuffix(f"-{task_name}")


_LABELS = {"before": "before training", "during": "during training", "after": "after training", "eval": "evaluation"}


def _title(name: str) -> str:
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    label = _LABELS.get(found["label"], found["label"])
    parts = (label, found["decoding"], f"version {found['version']}" if found["version"] else None)
    return ", ".join(part for part in parts if part)


async def compare(first: RunFiles, first_evaluation: str, second: RunFiles, second_evaluation: str) -> Comparison:
    """The second side against the first. Raises NotFound where a side, or any instance of both, is missing."""
    one, other = await _side(first, first_evaluation), await _side(second, second_evaluation)
    mine, theirs = await _instances(first, first_evaluation), await _instances(second, second_evaluation)
    common = [key for key in mine if key in theirs]
    if not common:
        raise NotFound(
            f"{first_evaluation} of {first.run_id} and {second_evaluation} of {second.run_id} have no instance in "
            "common: choose evaluations of the same tasks and seeds"
        )
    found = outcomes.compare(
        {str(key): [row.success for row in theirs[key]] for key in common},
        {str(key): [row.success for row in mine[key]] for key in common},
    )
    pairs = [_pair(key, mine[key], theirs[key]) for key in common]
    pairs.sort(key=lambda pair: (-abs(pair.second_success - pair.first_success), pair.suite, pair.task, pair.seed))
    return Comparison(
        one,
        other,
        tuple(pairs[:MOST_PAIRS]),
        len(common),
        only_first=found.worse,
        only_second=found.better,
        difference=found.difference.mean,
        low=found.difference.low,
        high=found.difference.high,
        p_value=found.p_value,
    )


Key = tuple[str, str, int]


async def _side(files: RunFiles, evaluation: str) -> Side:
    there = await sides(files)
    for side in there:
        if side.evaluation == evaluation:
            return side
    known = ", ".join(side.evaluation for side in there) or "none"
    raise NotFound(f"evaluation {evaluation!r} is not in run {files.run_id}: it has {known}")


async def _instances(files: RunFiles, evaluation: str) -> Mapping[Key, list[TrajectoryRow]]:
    start = f"eval-{evaluation}-"
    wanted = rows_with_kind().where(
        _g.run_id == files.run_id, _g.kind == GroupKind.EVALUATION, _g.id.startswith(start, autoescape=True)
    )
    found: dict[Key, list[TrajectoryRow]] = defaultdict(list)
    for row in await files.rows(wanted.order_by(_c.finished.desc(), _c.id)):
        if _evaluation(row["group_id"], row["task_name"]) == evaluation:
            found[row["suite"], row["task_name"], row["seed"]].append(trajectory_row(row))
    return found


def _pair(key: Key, mine: list[TrajectoryRow], theirs: list[TrajectoryRow]) -> Pair:
    return Pair(
        *key,
        instruction=mine[0].instruction,
        first=tuple(mine),
        second=tuple(theirs),
        first_success=fmean(row.success for row in mine),
        second_success=fmean(row.success for row in theirs),
    )
