"""What each piece of adaptive curation is worth: `python -m benchmarks.learning.ablation`.

Trains with the whole algorithm, then without one piece at a time and without all of them, on MiniWoB tasks of mixed
difficulty (docs/ablation.md says how they were chosen). The pool begins with 16 successes of each task, collected from
the scripted oracle (`dart collect`) once for all runs. A run ends after the number of environment steps in
configs/ablation.yaml, eleven to eighteen minutes with two runs at a time. The script can be stopped and started again
(`benchmarks.learning.sweep`). Writes results/ablation.json and ablation.png from the finished runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import sweep
from benchmarks.learning.sweep import Setting

CONFIG = Path("configs/ablation.yaml")
WITHOUT = {
    "number": "curation.dynamic_rollouts.enabled=false",
    "length": "curation.dynamic_length.enabled=false",
    "pool": "curation.pool.enabled=false",
    "entropy": "trainer.loss.entropy_quantile=0",
    "importance": "trainer.loss.importance=none",
}
POOL_RUNS = Path("runs/ablation-pool")
PER_TASK = 16
BASE_EPISODES = 1000
STALE = ("curation.max_staleness=8", "trainer.trajectories_per_update=16")
"""Many small updates behind a long queue: samples are at least four versions old."""
SETTINGS = (
    Setting("full", ()),
    *(Setting(f"without-{name}", (override,)) for name, override in WITHOUT.items()),
    Setting("none", tuple(WITHOUT.values())),
    Setting("stale", STALE),
    Setting("stale-without-importance", (*STALE, WITHOUT["importance"])),
    Setting("informative", ("curation.task_preference=0.75",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time: one per core that can be spared")
    parser.add_argument("--settings", default="", help="only these, by name, separated by commas")
    parser.add_argument("--report", action="store_true", help="run nothing; write the table of the finished runs")
    options = parser.parse_args()
    wanted = options.settings.split(",") if options.settings else [setting.name for setting in SETTINGS]
    if unknown := set(wanted) - {setting.name for setting in SETTINGS}:
        parser.error(f"--settings {', '.join(unknown)}: known are {', '.join(s.name for s in SETTINGS)}")
    base = sweep.evaluate_base("ablation", CONFIG, BASE_EPISODES)
    if not options.report:
        chosen = [setting for setting in SETTINGS if setting.name in wanted]
        sweep.run_missing("ablation", CONFIG, chosen, range(options.seeds), pool(), options.jobs)
    runs = sweep.finished("ablation", SETTINGS)
    if not runs:
        parser.error("no run is finished yet: leave --report out")
    rows = sweep.table(runs, base)
    sweep.show(rows, base)
    results = {"base": base, "table": rows, "steps_saved_at_equal_success": steps_saved(runs)}
    print(sweep.write("ablation", CONFIG, results))
    print(sweep.plot("ablation", runs, "Without one piece at a time"))


def pool() -> tuple[str, ...]:
    """The override that names the oracle's successes, which are first collected if there are none."""
    if not POOL_RUNS.is_dir() or not any(POOL_RUNS.glob("*/summary.json")):
        command = [sys.executable, "-m", "dart", "collect", str(CONFIG), "--from", "oracle", "--quiet"]
        command += ["--per-task", str(PER_TASK), "--set", f"run.directory={POOL_RUNS}"]
        subprocess.run(command, check=True)
    newest = max(path.parent for path in POOL_RUNS.glob("*/run.db"))
    return (f"curation.pool.sources=[{newest}]",)


def steps_saved(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Environment steps in which `full` reaches the success that `none` ends with, compared with those of `none`."""
    if not {"full", "none"} <= set(runs):
        return {}
    level = statistics.fmean(run["curve"][-1][2] for run in runs["none"])
    needed = {name: [sweep.steps_to(run, level) for run in runs[name]] for name in ("full", "none")}
    reached = {name: [steps for steps in made if steps is not None] for name, made in needed.items()}
    saved = None
    if reached["full"] and reached["none"]:
        saved = 1 - statistics.fmean(reached["full"]) / statistics.fmean(reached["none"])
    return {"success": level, "env_steps": needed, "saved": saved}


if __name__ == "__main__":
    main()
