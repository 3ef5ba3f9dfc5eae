"""How much three numbers of the algorithm matter: `python -m benchmarks.learning.sensitivity`.

They are C of the importance weight, the entropy quantile of step selection, and the success rate above which N falls:
three values of each, the paper's in the middle, otherwise as in `benchmarks.learning.ablation` (whose `full` runs have
the paper's values). Writes results/sensitivity.json and sensitivity.png.
"""

from __future__ import annotations

import argparse

from benchmarks.learning import sweep
from benchmarks.learning.ablation import BASE_EPISODES, CONFIG, pool
from benchmarks.learning.sweep import Setting

VALUES = {
    "trainer.loss.importance_cap": ("0.5", "2.0"),
    "trainer.loss.entropy_quantile": ("0.1", "0.4"),
    "curation.dynamic_rollouts.threshold": ("0.4", "0.8"),
}
"""In addition to the paper's 1, 0.2 and 0.6."""
SETTINGS = tuple(
    Setting(f"{field.rpartition('.')[2]}-{value}", (f"{field}={value}",))
    for field, values in VALUES.items()
    for value in values
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each value")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time: one per core that can be spared")
    parser.add_argument("--report", action="store_true", help="run nothing; write the table of the finished runs")
    options = parser.parse_args()
    base = sweep.evaluate_base("ablation", CONFIG, BASE_EPISODES)
    if not options.report:
        sweep.run_missing("sensitivity", CONFIG, SETTINGS, range(options.seeds), pool(), options.jobs)
    runs = sweep.finished("ablation", (Setting("full", ()),)) | sweep.finished("sensitivity", SETTINGS)
    if not runs:
        parser.error("no run is finished yet: leave --report out")
    rows = sweep.table(runs, base)
    sweep.show(rows, base)
    print(sweep.write("sensitivity", CONFIG, {"base": base, "table": rows, "values": VALUES}))
    print(sweep.plot("sensitivity", runs, "Other values than the paper's"))


if __name__ == "__main__":
    main()
