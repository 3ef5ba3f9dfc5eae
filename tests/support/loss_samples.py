"""Small responses, recipes and arguments for the tests of the equations."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from dart.algo.loss import Recipe  # noqa: E402
from dart.algo.objectives import (  # noqa: E402
    OBJECTIVES,
)
from dart.algo.steps import Steps, Totals  # noqa: E402
from dart.config import Loss  # noqa: E402


def close(actual: Any, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def logs(*probabilities: float) -> Any:
    return torch.tensor(probabilities).log()


def steps(*lengths: int) -> Steps:
    tensor = torch.tensor(lengths)
    return Steps(torch.repeat_interleave(torch.arange(len(lengths)), tensor), tensor)


def gradient(value: Any, by: Any) -> Any:
    return torch.autograd.grad(value, by, retain_graph=True)[0]


def double(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sequence_ratio(new: Any, old: Any, steps: Steps) -> Any:
    """GSPO's s = exp(1/|y| Σ_t log(π(a_t) / π_old(a_t))) at each token of a step (arXiv 2507.18071): its gradient there
    is s/|y| Σ_u ∂ log π(a_u), so that every token's term moves every token of the step."""
    return steps.spread(steps.means(new - old).exp())


def recipe(**changes: Any) -> Recipe:
    """The paper's, without KL, in the configuration's own words."""
    loss = Loss(**{"kl_coefficient": 0.0, **changes}).model_dump(exclude={"kind", "entropy_quantile"})
    return Recipe(objective=OBJECTIVES[changes.get("kind", "grpo")], **loss)


def arguments(changes: dict[str, Any] | None = None, **choices: Any) -> dict[str, Any]:
    """Ratios 1.5, 1, 1 over steps of 2 and 1 tokens; π_old / π_behaviour is 2, 0.5 and 1."""
    values: dict[str, Any] = {
        "recipe": recipe(**choices), "new": logs(0.3, 0.2, 0.5), "old": logs(0.2, 0.2, 0.5),
        "behaviour": logs(0.1, 0.4, 0.5), "advantages": torch.tensor([1.0, 1.0, -2.0]), "steps": steps(2, 1),
        "totals": Totals(2, 3, 3),
    }  # fmt: skip
    return values | (changes or {})
