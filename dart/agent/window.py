"""How much of an episode a prompt holds: which turns are in it, and which of them still with their screenshots.

A window that drops one screenshot at every step makes no prompt continue the one before, so neither the engine's prefix
cache nor the trainer's rows can share anything behind the oldest screenshot. Dropping them in blocks (`stride`) leaves
the beginning as it is between two drops: each prompt there is the one before, extended.
"""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """Which of the turns so far are in the prompt, by index: those from `first` on, and those from `pictured` on with
    their screenshots. 0 ≤ first ≤ pictured ≤ the number of turns. This step's own screenshot is always shown."""

    first: int
    pictured: int


def shown_at_most(screenshots: int, turns: int) -> int:
    """The most screenshots in a prompt, including this step's: an earlier one is shown only with its turn."""
    return min(screenshots, turns + 1)


def window(count: int, screenshots: int, turns: int, stride: int) -> Window:
    """The window after `count` turns, which is that of the step with index `count`.

    screenshots: the most in a prompt, including this step's (`agent.history_screenshots`); turns: the most earlier
    turns (`agent.history_turns`); stride: how many screenshots are dropped at once (`agent.history_stride`), from 1 to
    `shown_at_most`.

    Let m = `shown_at_most`. Until step m - 1 everything is in the prompt. At step m, and at every stride-th step from
    there on, so much is dropped that nothing more has to be dropped before the next of these steps. So a prompt shows
    from m - stride + 1 to m screenshots. Turns are dropped at the same steps, as few as keep their number within
    `turns`. With stride 1 both windows slide at every step: the last m screenshots, the last `turns` turns.
    """
    most = shown_at_most(screenshots, turns)
    if count < most:
        return Window(0, 0)
    before_next_drop = count - (count - most) % stride + stride - 1
    return Window(max(0, before_next_drop - turns), before_next_drop + 1 - most)
