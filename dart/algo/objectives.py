"""What is maximised per token, before weights and KL: chosen by name, or a function of the user's own.

An objective is `f(tokens, clip_low, clip_high) -> float [T]`, with gradient through `tokens.new` or `tokens.ratio`. The
configuration names it: `trainer.loss.kind: grpo`, or `my_module:my_loss` for one that the train worker can import.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dart.algo import checks
from dart.algo.ratio import token_ratio
from dart.algo.steps import Steps


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of each token; all float [T]. new: log π with gradient; ratio: ρ, token- or sequence-level, with
    gradient; old: log π_old; behaviour: log-probabilities from sampling time; advantages: A of the token's step."""

    new: torch.Tensor
    ratio: torch.Tensor
    old: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    steps: Steps


Objective = Callable[[Tokens, float, float], torch.Tensor]


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A), per token; ε_high > ε_low is DAPO's clip-higher (arXiv 2503.14476).

    ratio ρ, advantages A: float [T]. Returns [T].
    """
    checks.flat(ratio=ratio, advantages=advantages)
    _check_clip(clip_low, clip_high)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def dual_clipped(surrogate: torch.Tensor, advantages: torch.Tensor, bound: float) -> torch.Tensor:
    """max(surrogate, cA) where A < 0, the surrogate elsewhere, per token: dual clip (Ye et al. 2020, "Mastering Complex
    Control in MOBA Games with Deep Reinforcement Learning", arXiv 1912.09729, equation 4, with c = 3).

    The clipped surrogate min(ρA, clip(ρ)A) has no lower bound where A < 0 and ρ is large: one token, whose gradient is
    ρA, outweighs all others. Beyond ρ = c it has the value cA, and no gradient. surrogate and advantages A: float [T];
    bound: c > 1. Returns [T].
    """
    checks.flat(surrogate=surrogate, advantages=advantages)
    if not bound > 1:
        raise ValueError(f"dual_clip {bound} must be above 1: at a ratio of 1 every token needs its gradient")
    return torch.where(advantages < 0, torch.maximum(surrogate, bound * advantages), surrogate)


def clipped_importance(
    new: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """sg[clip(ρ, 1 − ε_low, 1 + ε_high)] · A · log π, per token (CISPO, arXiv 2506.13585).

    Clipping the ratio bounds a token's weight, and no token loses its gradient. ε_low = 1 removes the lower bound, as
    in the paper. new: log π with gradient; ratio ρ, advantages A; all float [T]. Returns [T].
    """
    checks.flat(new=new, ratio=ratio, advantages=advantages)
    _check_clip(clip_low, clip_high)
    return ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * new


def grpo(tokens: Tokens, clip_low: float, clip_high: float) -> torch.Tensor:
    """`clipped_surrogate` as an objective."""
    return clipped_surrogate(tokens.ratio, tokens.advantages, clip_low, clip_high)


def cispo(tokens: Tokens, clip_low: float, clip_high: float) -> torch.Tensor:
    """`clipped_importance` as an objective."""
    return clipped_importance(tokens.new, tokens.ratio, tokens.advantages, clip_low, clip_high)


def likelihood(tokens: Tokens, clip_low: float, clip_high: float) -> torch.Tensor:
    """A · log π: with A = 1 the log-likelihood that supervised training maximises; nothing is clipped."""
    return tokens.advantages * tokens.new


OBJECTIVES: dict[str, Objective] = {"grpo": grpo, "cispo": cispo, "likelihood": likelihood}


def find(kind: str) -> Objective:
    """The objective of that name, or the function that `module:function` names, tried on two tokens.

    Raises ValueError that says what is wrong with the name, the module or the function.
    """
    if kind in OBJECTIVES:
        return OBJECTIVES[kind]
    module_name, separator, function_name = kind.partition(":")
    if not separator:
        raise ValueError(f"{kind} is not a loss: use {', '.join(OBJECTIVES)}, or module:function for one of your own")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # `dart worker` does not look there by itself
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise ValueError(
            f"module {module_name} cannot be imported ({error}): install it where the train worker runs, "
            "start the worker in the module's folder, or put that folder on PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        where = getattr(module, "__file__", "built in")
        raise ValueError(f"module {module_name} ({where}) has no function {function_name}")
    objective: Objective = function
    _try_out(objective, kind)
    return objective


def _try_out(objective: Objective, kind: str) -> None:
    wanted = "it must be f(tokens, clip_low, clip_high) -> float [T] with gradient, as dart.algo.objectives says"
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    old = new.detach()
    steps = Steps(torch.tensor([0, 0]), torch.tensor([2]))
    arguments = (Tokens(new, token_ratio(new, old), old, old, torch.tensor([1.0, -1.0]), steps), 0.2, 0.28)
    try:
        inspect.signature(objective).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{kind} has the wrong signature ({error}): {wanted}") from None
    result = objective(*arguments)
    if not isinstance(result, torch.Tensor) or result.shape != new.shape or not result.requires_grad:
        shown = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ValueError(f"{kind} returned {shown} for 2 tokens: {wanted}")


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise ValueError(f"clip_low {clip_low} must be in (0, 1] and clip_high {clip_high} above 0")
