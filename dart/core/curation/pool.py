"""The experience pool: successes that replace a failure when a whole group fails (DART, arXiv 2509.23866, task level).

`ExperiencePool` is an index: the trajectories themselves are in the database. It holds the newest successes of each
task name, found online or collected beforehand. When all roll-outs of a group fail, the data manager asks for one and
replaces one failure with a copy of it; a group never gets two.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from dart.core.types import Step, Task, Trajectory, VersionSpan


@dataclass(slots=True)
class Entry:
    """A success that can be pooled. `update`: the newest weight version of its tokens, from which `max_age` counts (one
    update makes one version); 0 if it was collected. `uses`: how often it was used."""

    trajectory_id: str
    task: Task
    update: int
    uses: int = 0


class ExperiencePool:
    def __init__(self, per_task: int, max_age: int | None) -> None:
        """`per_task`: entries kept for a task name; `max_age`: updates after which an entry is dropped."""
        self._per_task, self._max_age = per_task, max_age
        self._entries: dict[str, deque[Entry]] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

    def has(self, name: str) -> bool:
        return bool(self._entries.get(name))

    def add(self, entry: Entry) -> None:
        """Add an entry; the task's oldest one is removed if the task is full."""
        self._entries.setdefault(entry.task.name, deque(maxlen=self._per_task)).append(entry)

    def discard(self, entry: Entry) -> bool:
        """Remove an entry that turned out to be unusable; False if it is no longer there.

        Two groups may have taken it at the same time, or a newer success may have displaced it since.
        """
        entries = self._entries.get(entry.task.name, deque())
        if entry not in entries:
            return False
        entries.remove(entry)
        return True

    def take(self, task: Task, update: int) -> Entry | None:
        """Choose a success for a group that failed, and count the use; entries that are too old leave the pool.

        Prefers the same concrete task to another seed of the same name, then the least used, then the newest.
        """
        entries = self._entries.get(task.name)
        if not entries:
            return None
        if self._max_age is not None:
            # In the order in which they finished, which is not always that of their versions.
            for entry in [one for one in entries if update - one.update > self._max_age]:
                entries.remove(entry)
        if not entries:
            return None
        best = min(reversed(entries), key=lambda entry: (entry.task != task, entry.uses))
        best.uses += 1
        return best


def pooled_copy(success: Trajectory, group_id: str, version: int, oldest: int) -> Trajectory:
    """The copy that replaces a failure of group `group_id`, trained at trainer version `version`.

    A success no older than the group's own oldest token (`oldest`) keeps its log-probabilities, so the importance
    weight applies to it. An older one would make the whole group stale, and one that no policy sampled has none: both
    come without, and the trainer re-scores them, which makes its own π_old the behaviour policy.
    """
    if oldest <= success.oldest_version <= version and all(step.generation.logprobs for step in success.steps):
        return replace(success, id=f"{group_id}-pooled", group_id=group_id, pooled_from=success.id)
    return unscored_copy(success, group_id, version)


def unscored_copy(success: Trajectory, group_id: str, version: int) -> Trajectory:
    """The generation as if trainer version `version` had sampled it, without log-probabilities."""
    steps = tuple(unscored(step, version) for step in success.steps)
    return replace(success, id=f"{group_id}-pooled", group_id=group_id, steps=steps, pooled_from=success.id)


def unscored(step: Step, version: int) -> Step:
    """The step as if trainer version `version` had sampled it, without log-probabilities."""
    whole = (VersionSpan(version, 0, len(step.generation.token_ids)),)
    return replace(step, generation=replace(step.generation, logprobs=(), versions=whole))
