"""What each piece of adaptive data curation is worth on the ladder: `python -m benchmarks.learning.ablation`.

Runs protocols/ablation.yaml: the whole algorithm, none of it, and the algorithm without the dynamic number, the dynamic
length or the experience pool, five seeds each, 60,000 environment steps a run. Everything is real: Chromium, vLLM,
trainer and weight sync on this machine. First the base policy is evaluated on the held-out instances, and the
protocol's gates are checked on training seeds; nothing runs if they fail.

In pieces of half an hour (--piece-minutes); on two cores some twenty minutes for each run and its two evaluations, so
eight hours for all 25. It can be stopped at any moment (Ctrl-C, kill -9) and started again; --minutes ends it by
itself. --report makes the table and the picture of what is there. Writes results/learning/ablation.json and
ablation.png.
"""

from __future__ import annotations

from benchmarks.trials.command import Experiment, main
from benchmarks.trials.protocol import FOLDER, Protocol

if __name__ == "__main__":
    main(Experiment(FOLDER / "ablation.yaml", Protocol, __doc__))
