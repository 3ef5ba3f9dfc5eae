"""What trainer and replica on one GPU can show: `python -m benchmarks.gpu.shared`, on one GPU with vLLM.

Real training runs of the tiny policy on the example's coloured boxes (examples/python/own_world.py, which needs no
browser), in bfloat16 and with weights over gloo, one after another:

- *eager* (`rollout.enforce_eager: true`) and *graphs* (vLLM compiles, and captures CUDA graphs);
- *fp8* (`rollout.quantization: fp8`);
- *adapter* (`trainer.lora`, merged into the weights that are sent);
- *killed replica*: after two updates the replica gets SIGKILL. The run must end by itself, and the replica's next
  process must get weights.

Expected of each: every update is made, no transfer fails, the replica's log-probabilities of its own samples agree with
the trainer's forward pass of the same weights (`same_version_difference`), and held-out success rises, with disjoint
intervals. Sampling and training run side by side, so few tokens are compared but those of the first update, whose
weights both ends read from the disk (`later_same_version_tokens` counts the others): that weights arrive shows in
success. `--only` names some; `--together` starts all at once, so that their times say nothing. Writes
results/gpu/shared-CARD.json after each; a later run replaces only what it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.record import RESULTS, file_of, name_of, record
from benchmarks.gpu.trial import CONFIG, KILLED, MOST_DIFFERENCE, Fault, Trial, disagreement, overrides, tried
from benchmarks.gpu.trial import findings as trial_findings
from dart.config import Config, load
from dart.processes.gpus import VISIBLE, gpus_here

MOST_DIFFERENCE_FP8 = 0.15
"""With matrices multiplied in 8-bit floats [ours]."""
UPDATES = 60
EPISODES = 100
"""Of each evaluation, held out."""
SHARE = 0.08
"""Of the GPU, for a replica: all set-ups fit one card together."""


@dataclass(frozen=True, slots=True)
class SetUp:
    name: str
    changes: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    most_difference: float = MOST_DIFFERENCE

    def overrides(self, updates: int = UPDATES, episodes: int = EPISODES) -> list[str]:
        share = f"rollout.engine_args={{gpu_memory_utilization: {SHARE}}}"
        return [*overrides(updates, episodes), "rollout.replicas=1", share, *self.changes]


SET_UPS = (
    SetUp("eager"),
    SetUp("adapter", ("trainer.lora={rank: 16}", "trainer.learning_rate=1e-3")),
    SetUp("fp8", ("rollout.quantization=fp8",), most_difference=MOST_DIFFERENCE_FP8),
    SetUp("graphs", ("rollout.enforce_eager=false",)),
    SetUp("killed replica", faults=KILLED),
)


def config_of(set_up: SetUp) -> Config:
    return load(CONFIG, set_up.overrides())


def findings(set_up: SetUp, trial: Trial, updates: int) -> list[str]:
    """What is not as it should be; empty if everything is."""
    wrong = trial_findings(trial, updates=updates) + disagreement(trial.of("update"), set_up.most_difference)
    if set_up.faults:
        if not trial.injected.at:
            wrong.append("the replica was not killed")
        elif not any(event["event"] == "sync" for event in trial.events[trial.injected.at[0] :]):
            wrong.append("the replica, which was killed, got no weights afterwards")
    before, after = trial.summary.get("success_before"), trial.summary.get("success_after")
    if not before or not after:
        return [*wrong, "success was not measured before and after"]
    decodings = ("greedy", "sampled")
    return wrong + [f"{one} success did not rise" for one in decodings if after[one]["low"] <= before[one]["high"]]


def run(set_up: SetUp, updates: int, episodes: int) -> dict[str, object]:
    changes = set_up.overrides(updates, episodes)
    return tried(changes, lambda trial: findings(set_up, trial, updates), set_up.faults)


def runs(
    chosen: list[SetUp], updates: int, episodes: int, *, together: bool
) -> Iterator[tuple[str, dict[str, object]]]:
    """(name, result) of each, as they end."""
    if not together:
        yield from ((one.name, run(one, updates, episodes)) for one in chosen)
        return
    with ThreadPoolExecutor(len(chosen)) as pool:
        going = {pool.submit(run, one, updates, episodes): one.name for one in chosen}
        for done in as_completed(going):
            yield going[done], done.result() | {"beside_others": len(chosen) - 1}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in SET_UPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--together", action="store_true", help="start all at once")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of each evaluation")
    parser.add_argument("--conditions", default="", help="a note for the result file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    gpus = gpus_here()[:1]
    if not gpus:
        sys.exit("this machine has no GPU that nvidia-smi lists")
    os.environ[VISIBLE] = gpus[0]
    card = name_of(gpus)
    path = file_of(options.output, "shared", card)
    what = "real: training runs, trainer and vLLM on one GPU, weights over gloo"
    about = {"name": "gpu_shared", "real_or_simulated": what, "card": card}
    chosen = [one for one in SET_UPS if one.name in options.only]
    for name, result in runs(chosen, options.updates, options.episodes, together=options.together):
        print(json.dumps({name: result}), flush=True)
        record(path, about, name, result, options.conditions)
    print(path)


if __name__ == "__main__":
    main()
