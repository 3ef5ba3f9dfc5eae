"""Which tasks are trained on and which are held out, in the config or in a file of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from dart.config.base import ConfigError, Positive, Section
from dart.config.yaml_text import NotYaml, read_yaml_file

Seeds = Literal["one", "many"]
MOST_SEEDS = 2**63
_FROM_FILE = ("names", "train_names", "eval_names", "step_limits", "single_instance")
"""The fields of `TaskSet` that a file gives."""


class TaskSet(Section):
    file: Path | None = Field(
        None,
        description="A YAML or JSON file of tasks (docs/evaluation.md), relative to the config. It takes the place of "
        "`names`, `train_names`, `eval_names`, `step_limits` and `single_instance`, and the run's own config.yaml has "
        "its contents there.",
    )
    names: tuple[str, ...] = Field(
        (),
        description="Tasks that are trained on and, on other seeds, evaluated: docs/worlds.md. `dart doctor CONFIG` "
        "checks all names.",
    )
    train_names: tuple[str, ...] = Field((), description="Further tasks that are trained on.")
    eval_names: tuple[str, ...] = Field(
        (),
        description="Held-out tasks. If there are any, evaluations use only these; else all that are trained on, on "
        "held-out seeds.",
    )
    train_seeds: tuple[int, int] = Field((0, 1_000_000), description="Training seeds, [first, last).")
    eval_seeds: tuple[int, int] = Field((1_000_000, 1_010_000), description="Held-out seeds, [first, last).")
    step_limits: dict[str, Positive] = Field(
        default_factory=dict,
        description="Step limits of single tasks, by name. `curation.step_limit` is the cap on all of them.",
    )
    single_instance: tuple[str, ...] = Field(
        (),
        description="Tasks with a single instance, as in OSWorld: their seed is always 0, so they can be held out only "
        "by name.",
    )

    @property
    def training(self) -> tuple[str, ...]:
        """The names that are trained on, each once."""
        return tuple(dict.fromkeys((*self.names, *self.train_names)))

    @property
    def evaluation(self) -> tuple[str, ...]:
        """The names that evaluations use, each once."""
        return tuple(dict.fromkeys(self.eval_names)) or self.training

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.training, *self.eval_names)))

    @property
    def not_held_out(self) -> tuple[str, ...]:
        """Tasks that evaluations use although their only instance is trained on."""
        return self.not_held_out_from(self.training)

    def not_held_out_from(self, trained: Collection[str]) -> tuple[str, ...]:
        """Like `not_held_out`, if `trained` are the tasks that are trained on."""
        single = set(self.single_instance)
        return tuple(name for name in self.evaluation if name in single and name in trained)

    @property
    def instances(self) -> int:
        """How many different instances evaluations can have."""
        first, last = self.eval_seeds
        single = sum(name in self.single_instance for name in self.evaluation)
        return single + (len(self.evaluation) - single) * (last - first)

    @model_validator(mode="after")
    def _names(self) -> TaskSet:
        if self.file is not None:
            raise ValueError(f"file {self.file} has not been read: read the config with dart.config.load")
        if not self.training:
            raise ValueError(
                "there is nothing to train on: name tasks in names or train_names, or in train or both of file"
            )
        if both := sorted(set(self.training) & set(self.eval_names)):
            raise ValueError(
                f"{both[0]} is both a training task and in eval_names: remove it from one of them; a task that is only "
                "in names is evaluated on held-out seeds"
            )
        known = set(self.all)
        for field in ("step_limits", "single_instance"):
            if strange := [name for name in getattr(self, field) if name not in known]:
                raise ValueError(f"{field} has {strange[0]}, which is no task of this config: correct or omit it")
        return self

    @model_validator(mode="after")
    def _seeds(self) -> TaskSet:
        for name, (first, last) in (("train_seeds", self.train_seeds), ("eval_seeds", self.eval_seeds)):
            if not 0 <= first < last:
                raise ValueError(
                    f"{name} [{first}, {last}) is empty or negative: write [first, last) with first < last"
                )
            if last > MOST_SEEDS:
                raise ValueError(f"{name} [{first}, {last}) is beyond what the database holds: end at 2^63 or below")
        if self.train_seeds[0] < self.eval_seeds[1] and self.eval_seeds[0] < self.train_seeds[1]:
            raise ValueError("train_seeds and eval_seeds overlap, so nothing would be held out: make them disjoint")
        return self


class ListedTask(Section):
    """One task of a file, which may also be its name alone."""

    name: str = Field(min_length=1)
    step_limit: Positive | None = None
    seeds: Seeds | None = None


class TaskFile(Section):
    """What a file of tasks holds. `step_limit` and `seeds` are for tasks that do not say their own."""

    train: tuple[ListedTask, ...] = ()
    eval: tuple[ListedTask, ...] = ()
    both: tuple[ListedTask, ...] = ()
    step_limit: Positive | None = None
    seeds: Seeds = "many"

    @field_validator("train", "eval", "both", mode="before")
    @classmethod
    def _named(cls, listed: object) -> object:
        """A text stands for a task of that name."""
        if not isinstance(listed, list | tuple):
            return listed
        return [{"name": one} if isinstance(one, str) else one for one in listed]

    @model_validator(mode="after")
    def _once(self) -> TaskFile:
        parts = {"train": self.train, "eval": self.eval, "both": self.both}
        places = Counter(one.name for part in parts.values() for one in part)
        for name, times in places.items():
            if times > 1:
                where = " and ".join(part for part, tasks in parts.items() if name in _names(tasks))
                raise ValueError(f"{name} is listed {times} times, in {where}: list it once")
        if self.both and self.eval:
            raise ValueError("it has both and eval, and evaluations would use eval alone: move those in both to train")
        return self

    def fields(self) -> dict[str, object]:
        """This file's tasks, as fields of `TaskSet`."""
        listed = (*self.both, *self.train, *self.eval)
        limits = {one.name: one.step_limit or self.step_limit for one in listed}
        return {
            "names": _names(self.both),
            "train_names": _names(self.train),
            "eval_names": _names(self.eval),
            "step_limits": {name: limit for name, limit in limits.items() if limit is not None},
            "single_instance": [one.name for one in listed if (one.seeds or self.seeds) == "one"],
        }


def _names(tasks: Sequence[ListedTask]) -> list[str]:
    return [one.name for one in tasks]


def read_task_file(tasks: dict[str, object], folder: Path) -> tuple[Path, object]:
    """The file that `environment.tasks` names, relative to `folder`, and what it holds. Raises ConfigError."""
    field, named = "environment.tasks.file", tasks["file"]
    if not isinstance(named, str | Path):
        raise ConfigError(f"{field} (it is {named!r}): name a YAML or JSON file, relative to the config")
    if twice := [name for name in _FROM_FILE if tasks.get(name)]:
        raise ConfigError(f"{field} {named} and environment.tasks.{twice[0]} are both given: keep one of them")
    path = folder / named
    try:
        return path, read_yaml_file(path)  # JSON is YAML
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{field}: {path} is no file: name a YAML or JSON file, relative to the config") from None
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read ({error.strerror}): name a readable file") from None
    except NotYaml as error:
        raise ConfigError(f"{field}: {path} is neither YAML nor JSON: {error}") from None
