"""The runner that the experiments share: arms × seeds of real training runs, each kept as one JSON file when finished.

Everything is real (`dart train` in a process of its own: Chromium, vLLM, the trainer, weight sync). A finished run is a
file under results/NAME/ and is never made again; an unfinished one is under runs/experiments/NAME/ and continues where
it was (`benchmarks.trials.pieces`). So an experiment can be stopped at any moment, with Ctrl-C or kill -9, and
started again. Seeds are the outer loop: whenever it stops, all arms have about as many runs.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.results import write as write_record
from benchmarks.trials import pieces, records
from benchmarks.trials.protocol import check_marks
from benchmarks.trials.records import Progress, Record
from dart.coordinator.summary import write_json
from dart.errors import UserError
from dart.rundir import RunDirectory

RESULTS = Path(__file__).parents[1] / "results"
UNFINISHED = Path("runs/experiments")
REAL = "real: Chromium, vLLM, trainer and weight sync on this machine"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `arms`: all overrides of each. `marks`: what results must agree on to belong together."""

    name: str
    config: Path
    arms: Mapping[str, tuple[str, ...]]
    seeds: Sequence[int]
    marks: Mapping[str, str]
    piece_seconds: float | None = None
    jobs: int = 1
    over: Callable[[Progress], bool] | None = None
    """Whether a run has what is wanted of it, and need not go on."""

    @property
    def results(self) -> Path:
        return RESULTS / self.name

    def record(self, arm: str, seed: int) -> Path:
        return self.results / f"{arm}-{seed}.json"

    @property
    def half_made(self) -> Path:
        return UNFINISHED / self.name

    def unfinished(self, arm: str, seed: int) -> Path:
        return self.half_made / f"{arm}-{seed}"


@dataclass(slots=True)
class Patience:
    """How long to go on: until `stop` is called, or `minutes` have passed. A piece that has begun is made whole."""

    minutes: float | None = None
    began: float = field(default_factory=time.monotonic)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def goes_on(self) -> bool:
        late = self.minutes is not None and time.monotonic() - self.began > 60 * self.minutes
        return not (late or self._stopped.is_set())

    def stop(self) -> None:
        self._stopped.set()


def missing(plan: Plan) -> list[tuple[str, int]]:
    """Arms and seeds without a result, in the order in which they are made. Raises UserError for foreign results."""
    wanted = []
    for seed in plan.seeds:
        for arm in plan.arms:
            path = plan.record(arm, seed)
            if path.exists():
                check_marks(path, json.loads(path.read_text(encoding="utf-8")), plan.marks)
            else:
                wanted.append((arm, seed))
    return wanted


def finished(plan: Plan) -> dict[str, dict[int, Record]]:
    """Arm → seed → its run, without arms that have none. Raises UserError for foreign results."""
    missing(plan)
    found: dict[str, dict[int, Record]] = {}
    for arm in plan.arms:
        for seed in plan.seeds:
            if plan.record(arm, seed).exists():
                found.setdefault(arm, {})[seed] = records.load(plan.record(arm, seed))
    return found


def run_missing(plan: Plan, patience: Patience | None = None) -> None:
    """Make the missing runs, `plan.jobs` at a time; failed ones are reported, and continued the next time."""
    patience = patience or Patience()
    wanted = missing(plan)
    print(f"{plan.name}: {len(wanted)} runs to finish, {plan.jobs} at a time", flush=True)
    with ThreadPoolExecutor(plan.jobs) as pool:
        try:
            for made in [pool.submit(_make, plan, arm, seed, patience) for arm, seed in wanted]:
                made.result()
        finally:
            # After Ctrl-C no piece begins; those under way have received it, too, and end by themselves.
            patience.stop()
            pool.shutdown(wait=True, cancel_futures=True)


def _make(plan: Plan, arm: str, seed: int, patience: Patience) -> None:
    overrides = (*plan.arms[arm], f"run.seed={seed}")
    run = pieces.Run(plan.unfinished(arm, seed), plan.config, overrides, plan.marks)
    over = None if plan.over is None else partial(_is_over, plan.over)
    try:
        made = pieces.train(run, plan.piece_seconds, patience.goes_on, over)
    except UserError as error:
        print(f"{plan.name}: {arm}, seed {seed}: {error}", flush=True)
        return
    if made is None:
        return
    if plan.record(arm, seed).exists():
        print(f"{plan.name}: {arm}, seed {seed}: has been made elsewhere meanwhile: left as it is", flush=True)
        return
    record = {
        "arm": arm, "seed": seed, "overrides": list(overrides), **plan.marks, "pieces": pieces.made_by(run.folder),
        # An experiment that looks at the roll-outs of a run that goes on looks at them afterwards, too.
        **records.read(made, with_episodes=plan.over is not None),
    }  # fmt: skip
    plan.results.mkdir(parents=True, exist_ok=True)
    write_json(plan.record(arm, seed), record, indent=None)
    shutil.rmtree(run.folder)
    print(f"{plan.name}: {arm}, seed {seed}: finished, {record['updates']} updates, {record['env_steps']} steps, "
          f"{record['train_seconds']:.0f} s of training", flush=True)  # fmt: skip


def _is_over(over: Callable[[Progress], bool], run: RunDirectory) -> bool:
    return over(records.so_far(run))


# ---- what is written ----


def write(name: str, config: Path, results: Mapping[str, object], what: str = REAL) -> Path:
    """Write results/NAME.json. `what`: what was real and what was not."""
    return write_record(RESULTS / f"{name}.json", name, what, dict(results), config=config.name)
