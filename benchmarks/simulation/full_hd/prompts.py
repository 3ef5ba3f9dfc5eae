"""What a trajectory's prompts cost, by how many screenshots they show: tokens, attention, screenshots encoded.

A prompt is a system text, and for each step its screenshot and its answer, of which the oldest screenshots are left
out. Training puts a step into the row of the step before it where its prompt begins with that step's whole prompt and
answer (`workers/train/batch.py`); an engine finds in its prefix cache what two prompts in a row begin with. Both end
where a screenshot is left out that was there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.gpu.models import SCREENSHOT_TOKENS
from dart.agent.window import window
from dart.core.capacity.work import Load, causal_pairs

SYSTEM = 1000
"""Tokens of the system text and the instruction [ours: UI-TARS' prompt has some 700, an instruction up to 300]."""
ANSWER = 130
"""Tokens of an answer: the mean of `ReplicaTimes.tokens`."""
TEMPLATE = 5
"""Tokens that begin and end a message."""
SCREENSHOT = SCREENSHOT_TOKENS + 4
"""With what begins and ends it."""
PATCHES = 4 * SCREENSHOT_TOKENS


@dataclass(frozen=True, slots=True)
class History:
    """At most `most` screenshots in a prompt; when there would be more, the oldest `drop` are left out together. All
    earlier turns stay as text."""

    most: int = 5
    drop: int = 1

    def shown(self, step: int) -> int:
        """Screenshots in the prompt of this step (from 1)."""
        _, pictured = window(step - 1, self.most, step, self.drop)
        return step - pictured

    def prompt(self, step: int) -> int:
        """Tokens of its prompt."""
        return SYSTEM + self.shown(step) * SCREENSHOT + (step - 1) * (ANSWER + TEMPLATE)

    def drops(self, step: int) -> bool:
        """Whether a screenshot is left out that the step before had."""
        return step > 1 and self.shown(step) <= self.shown(step - 1)

    def cached(self, step: int) -> int:
        """Tokens of its prompt that the engine has computed for the step before."""
        if step == 1:
            return 0
        if not self.drops(step):
            return self.prompt(step - 1) + ANSWER
        oldest = step - self.shown(step - 1)  # of those that the step before showed
        return SYSTEM + (oldest - 1) * (ANSWER + TEMPLATE)

    def rows(self, steps: int) -> Iterator[tuple[int, int, int]]:
        """(tokens, steps, screenshots) of each row that a trajectory of `steps` steps becomes in training."""
        first = 1
        for step in range(1, steps + 1):
            if step == steps or self.drops(step + 1):
                yield self.prompt(step) + ANSWER, step - first + 1, self.shown(step)
                first = step + 1

    def training(self, steps: int) -> Load:
        """What one pass over a trajectory's rows goes over."""
        rows = list(self.rows(steps))
        return Load(
            tokens=sum(tokens for tokens, _, _ in rows),
            pairs=sum(causal_pairs(tokens) for tokens, _, _ in rows),
            responses=steps * ANSWER,
            screenshots=sum(screenshots for _, _, screenshots in rows),
            patches=PATCHES,
        )

    def sampling(self, steps: int) -> Load:
        """What the engine computes of a trajectory's prompts. It encodes a screenshot again where its tokens have to be
        computed again: its cache of encoded screenshots is shared by all requests, and has lost them by then."""
        load = Load(0, 0, 0, 0, PATCHES)
        for step in range(1, steps + 1):
            prompt, cached = self.prompt(step), self.cached(step)
            pairs = causal_pairs(prompt) - causal_pairs(cached)
            load += Load(prompt - cached, pairs, 1, self.shown(step) if self.drops(step) else 1, PATCHES)
        return load

    def prompt_tokens(self, steps: int) -> int:
        """Of all prompts and answers, as if nothing were shared."""
        return sum(self.prompt(step) + ANSWER for step in range(1, steps + 1))

    def cached_share(self, steps: int) -> float:
        """The share of prompt tokens that the engine finds in its prefix cache."""
        numbers = range(1, steps + 1)
        return sum(map(self.cached, numbers)) / sum(map(self.prompt, numbers))


SLIDING, STRIDE_3 = History(), History(drop=3)
