"""How long things take on a real cluster: every number of the simulation, with where it comes from.

Sources. [OSWorld]: arXiv 2404.07972, its repository, and what its users report (snapshot revert, settle wait, pause
after each action); the ranges are theirs, the uniform distribution within them is ours. [DART]: arXiv 2509.23866
(environments, 30 steps, N = 8, UI-TARS-1.5-7B, 8 H100 for training; the batch of 64 roll-outs, and 8 replicas of one
H100 beside 180 environments, are ours). [vLLM]: public throughput figures of 7B models on an
H100, to one digit. [ours]: an assumption that nothing published settles; docs/efficiency.md says what depends on it.

Full-HD screenshots cost more than is assumed here: `benchmarks.simulation.full_hd` has timings for them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnvTimes:
    """Seconds in the environment."""

    boot: tuple[float, float] = (22.0, 39.0)
    """Reverting a VM to its snapshot and starting it [OSWorld]."""
    settle: tuple[float, float] = (10.0, 60.0)
    """Setting up the task and waiting until the desktop has settled, at most a minute [OSWorld]."""
    step: tuple[float, float] = (2.0, 10.0)
    """An action, the pause after it, and a screenshot [OSWorld]."""
    grade: tuple[float, float] = (1.0, 5.0)
    """The verifier, after the last action [ours]."""

    def reset(self, chance: random.Random) -> float:
        return chance.uniform(*self.boot) + chance.uniform(*self.settle)

    def act(self, chance: random.Random, last: bool) -> float:
        return chance.uniform(*self.step) + (chance.uniform(*self.grade) if last else 0.0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Steps of a trajectory without a step limit: log-normal, heavy-tailed between 3 and 50 [OSWorld's human and agent
    trajectories; median and spread ours]. Failures wander and are longer by a factor [ours]."""

    median: float = 16.0
    sigma: float = 0.6
    least: int = 3
    most: int = 50
    failure_factor: float = 1.8

    def sample(self, chance: random.Random, success: bool) -> int:
        steps = chance.lognormvariate(math.log(self.median), self.sigma) * (1.0 if success else self.failure_factor)
        return min(self.most, max(self.least, round(steps)))


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """One replica: a request needs its prompt's new tokens computed, then one pass per token of its answer.

    All requests share each pass, so with more of them passes get slower and throughput grows. Computing a prompt is not
    shared: all others wait meanwhile, so its time is added to everybody's passes.
    """

    prefill_seconds: float = 0.12
    """A new screenshot and the turn before, some 1,200 tokens; the rest is in the prefix cache [vLLM: 10,000 tokens/s
    for a 7B model on an H100]. Sliding windows, which lose their cached prefix, are in `full_hd` alone."""
    pass_seconds: float = 0.009
    """A decoding pass with one request [vLLM: about 110 tokens/s]."""
    pass_seconds_per_request: float = 0.00025
    """What each further request adds to it [vLLM: throughput still grows at 64 requests]."""
    tokens: tuple[int, int] = (60, 200)
    """Tokens of an answer, uniform: thought and action of UI-TARS [ours]."""
    slots: int = 32

    def work(self, chance: random.Random) -> float:
        """Passes that a request takes."""
        return chance.uniform(*self.tokens)

    def seconds_per_pass(self, requests: int) -> float:
        """With this many requests in flight. Each computes its prompt once during its answer's passes."""
        share = self.prefill_seconds * requests / (sum(self.tokens) / 2)
        return self.pass_seconds + self.pass_seconds_per_request * (requests - 1) + share


@dataclass(frozen=True, slots=True)
class TrainerTimes:
    """An update: forward and backward over every step, and two more forward passes (old policy, reference)."""

    seconds_per_step: float = 0.15
    """A step has some 7,000 tokens, five screenshots of 1,200 among them: 7.6e9 parameters × 9 FLOP × 7,000 (four steps
    in five train) on 8 H100 at 40 % of 989 TFLOP/s [ours, from the model's size; DART trains with 8 H100]."""
    seconds: float = 10.0
    """Per update, whatever its size: optimiser, offloading, logging [ours]."""

    def update(self, steps: int) -> float:
        return self.seconds + self.seconds_per_step * steps


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """15.2 GB of bfloat16 weights."""

    gigabytes: float = 15.2
    gigabytes_per_second: float = 2.5
    """From trainer to replica over NCCL, including gathering the shards [ours: a tenth of a 200 Gbit/s link]."""
    restart: float = 5.0
    """Until the replica accepts requests again: cache reset, first batch [ours]."""
    at_once: int = 8
    """Replicas that the trainer can send to at that speed: one per training GPU's link [ours]. Others wait."""

    @property
    def seconds(self) -> float:
        return self.gigabytes / self.gigabytes_per_second + self.restart


@dataclass(frozen=True, slots=True)
class Timings:
    """The defaults are kind to a window that slides: with one, the replica has little of a prompt in its cache, and the
    trainer computes five screenshots anew for each step."""

    env: EnvTimes = EnvTimes()
    lengths: Lengths = Lengths()
    replica: ReplicaTimes = ReplicaTimes()
    trainer: TrainerTimes = TrainerTimes()
    sync: SyncTimes = SyncTimes()
    failures_per_step: float = 0.0003
    """The chance that a desktop hangs or dies [ours: one trajectory in two hundred]."""


def success_rate(task: int, tasks: int) -> float:
    """The success rate of a task. Rates are spread evenly, so that groups fail, succeed or are mixed as in training.

    The mean is 0.42, or about 0.36 with the step limit, which cuts longer trajectories [ours]; UI-TARS-1.5-7B has 0.28,
    and DART ends with 0.42.
    """
    return (task + 0.5) / tasks * 0.84
