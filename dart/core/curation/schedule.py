"""What waits for what: why a roll-out may not begin yet, and when an update may.

DART samples roll-out-wise and trains asynchronously (arXiv 2509.23866): a free environment takes the next roll-out at
once, and an update begins as soon as there is a batch. The other modes are what that is compared with:

task          the environments are sets of N; a set takes another task when all N roll-outs of its last have finished
batch         tasks × N, one batch of the trainer's, finish before any of the next batch begins
synchronous   an update begins when sampling has come to rest, and sampling goes on when every replica serves what the
              update made

`Pacing` is told what has happened and asked by the data manager; it waits for nothing itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Sampling = Literal["rollout", "task", "batch"]


@dataclass(frozen=True, slots=True)
class Situation:
    """What the data manager sees. `opens`: the next roll-out would be the first of a new group."""

    opens: bool
    open_groups: int
    running: int
    """Roll-outs under way."""
    waiting: int
    """Trajectories that wait for the trainer."""
    environments: int


class Pacing:
    def __init__(self, sampling: Sampling, synchronous: bool, rollouts: int, trajectories_per_update: int) -> None:
        self.sampling, self.synchronous = sampling, synchronous
        self._rollouts, self._size = rollouts, trajectories_per_update
        self._groups = math.ceil(trajectories_per_update / rollouts)
        """In a batch."""
        self._opened = 0
        """Groups of this batch."""
        self._updating = False

    def why_wait(self, now: Situation) -> str | None:
        """Why no roll-out may begin; None when one may."""
        if self.synchronous and self._updating:
            return "the update and its weights are waited for"
        if self.sampling == "batch":
            return "the batch has not finished" if now.opens and self._opened >= self._groups else None
        if self.synchronous and now.waiting >= self._size:
            return "an update waits for what is under way"
        if self.sampling == "task" and now.opens and now.open_groups >= max(1, now.environments // self._rollouts):
            return "every set of environments has a task that has not finished"
        return None

    def opened(self) -> None:
        """A group was opened."""
        self._opened += 1

    def closed(self, now: Situation) -> None:
        """A group was closed. Asynchronously, the next batch may begin when the last of this one is."""
        if not self.synchronous and self._batch_over(now):
            self._opened = 0

    def update_due(self, now: Situation) -> bool:
        """An update may take what waits."""
        if not self.synchronous:
            return now.waiting >= self._size
        if self.sampling == "batch":
            # What a restart found may be a batch by itself, and leave no room to open another.
            return self._batch_over(now) or (now.waiting >= self._size and not now.running and not now.open_groups)
        return now.waiting >= self._size and not now.running

    def update_begins(self) -> None:
        self._updating = True

    def update_over(self) -> None:
        """Every replica serves its weights; or there was nothing to train on."""
        self._updating = False
        if self.synchronous:
            self._opened = 0

    def _batch_over(self, now: Situation) -> bool:
        return self.sampling == "batch" and self._opened >= self._groups and not now.open_groups
