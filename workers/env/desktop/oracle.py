"""The scripted oracle of a task: the steps in its file, as real clicks and keys.

It reads the accessibility tree to find widgets, which a policy may not do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from dart.core.action import Action, Click, Finish, Keys, Point, TypeText, Wait
from dart.workers.env.desktop.session import Session
from dart.workers.env.desktop.tasks import OracleStep, TaskFile
from dart.workers.env.desktop.tree import Node, Tree

PATIENCE_SECONDS = 20.0
"""How long it waits for a window or a widget before it is stuck."""
TICK_SECONDS = 0.05
_INSIDE = 1.0 - 1e-9


class Oracle:
    """One episode's actions, each assumed to be carried out."""

    def __init__(self, task: TaskFile, session: Session, patience: float = PATIENCE_SECONDS) -> None:
        self._steps: Iterator[OracleStep] = iter(task.oracle)
        self._session, self._patience = session, patience
        self.target: Node | None = None
        """The widget that the last action clicks."""

    def next(self) -> Action | None:
        """None if it is stuck, or its steps are done."""
        step, self.target = next(self._steps, None), None
        if step is None or (step.window is not None and not self._awaits(step.window)):
            return None
        if step.click is not None:
            self.target = self._widget(step.click, step.role)
            return Click(self._middle(self.target), count=step.count) if self.target else None
        if step.point is not None:
            return Click(Point(*step.point), count=step.count)
        if step.keys is not None:
            return Keys(step.keys)
        if step.type is not None:
            return TypeText(step.type)
        if step.answer is not None:
            return Finish(answer=step.answer)
        return Wait(step.wait or 0.0)

    def _awaits(self, title: str) -> bool:
        began = time.monotonic()
        while (active := self._session.windows.active()) is None or title not in active.title:
            if time.monotonic() - began > self._patience:
                return False
            time.sleep(TICK_SECONDS)
        return True

    def _widget(self, name: str, role: str | None) -> Node | None:
        with Tree(self._session.bus) as tree:
            return tree.await_node(name, role, self._patience)

    def _middle(self, widget: Node) -> Point:
        width, height = self._session.size
        x, y = (widget.left + widget.width / 2) / width, (widget.top + widget.height / 2) / height
        return Point(min(max(x, 0.0), _INSIDE), min(max(y, 0.0), _INSIDE))
