"""An experiment as a file that is committed before its runs (learning/protocols), checked here, read by the runner.

It says what is asked, which arms run with which seeds, what is measured, which comparisons are one family, and what was
expected. The sha256 of its bytes is in every result, so that nobody can change the question after seeing an answer:
results of another protocol, config or base policy are refused.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from dart.config import Config
from dart.config import load as load_config
from dart.config.loading import explain
from dart.core.evaluation.documents import Decoding
from dart.errors import UserError
from dart.manifest import file_digest

FOLDER = Path(__file__).parents[1] / "learning" / "protocols"
Overrides = dict[str, JsonValue]
"""Fields of the config, as in `curation.pool.enabled: false`."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Endpoint(Section):
    """Held-out success at the end of a run: the mean over the tasks of these levels."""

    levels: tuple[str, ...] = Field(min_length=1)
    decoding: Decoding

    @property
    def name(self) -> str:
        return f"{' and '.join(self.levels)}, {self.decoding}"


class Gates(Section):
    """What the base policy must be unable to do, measured on training seeds before any run."""

    level: str
    greedy_at_most: float = Field(ge=0, le=1)
    greedy_episodes: int = Field(gt=0)
    samples: int = Field(gt=0)
    """k of pass@k, sampled at the config's temperature."""
    instances: int = Field(gt=0)
    pass_at_most: float = Field(0.0, ge=0, le=1)


class Protocol(Section):
    """The part that all experiments share."""

    name: str = Field(pattern=r"^[a-z_]+$")
    question: str
    config: Path
    seeds: tuple[int, ...] = Field(min_length=2)
    jobs: int = Field(2, ge=1)
    """Runs at a time."""
    piece_minutes: Literal["any"] | None = "any"
    """None: no run is interrupted and resumed, because a restart would bias it. Else the command says after how long,
    which is no part of the question."""
    pool_successes: int = Field(0, ge=0)
    """Successes of the oracle per task that the experience pool begins with. An override may name their folder as
    `{pool}`."""
    settings: Overrides
    """Of all arms."""
    arms: dict[str, Overrides] = Field(min_length=1)
    controls: dict[str, Overrides] = Field(default_factory=dict)
    """Further arms, outside of the family of comparisons."""
    levels: dict[str, str]
    """Level → its tasks, as a pattern."""
    reference: str
    against: tuple[str, ...] = Field(min_length=1)
    """`reference` minus each of these is compared."""
    primary: tuple[Endpoint, ...] = ()
    """The family: every comparison at every one of these, with Holm's correction."""
    secondary: tuple[Endpoint, ...] = ()
    """Reported without correction, and not to be concluded from."""
    alpha: float = Field(0.05, gt=0, lt=1)
    power: float = Field(0.8, gt=0, lt=1)
    gates: Gates | None = None
    said_in_advance: tuple[str, ...] = Field(min_length=1)

    @field_validator("piece_minutes", mode="before")
    @classmethod
    def _no_number(cls, value: object) -> object:
        if isinstance(value, int | float):
            raise ValueError("the length of pieces is no part of a protocol: leave it out, and use --piece-minutes")
        return value

    @model_validator(mode="after")
    def _known(self) -> Protocol:
        every = {**self.arms, **self.controls}
        if unknown := {self.reference, *self.against} - every.keys():
            raise ValueError(f"{', '.join(sorted(unknown))} is no arm: they are {', '.join(every)}")
        if self.reference in self.against:
            raise ValueError(f"{self.reference} is compared with itself: take it out of `against`")
        named = {level for endpoint in (*self.primary, *self.secondary) for level in endpoint.levels}
        named |= {self.gates.level} if self.gates else set()
        if unknown := named - self.levels.keys():
            raise ValueError(f"{', '.join(sorted(unknown))} is no level: they are {', '.join(self.levels)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} has a seed twice: runs with the same seed are not independent")
        return self

    @property
    def family(self) -> int:
        """How many comparisons Holm's correction is over."""
        return len(self.against) * len(self.primary)

    def tasks_of(self, level: str, tasks: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(task for task in tasks if fnmatchcase(task, self.levels[level]))

    def overrides(self, arm: str) -> tuple[str, ...]:
        """All of an arm's overrides, as `dart train --set` takes them; its own come last."""
        return as_options(self.settings | {**self.arms, **self.controls}[arm])

    def load_config(self, arm: str | None = None) -> Config:
        """The config of an arm; None: without any arm's overrides. Raises ConfigError."""
        return load_config(self.config, self.overrides(arm) if arm else as_options(self.settings))


P = TypeVar("P", bound=Protocol)


def load(path: Path, kind: type[P]) -> P:
    """The checked protocol, with every arm's config checked too. Raises UserError."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        protocol = kind.model_validate(raw)
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"protocol {path}: {error}") from None
    except ValidationError as error:
        raise UserError("\n".join(explain(str(path), problem) for problem in error.errors())) from None
    for arm in (*protocol.arms, *protocol.controls):
        tasks = protocol.load_config(arm).environment.tasks.names
        for level, pattern in protocol.levels.items():
            if not protocol.tasks_of(level, tasks):
                raise UserError(f"protocol {path}: levels.{level}: {pattern} matches no task of arm {arm}")
    return protocol


def as_options(overrides: Mapping[str, JsonValue]) -> tuple[str, ...]:
    return tuple(f"{field}={json.dumps(value)}" for field, value in overrides.items())


# ---- what results are bound to ----


def marks(path: Path, protocol: Protocol) -> dict[str, str]:
    """The digests that every result carries, and that must be the same when runs are added to it.

    Raises UserError if the base policy is not there.
    """
    return {
        "protocol_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "config_sha256": config_digest(protocol.config),
        "base_sha256": base_digest(protocol.load_config().model.folder),
    }


def config_digest(path: Path) -> str:
    """A digest of the config's content, without comments and order."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def base_digest(folder: Path) -> str:
    """A digest of the weights that runs start from. Raises UserError if there are none."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(
            f"model.path {folder} has no *.safetensors: make the base policy first "
            "(python -m examples.base_policy --help)"
        )
    digest = hashlib.sha256()
    for path in weights:
        digest.update(file_digest(path).encode())
    return digest.hexdigest()


_CAUSES = {
    "protocol_sha256": "another protocol",
    "config_sha256": "another config",
    "base_sha256": "another base policy",
    "world_sha256": "another world",
    "successes_per_task": "another number of successes",
}


def check_marks(path: Path, found: Mapping[str, object], wanted: Mapping[str, str]) -> None:
    """Raises UserError if the result at `path` was made with another protocol, config or base policy, say."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise UserError(
                f"{path} was made with {_CAUSES.get(name, name)} ({name} {str(found.get(name))[:12]}, now "
                f"{value[:12]}): move {path.parent} away to start afresh, or restore what it was made with"
            )


def check_committed(path: Path) -> None:
    """Raises UserError unless the file is committed: what is asked must be written down before the answer is known.

    Where there is no git or no repository, nothing is checked.
    """
    try:
        command = ["git", "status", "--porcelain", "--", path.name]
        state = subprocess.run(command, cwd=path.parent, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    if state:
        raise UserError(f"protocol {path} is not committed as it is: commit it before the first run")
