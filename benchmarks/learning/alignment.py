"""What the importance weight w is worth on old samples: `python -m benchmarks.learning.alignment`.

Runs protocols/alignment.yaml: training on the ladder with and without w, where replicas get new weights only after
every 8th update, so that samples are up to 16 versions old; batches of 16 trajectories, two minibatches, 150 updates,
five seeds each. Everything is real: Chromium, vLLM, trainer and weight sync on this machine. Two endpoints, on the
tasks that the base policy cannot do, each tested at half of 0.05: in how many seeds success in training falls below
half its peak (Fisher's exact test), and held-out success at the end (paired).

It can be stopped at any moment and started again, as `benchmarks.learning.ablation` can, but a restart makes samples
younger, and the report names the runs that had one. Ten runs of some fifteen minutes, so two and a half hours on two
cores.
--report makes the table and the picture of what is there. Writes results/learning/alignment.json and alignment.png.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pydantic import Field, model_validator

from benchmarks.trials.command import Experiment, main
from benchmarks.trials.findings import Runs
from benchmarks.trials.inference import fisher
from benchmarks.trials.protocol import FOLDER, Protocol, Section
from benchmarks.trials.records import Point, Record, curve, episodes_of
from dart.core.json_text import JSON


class Collapse(Section):
    """A run collapses if success in training on these levels falls below this share of its peak until then.

    A peak lower than `peak_at_least` is not one: what was never learned cannot be lost.
    """

    levels: tuple[str, ...] = Field(min_length=1)
    smoothing: int = Field(gt=0)
    peak_at_least: float = Field(gt=0, lt=1)
    below: float = Field(gt=0, lt=1)


class AlignmentProtocol(Protocol):
    collapse: Collapse

    @model_validator(mode="after")
    def _levels_of_collapse(self) -> AlignmentProtocol:
        if unknown := set(self.collapse.levels) - self.levels.keys():
            raise ValueError(f"collapse: {', '.join(sorted(unknown))} is no level: they are {', '.join(self.levels)}")
        return self


@dataclass(frozen=True, slots=True)
class Course:
    """How success in training went in one run. `collapsed_at`: the first update at which it was too low, if any."""

    seed: int
    peak: float
    lowest_after_peak: float
    last: float
    collapsed_at: int | None


def course(seed: int, run: Record, protocol: AlignmentProtocol) -> Course:
    """Raises ValueError for a run that ended before its curve begins."""
    collapse = protocol.collapse
    points = curve(episodes_of(run, collapse.levels, protocol), collapse.smoothing)
    if not points:
        raise ValueError(f"seed {seed}: some task has had no {collapse.smoothing // 2} roll-outs: the run is too short")
    peak, lowest, collapsed = 0.0, 0.0, None
    for point in points:
        if point.success > peak:
            peak = lowest = point.success
        lowest = min(lowest, point.success)
        if collapsed is None and peak >= collapse.peak_at_least and point.success < collapse.below * peak:
            collapsed = point.update
    return Course(seed, peak, lowest, points[-1].success, collapsed)


def collapses(runs: Runs, protocol: AlignmentProtocol) -> dict[str, JSON]:
    """The courses of all runs, in how many seeds of each arm training collapsed, and Fisher's exact test."""
    courses = {arm: [course(seed, run, protocol) for seed, run in of.items()] for arm, of in runs.items()}
    counts = {arm: (_collapsed(found), len(found)) for arm, found in courses.items()}
    ours, theirs = counts.get(protocol.reference), counts.get(protocol.against[0])
    return {
        "courses": {arm: [asdict(one) for one in found] for arm, found in courses.items()},
        "collapsed": {arm: number for arm, (number, _) in counts.items()},
        "fisher_p": fisher(ours, theirs) if ours and theirs else None,
    }


def _collapsed(courses: Sequence[Course]) -> int:
    return sum(one.collapsed_at is not None for one in courses)


def show(found: Mapping[str, JSON]) -> None:
    print(f"runs in which success in training collapsed: {found['collapsed']}; Fisher's exact test: p = "
          f"{found['fisher_p']}")  # fmt: skip


def by_update(point: Point) -> float:
    return point.update


EXPERIMENT = Experiment(
    FOLDER / "alignment.yaml", AlignmentProtocol, __doc__, by_update, "updates", measure=collapses, show=show
)

if __name__ == "__main__":
    main(EXPERIMENT)
