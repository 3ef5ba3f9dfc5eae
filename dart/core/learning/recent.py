"""What the last attempts, groups and updates came to: the numbers from which `core.learning.diagnosis` tells what keeps
the policy from learning. Each class has one owner, which notes events as they happen; its `numbers` are a copy."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dart.core.curation.advantage import EQUAL
from dart.core.types import Termination, Trajectory

WINDOW = 200
"""Attempts that count as recent."""
ENOUGH = 50
"""Trajectories before anything is said of them: with fewer, a policy that succeeds now and then may not have yet."""
RECENT_UPDATES = 5
"""An update's numbers scatter: what is said of updates holds for so many in a row."""
FIRST_UPDATES = 3
"""The entropy of so many first updates is what a later one is compared with."""
SHOWN_CHARACTERS = 160
"""Characters kept of a text that is no action, and of what its parser said."""


@dataclass(frozen=True, slots=True)
class AttemptNumbers:
    """Of the last `WINDOW` attempts, whatever they were for, since the phase began."""

    ends: Mapping[Termination, int] = field(default_factory=dict)
    """Trajectories by how they ended."""
    rewarded: int = 0
    """Trajectories with a reward above 0."""
    failed: int = 0
    """Attempts that ended for a fault of an environment or a replica."""
    failure: str = ""
    """What the last of these said."""
    any_finished: bool = False
    """A trajectory has been finished, in this phase or before."""
    unread: str = ""
    """The last text of the policy that was no action, and what its parser said."""
    enough_since: float | None = None
    """When `ENOUGH` trajectories of this phase had finished; None before that."""

    @property
    def finished(self) -> int:
        return sum(self.ends.values())


class Attempts:
    """Notes how attempts end."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Termination | None, bool]] = deque(maxlen=WINDOW)
        """How each ended, None for a fault, and whether it had a reward."""
        self._finished, self._any = 0, False
        self._enough_since: float | None = None
        self._failure = self._unread = ""

    def finished(self, trajectory: Trajectory, now: float) -> None:
        self._recent.append((trajectory.termination, trajectory.reward > EQUAL))
        self._any = True
        self._finished += 1
        if self._finished == ENOUGH:
            self._enough_since = now
        if trajectory.termination is Termination.UNPARSABLE:
            last = trajectory.steps[-1]
            text, error = " ".join(last.generation.text.split()), last.parse_error
            self._unread = f"“{_short(text)}”: {_short(error)}"

    def failed(self, why: str) -> None:
        """An environment or a replica ended an attempt."""
        self._recent.append((None, False))
        self._failure = why

    def restart(self) -> None:
        """Another phase begins: its attempts may be at other tasks, at another temperature, or a teacher's."""
        self._recent.clear()
        self._finished, self._enough_since = 0, None

    def numbers(self) -> AttemptNumbers:
        ends = Counter(end for end, _ in self._recent if end is not None)
        return AttemptNumbers(
            ends, sum(rewarded for _, rewarded in self._recent), len(self._recent) - sum(ends.values()),
            self._failure, self._any, self._unread, self._enough_since,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """Of groups that have been judged since the last one that could be trained on."""

    any_released: bool = False
    """There has been one, since this process began."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """Dropped groups by cause (`core.curation.judging`), those without a trajectory and those too old left out."""
    trajectories: int = 0
    detail: str = ""
    """Of the last one: why it was dropped."""

    @property
    def groups(self) -> int:
        return sum(self.causes.values())


@dataclass(frozen=True, slots=True)
class UpdateNumbers:
    """Of the last updates, in the trainer's metrics, oldest first."""

    metrics: tuple[Mapping[str, float], ...] = ()
    first_entropy: float | None = None
    """The mean over the first updates of this process."""


class Curation:
    """Notes how groups are judged, and what updates tell."""

    def __init__(self) -> None:
        self._released = False
        self._causes: Counter[str] = Counter()
        self._trajectories, self._detail = 0, ""
        self._updates: deque[Mapping[str, float]] = deque(maxlen=RECENT_UPDATES)
        self._entropies: list[float] = []

    def released(self) -> None:
        """A group can be trained on."""
        self._released = True
        self._causes.clear()
        self._trajectories, self._detail = 0, ""

    def dropped(self, cause: str, detail: str, trajectories: int) -> None:
        """A group cannot, for what its trajectories are."""
        self._causes[cause] += 1
        self._trajectories += trajectories
        self._detail = detail

    def updated(self, metrics: Mapping[str, float]) -> None:
        self._updates.append(dict(metrics))
        if "entropy" in metrics and len(self._entropies) < FIRST_UPDATES:
            self._entropies.append(metrics["entropy"])

    def groups(self) -> GroupNumbers:
        return GroupNumbers(self._released, dict(self._causes), self._trajectories, self._detail)

    def updates(self) -> UpdateNumbers:
        first = sum(self._entropies) / len(self._entropies) if self._entropies else None
        return UpdateNumbers(tuple(self._updates), first)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
