"""examples/python: a reward and a loss of one's own, found as dart finds them. The world is in tests/worlds, and a run
with it in tests/whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dart.testing import conform

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


@pytest.fixture(autouse=True)
def started_in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("own_reward", "own_loss"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_quick_solution_earns_more() -> None:
    import own_reward

    assert [own_reward.reward(1.0, actions) for actions in (0, 1, 2, 11, 99)] == [1.0, 1.0, 0.9, 0.0, 0.0]
    assert own_reward.reward(0.0, 1) == 0.0


@pytest.mark.browser
def test_the_world_with_another_reward_conforms() -> None:
    conform("own_reward:BriskMiniWob", "click-test", "click-color")


@pytest.mark.browser
async def test_the_page_is_paid_by_the_own_reward() -> None:
    import own_reward

    from dart.workers.env.web import WebOptions
    from dart.worlds import Observe, Task

    world = own_reward.BriskMiniWob()
    await world.start(WebOptions(), (160, 224))
    try:
        env = await world.lease()
        await env.reset(Task("own_reward:BriskMiniWob", "click-test", 1))
        for _ in range(3):
            await env.act(Observe())
        action = await env.suggest()
        assert action is not None
        seen = await env.act(action)
        verdict = await env.judge(action, False)
    finally:
        await world.close()
    assert seen.done and verdict.reward == pytest.approx(0.7) == seen.reward
    assert verdict.evidence["actions"] == 4 and verdict.evidence["raw"] == 1.0


@pytest.mark.torch
def test_the_loss_is_gentler_on_failures() -> None:
    import torch

    from dart.algo.objectives import Tokens, find
    from dart.algo.steps import Steps

    ratio, advantages = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, -1.0, -1.0])
    zeros = torch.zeros(3)
    tokens = Tokens(zeros, ratio, zeros, zeros, advantages, Steps(torch.zeros(3, dtype=torch.int64), torch.tensor([3])))
    assert find("own_loss:gentle")(tokens, 0.2, 0.28).tolist() == [1.0, -0.5, -1.0]
