"""A control: imitation of the policy's own successes, as a loss (`trainer.loss.kind`).

Rejection sampling fine-tuning, on-line: of each group, the successes are imitated and the failures ignored. Groups
whose members all succeed are dropped as for GRPO, so both learn from the same trajectories.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dart.algo.objectives import Tokens


def own_successes(tokens: Tokens, clip_low: float, clip_high: float) -> torch.Tensor:
    """log π of the tokens of successes, which alone have positive advantages; float [T]."""
    return (tokens.advantages > 0) * tokens.new
