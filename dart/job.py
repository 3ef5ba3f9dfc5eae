"""What a run is for: to train, to evaluate a policy, or to collect successes.

A job says which of the config's workers it needs, and, with `model`, whether it needs the config's model at all;
everything else about a run is the same for all three.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dart.config import Config
from dart.store.records import RunKind

Teacher = Literal["oracle", "endpoint", "policy"]


@dataclass(frozen=True, slots=True)
class Address:
    """An OpenAI-compatible chat endpoint. `url` as in OpenAI's clients, with the version: http://host:8000/v1.

    `key` is never shown. `system`: text of a first message, for a model that must be told how actions are written.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)
    system: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def __str__(self) -> str:
        return f"{self.model} at {self.url}"


@dataclass(frozen=True, slots=True)
class Train:
    kind: ClassVar = RunKind.TRAINING
    model: ClassVar = True

    def environments(self, config: Config) -> int:
        """Env workers."""
        return config.environment.workers if config.samples else 0

    def replicas(self, config: Config) -> int:
        return config.rollout.replicas if config.samples else 0


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluates `endpoint`, or `config.model` when there is none. `trained`: the tasks that training has, if they are
    others than the config's, whose tasks were chosen for this evaluation."""

    endpoint: Address | None = None
    trained: tuple[str, ...] = ()
    kind: ClassVar = RunKind.EVALUATION

    @property
    def model(self) -> bool:
        return self.endpoint is None

    def environments(self, config: Config) -> int:
        return config.environment.workers

    def replicas(self, config: Config) -> int:
        return 0 if self.endpoint else config.rollout.replicas


@dataclass(frozen=True, slots=True)
class Collect:
    """What to collect. `seeds`: [first, last)."""

    teacher: Teacher
    seeds: tuple[int, int]
    per_task: int
    most_attempts: int
    samples: int
    temperature: float
    endpoint: Address | None = None
    kind: ClassVar = RunKind.COLLECTION
    model: ClassVar = True

    def environments(self, config: Config) -> int:
        return config.environment.workers

    def replicas(self, config: Config) -> int:
        """Needed with a teacher too: a replica tokenises what it writes."""
        return config.rollout.replicas


Job = Train | Evaluate | Collect
