"""Timings of full-HD screenshots, derived from floating-point operations: the named set-ups that begin with `honest`.

`timings.py` assumes 7,000 tokens a step and that the engine's prefix cache has all but a new screenshot. Five full-HD
screenshots are 13,500 tokens, and with a window that slides by one screenshot both the cache and training lose what
comes after the first of them. Operations are `dart.core.capacity`'s for UI-TARS-1.5-7B over trajectories of 30 steps,
each step with the same share of them; shorter trajectories, whose prompts are shorter, are cheaper than that. Cards are
H100 at `UTILISATION` of their peak. `python -m benchmarks.gpu` and `benchmarks.gpu.replica` measure on a card: an H100
sampled ten-step episodes 1.16 and 1.19 times as fast as these timings say, with quicker passes and slower prompts. One
H200, without sharding, reached 0.51 to 0.57 of its peak with the whole model, counting what is computed again: a row
took 0.70 to 0.78 of the time that follows from `UTILISATION`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from benchmarks.gpu.models import ui_tars
from benchmarks.simulation.full_hd.prompts import SLIDING, STRIDE_3, History
from benchmarks.simulation.timings import Timings
from dart.core.capacity.work import PEAKS, Passes, forward, of_vision, seconds, update

UTILISATION = 0.4
STEPS = 30
QUANTILE = 0.2
"""The share of steps that selection by entropy leaves out."""
GIGABYTES = 16.6
"""Of bfloat16 weights, with the vision tower."""
GPUS = 8
"""Training GPUs that `trainer_seconds` is for; `efficiency.timings_for` scales it."""
Trains = Literal["all", "language model", "adapter"]
"""What the trainer trains: all weights; those without the tower's (`trainer.freeze_vision`); or an adapter beside the
language model's (`trainer.lora`, without `tower`), whose reference, the policy without it, takes a pass as any."""


def trainer_seconds(history: History, trains: Trains = "all") -> float:
    """Seconds that GPUS training GPUs need for a step: one pass to score, one of the reference, and forward, backward
    and recomputation (gradient checkpointing).

    Selection makes work less where every step is a row of its own; in a row of several steps the tokens of one that is
    left out are still needed by the others, so nothing is saved there. Where the tower does not train, each screenshot
    is encoded once, and its embedding kept for every pass.
    """
    shape, load = ui_tars(), history.training(STEPS)
    frozen = trains != "all"
    passes = Passes(
        score=True,
        reference=True,
        trained_share=1 - QUANTILE if history.drop == 1 else 1.0,
        recompute=True,
        vision_trains=not frozen,
        weights_train=trains != "adapter",
    )
    if frozen:
        once = of_vision(shape.vision, replace(load, screenshots=STEPS))
        operations = update(shape, replace(load, screenshots=0), passes).total + once
    else:
        operations = update(shape, load, passes).total
    return seconds(operations, GPUS, PEAKS["H100"], UTILISATION) / STEPS


def prefill_seconds(history: History) -> float:
    """Seconds in which a replica of one GPU computes what its caches lack of a step's prompt, on average."""
    return seconds(forward(ui_tars(), history.sampling(STEPS)), 1, PEAKS["H100"], UTILISATION) / STEPS


def honest(history: History, trains: Trains = "all") -> Timings:
    """`Timings` with what follows from operations. Replicas get whole weights whatever trains: an adapter's are merged
    (`trainer.lora.sync: merged`, the default)."""
    base = Timings()
    return replace(
        base,
        replica=replace(base.replica, prefill_seconds=prefill_seconds(history)),
        trainer=replace(base.trainer, seconds_per_step=trainer_seconds(history, trains)),
        sync=replace(base.sync, gigabytes=GIGABYTES),
    )


NAMED = {
    "honest-sliding": honest(SLIDING),
    "honest-stride3": honest(STRIDE_3),
    "honest-stride3-frozen-vision": honest(STRIDE_3, "language model"),
    "honest-stride3-lora": honest(STRIDE_3, "adapter"),
}
"""By name; the set-ups without one have `Timings()`."""
