"""Several actions in one turn, as the families' own harnesses carry them out: on one screenshot, one after the other.

Only where `agent.actions_per_step` allows more than one, and only in a text that the strict grammar refuses. Each
action is read by itself, strictly or with the grammar's rules. What would finish the episode is left for a later step,
which sees what the actions before it have done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dart.agent.parsing import ParseError
from dart.agent.rules import qwen3_vl, ui_tars_text
from dart.core.action import Action, Finish, Several, Single

ReadOne = Callable[[str], tuple[Single, tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Together:
    """How one grammar's text holds several actions; the first three fields are as in `Rule`."""

    slug: str
    accepts: str
    example: str
    apart: Callable[[str], Sequence[str]]
    """The texts of each action; none if there are not several."""


UI_TARS = Together(
    "several-actions",
    "If `agent.actions_per_step` is above 1, further actions, each on a line of its own, are carried out in the same "
    "step.",
    "Action: hotkey(key='shift')\n\nclick(start_box='(1,2)')",
    ui_tars_text.calls_apart,
)
QWEN3_VL = Together(
    "several-calls",
    "If `agent.actions_per_step` is above 1, further calls are carried out in the same step.",
    qwen3_vl.TWO_CALLS,
    qwen3_vl.calls_apart,
)


def read_together(rule: Together, text: str, most: int, read: ReadOne) -> tuple[Action, tuple[str, ...]] | None:
    """The actions in the text, at most `most`, and the names of the rules that they took; None if it has only one.

    `read` reads one of them. The first that cannot be read is left out, with all that follow, as all but the first are
    where only one is allowed; None as well if it is the first of all, which may be one action in several lines.
    """
    actions: list[Single] = []
    used = [rule.slug]
    for one in rule.apart(text)[:most]:
        try:
            action, rules = read(one)
        except ParseError:
            break
        if isinstance(action, Finish) and actions:
            break
        used += [slug for slug in rules if slug not in used]
        actions.append(action)
        if isinstance(action, Finish):
            break
    if not actions:
        return None
    return (Several(tuple(actions)) if len(actions) > 1 else actions[0]), tuple(used)
