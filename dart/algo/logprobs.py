"""Log-probabilities and entropy of the policy as it was sampled from (DART, arXiv 2509.23866, step-wise GRPO)."""

from __future__ import annotations

import torch

from dart.algo import checks


def log_distribution(logits: torch.Tensor, temperature: float, banned: torch.Tensor | None = None) -> torch.Tensor:
    """log π(· | h, s) = log softmax(z / τ), where a banned token has z = −∞.

    logits z: any float [T, V]. temperature τ > 0, the one that the roll-out engine sampled with. banned: int64 [K],
    columns that the engine could not sample. Returns [T, V], float64 where z is, else float32; banned columns are −∞
    and get no gradient.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} {tuple(logits.shape)}: they must be floating point [tokens, vocabulary]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: it must be above 0")
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    if banned is not None and banned.numel():
        checks.indices(banned, "banned", banned.shape[0], logits.shape[1])
        scaled = scaled.index_fill(1, banned, -torch.inf)
    return torch.log_softmax(scaled, dim=-1)


def token_logprobs(log_distribution: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """log π(a_t | h, s, a_<t), the entry of each sampled token.

    log_distribution: float [T, V]. token_ids a: int64 [T]. Returns [T].
    """
    if log_distribution.dim() != 2:
        raise ValueError(f"log_distribution has shape {tuple(log_distribution.shape)}: it must be [tokens, vocabulary]")
    checks.indices(token_ids, "token_ids", log_distribution.shape[0], log_distribution.shape[1])
    return log_distribution.gather(1, token_ids.unsqueeze(1)).squeeze(1)


def token_entropy(log_distribution: torch.Tensor, *, gradient: bool = False) -> torch.Tensor:
    """H_t = −Σ_v π(v) log π(v), over the whole vocabulary, in nats; 0 log 0 = 0.

    log_distribution: float [T, V]. Returns [T]. Without `gradient` it selects and reports, and autograd keeps nothing
    of it; with, it is a term of the loss.
    """
    if log_distribution.dim() != 2:
        raise ValueError(f"log_distribution has shape {tuple(log_distribution.shape)}: it must be [tokens, vocabulary]")
    with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
        finite = log_distribution.masked_fill(log_distribution == -torch.inf, 0.0)
        return -(log_distribution.exp() * finite).sum(-1)
