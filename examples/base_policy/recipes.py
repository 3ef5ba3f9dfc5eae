"""Base policies: what each is taught, and for how long. Imitation is clean and short: no mistakes are demonstrated, and
a policy is weak because it was never shown some skills.

builtin:tiny-qwen3vl is older than these recipes: it imitates an oracle that makes 45 % of its moves wrong on purpose
(docs/learning.md says what that means for what it learns). `miniwob` is meant to replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dart.workers.env import ladder_layout
from dart.worlds import World
from dart.worlds.plugs import find

DEMONSTRATED = 2_000_000
"""The first seed of the demonstrations; configs train on seeds below 1,000,000 and evaluate on those from there on."""
VALIDATED = 3_000_000
"""The first seed of the episodes by which training length and tasks are chosen."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`taught`: task name → episodes per training step. `tasks`: all that the policy is meant for; the tokenizer knows
    the words of their instructions, so that what was not taught can be learned later."""

    kind: str
    """As in `environment.kind`."""
    viewport: tuple[int, int]
    """(width, height) in pixels, multiples of patch 16 × merge 2, so that nothing is resized."""
    taught: Mapping[str, int]
    tasks: tuple[str, ...]
    demonstrations: int
    """Recorded of each taught task."""
    steps: int
    """Training steps."""
    step_limit: int
    """Of validation episodes."""
    history_screenshots: int = 2
    """As in `agent.history_screenshots` of the configs that use the policy."""
    ancestor: str = ""
    """The policy that ships with dart whose weights it begins with; empty: random ones."""
    learning_rate: float = 1.5e-3
    warm_up: int = 100
    """The first training steps, over which the learning rate rises."""
    cool_down: int = 0
    """The last training steps, over which the learning rate falls to its least; all if 0."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """Task → how many of its last steps are always trained on. Of the steps before them, which are learned sooner, a
    share of `others` is. A task that is not here is trained on whole."""
    others: float = 1.0
    alone: int = 0
    """Rows per training step that show one decision without what came before."""
    one_decision: Callable[[str, int], str] | None = None
    """An episode's instruction and the number of a decision → the instruction of an episode that has it alone. Needed
    where `alone` is not 0."""
    jitter: float = 0.06
    """Demonstrated clicks are within this share of their target's size around its middle."""
    spellings: int = 0
    """Rows per step that only ask for a made-up name to be typed, for tasks that ask for that."""
    texts: int = 200
    """Instructions of each task that the tokenizer is made from."""
    at_once: int = 4
    """Environments in which demonstrations are recorded."""

    @property
    def world(self) -> type[World]:
        found = find(self.kind)
        assert issubclass(found, World)
        return found

    def first_decision(self, task: str, steps: int) -> int:
        """The first step that is always trained on, of an episode with so many."""
        return steps - self.decisions.get(task, steps)


def _one_of_the_ladders(instruction: str, decision: int) -> str:
    opening, *names = instruction.removesuffix(".").split(", then ")
    return f"{opening}, then {names[decision]}."


_LEVELS = {
    level: tuple(name for name in ladder_layout.task_names() if f"-{level}-" in name) for level in ladder_layout.LEVELS
}

RECIPES = {
    "miniwob": Recipe(
        kind="miniwob",
        viewport=(160, 224),
        taught={"click-test": 4, "focus-text": 4, "click-color": 4},
        tasks=(
            "click-test", "focus-text", "click-color", "click-test-2", "click-dialog", "focus-text-2",
            "click-button-sequence", "click-collapsible", "click-option", "click-tab", "click-link", "click-button",
        ),
        demonstrations=2000,
        steps=800,
        step_limit=6,
    ),
    "ladder": Recipe(
        kind="ladder",
        viewport=(96, 96),
        taught={name: 1 for name in _LEVELS["easy"]}
        | {name: 2 for name in (*_LEVELS["chain3"], *_LEVELS["chain5"], *_LEVELS["either"])}
        | {name: 1 for name in _LEVELS["long"]},
        tasks=ladder_layout.task_names(),
        demonstrations=250,
        steps=300,
        cool_down=150,
        learning_rate=1.3e-3,
        step_limit=30,
        history_screenshots=30,
        decisions={name: ladder_layout.level_of(name).decisions for name in ladder_layout.task_names()},
        others=0.5,
        alone=96,
        one_decision=_one_of_the_ladders,
        jitter=0.0,
    ),
    "desktop": Recipe(
        kind="desktop",
        viewport=(160, 96),
        taught={"colour-grid": 16, "colour-next": 6, "colour-type": 3},
        tasks=(
            "colour-grid", "colour-next", "colour-type", "colour-check", "colour-list", "colour-confirm", "colour-two",
        ),
        demonstrations=500,
        steps=150,
        ancestor="tiny-qwen3vl",
        learning_rate=8e-4,
        warm_up=20,
        step_limit=4,
        history_screenshots=4,
        texts=40,
        at_once=12,
    ),
}  # fmt: skip
