"""How much three numbers of the algorithm matter on the ladder: `python -m benchmarks.learning.sensitivity`.

Runs protocols/sensitivity.yaml: C of the importance weight, the entropy quantile of step selection, and the success
rate above which N falls, each with a value below and one above the paper's. Real, resumable and in pieces as
`benchmarks.learning.ablation` is; 35 runs take some twelve hours on two cores. Writes
results/learning/sensitivity.json and sensitivity.png.
"""

from __future__ import annotations

from benchmarks.trials.command import Experiment, main
from benchmarks.trials.protocol import FOLDER, Protocol

if __name__ == "__main__":
    main(Experiment(FOLDER / "sensitivity.yaml", Protocol, __doc__))
