"""A loss of your own: `trainer.loss.kind: own_loss:gentle`, started in this folder.

The function says what is maximised for each token. Importance weights, KL penalty, entropy bonus and the mean are
applied around it, as the other fields of `trainer.loss` say.
"""

import torch
from torch import Tensor

from dart.algo.objectives import Tokens, clipped_surrogate

FAILURES = 0.5
"""How much a failure counts, compared with a success."""


def gentle(tokens: Tokens, clip_low: float, clip_high: float) -> Tensor:
    """PPO's clipped surrogate min(ρA, clip(ρ) A), times `FAILURES` where A < 0. All float [T]."""
    objective = clipped_surrogate(tokens.ratio, tokens.advantages, clip_low, clip_high)
    return torch.where(tokens.advantages < 0, FAILURES * objective, objective)
