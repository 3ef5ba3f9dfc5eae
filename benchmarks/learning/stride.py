"""Whether screenshots that leave the prompt three at a time cost success: `python -m benchmarks.learning.stride`.

Runs protocols/stride.yaml: training on the ladder's medium and hard tasks with a window of five screenshots, of which
one leaves at every step (`agent.history_stride: 1`) or three at once (3), five seeds each, 60,000 environment steps a
run. Everything is real: Chromium, vLLM, trainer and weight sync on this machine.

Ten runs of some fifteen minutes and two evaluations each, so three hours on two cores. It can be stopped at any moment
and started again, as `benchmarks.learning.ablation` can. --report makes the table and the picture of what is there.
Writes results/learning/stride.json and stride.png.
"""

from __future__ import annotations

from benchmarks.trials.command import Experiment, main
from benchmarks.trials.protocol import FOLDER, Protocol

EXPERIMENT = Experiment(FOLDER / "stride.yaml", Protocol, __doc__)

if __name__ == "__main__":
    main(EXPERIMENT)
