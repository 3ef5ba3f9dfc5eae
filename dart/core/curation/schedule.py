"""What waits for what: whether a roll-out may begin, and whether an update may.

DART samples roll-out-wise and trains asynchronously (arXiv 2509.23866): a free environment takes the next roll-out at
once, and an update begins as soon as there is a batch. The other modes are baselines for comparison:

task          environments form sets of N; a set takes another task when all N roll-outs of its last one have finished
batch         one batch for the trainer, of groups with as many roll-outs as an update wants, finishes before any
              of the next batch begins
synchronous   an update begins when nothing is being sampled, and sampling resumes when every replica serves its weights

The functions here are pure; `core.curation.lifecycle` calls them, and owns the state that they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sampling = Literal["rollout", "task", "batch"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The mode. `rollouts`: N, the most roll-outs in a group; `trajectories_per_update`: the size of a batch."""

    sampling: Sampling
    synchronous: bool
    rollouts: int
    trajectories_per_update: int

    @property
    def holds_back(self) -> bool:
        """Whether `why_wait` can ever give a reason."""
        return self.synchronous or self.sampling != "rollout"


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts that the schedule decides by."""

    opens: bool
    """The next roll-out would be the first of a new group."""
    open_groups: int
    """Groups with unfinished roll-outs, or not decided about yet."""
    running: int
    """Roll-outs under way, and groups not decided about yet."""
    waiting: int
    """Trajectories that wait for the trainer."""
    environments: int
    opened: int = 0
    """Roll-outs of the groups opened for the batch that is being sampled, as they were planned."""
    updating: bool = False
    """An update has begun, and not every replica has its weights yet."""


def why_wait(mode: Schedule, now: Situation) -> str | None:
    """Why no roll-out may begin; None when one may."""
    if mode.synchronous and now.updating:
        return "the update and its weights are waited for"
    if mode.sampling == "batch":
        return "the batch has not finished" if now.opens and now.opened >= mode.trajectories_per_update else None
    if mode.synchronous and now.waiting >= mode.trajectories_per_update:
        return "an update waits for what is under way"
    if mode.sampling == "task" and now.opens and now.open_groups >= max(1, now.environments // mode.rollouts):
        return "every set of environments has a task that has not finished"
    return None


def update_due(mode: Schedule, now: Situation) -> bool:
    """Whether an update may take the waiting groups."""
    full = now.waiting >= mode.trajectories_per_update
    if not mode.synchronous:
        return full
    if mode.sampling == "batch":
        # The groups that a restart restored may fill a batch by themselves, with no room to open another.
        return batch_over(mode, now) or (full and not now.running and not now.open_groups)
    return full and not now.running


def batch_over(mode: Schedule, now: Situation) -> bool:
    """Whether every group of a batch-wise batch has been opened and decided about."""
    return mode.sampling == "batch" and now.opened >= mode.trajectories_per_update and not now.open_groups
