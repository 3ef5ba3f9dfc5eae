"""Task files (dart/assets/desktop/tasks): OSWorld's JSON form, with parameters that the seed draws, and an oracle.

`load` reads a file as it is written; `TaskFile.instance` draws the parameters and fills in every `{placeholder}`.
docs/worlds.md describes the fields.
"""

from __future__ import annotations

import functools
import math
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, model_validator

from dart import assets
from dart.config.loading import explain
from dart.errors import UserError
from dart.worlds.tasks import no_task

FOLDER = Path(assets.__file__).parent / "desktop" / "tasks"
PROGRAMS = {
    "chromium": "chromium", "galculator": "galculator", "gimp": "gimp", "mousepad": "mousepad", "pcmanfm": "pcmanfm",
    "soffice": "libreoffice-writer libreoffice-calc libreoffice-gtk3", "xterm": "xterm", "yad": "yad",
}  # fmt: skip
"""Programs that tasks need → the Debian packages that they come in."""
Value = str | int | list[str]
Values = Mapping[str, Value]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Draw(_Part):
    """How the seed draws a parameter: one of these."""

    choose: tuple[str, ...] | None = None
    """One of the list."""
    between: tuple[int, int] | None = None
    """A whole number, both ends included."""
    sample: tuple[str, ...] | None = None
    """`count` different ones of the list, in random order: `{name[0]}`, `{name[1]}`, …"""
    count: int = 2
    words: int | None = None
    """So many different words of dart/assets/desktop/words.txt."""
    pick: str | None = None
    """One of the parameter of this name, which was drawn by `sample` or `words`."""
    text: str | None = None
    """A text with placeholders of the parameters before it."""
    product: tuple[str, ...] | None = None
    """Of the numbers of these names."""
    sum: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _one(self) -> Draw:
        given = self.model_fields_set - {"count"}
        if len(given) != 1:
            raise ValueError("give one of choose, between, sample, words, pick, text, product and sum")
        return self

    def draw(self, chance: random.Random, known: Values) -> Value:
        if self.choose is not None:
            return chance.choice(self.choose)
        if self.between is not None:
            return chance.randint(*self.between)
        if self.sample is not None:
            return chance.sample(self.sample, self.count)
        if self.words is not None:
            return chance.sample(words(), self.words)
        if self.pick is not None:
            among = known[self.pick]
            return chance.choice(among) if isinstance(among, list) else among
        if self.text is not None:
            return self.text.format_map(known)
        if self.product is not None:
            return math.prod(int(str(known[name])) for name in self.product)
        return sum(int(str(known[name])) for name in self.sum or ())


class Step(_Part):
    """One step of the set-up, or of what follows the episode: `setup` carries it out."""

    type: Literal[
        "launch",
        "execute",
        "command",
        "sleep",
        "write_file",
        "picture",
        "await_widget",
        "activate_window",
        "maximise_window",
        "close_window",
    ]
    parameters: dict[str, JsonValue] = {}


class Getter(_Part):
    """Where a result, or what is expected, comes from: `grading.verdict` gets it."""

    type: Literal["rule", "vm_file", "vm_command_line", "list_directory", "clipboard", "window_titles", "answer"]
    path: str | None = None
    command: str | tuple[str, ...] | None = None
    shell: bool = False
    rules: dict[str, JsonValue] = {}
    dest: str | None = None
    """Accepted because OSWorld's files have it: files are read where they are."""


class Evaluator(_Part):
    """OSWorld's: one check, or several of the same number of results, joined by `conj`."""

    func: str | tuple[str, ...]
    result: Getter | tuple[Getter, ...] | None = None
    expected: Getter | tuple[Getter, ...] | None = None
    conj: Literal["and", "or"] = "and"
    postconfig: tuple[Step, ...] = ()

    def checks(self) -> list[tuple[str, Getter | None, Getter | None]]:
        """(function, result, expected) of each check."""
        functions = [self.func] if isinstance(self.func, str) else list(self.func)
        return list(zip(functions, _each(self.result, functions), _each(self.expected, functions), strict=True))


class OracleStep(_Part):
    """What the oracle does next: one action, once what it waits for is there."""

    window: str | None = None
    """First wait until the active window's title contains this."""
    click: str | None = None
    """The name of a widget in the accessibility tree."""
    role: str | None = None
    """The role of that widget, if its name is not enough."""
    count: int = 1
    point: tuple[float, float] | None = None
    """A click there, in fractions of the screen."""
    keys: tuple[str, ...] | None = None
    type: str | None = None
    wait: float | None = None
    answer: str | None = None
    """Finish with this answer."""

    @model_validator(mode="after")
    def _one(self) -> OracleStep:
        if sum(getattr(self, name) is not None for name in ("click", "point", "keys", "type", "wait", "answer")) != 1:
            raise ValueError("give one of click, point, keys, type, wait and answer")
        return self


class TaskFile(_Part):
    """A task. `snapshot`, `source` and `trajectory` are OSWorld's, and only read by people."""

    id: str
    instruction: str
    needs: tuple[str, ...]
    """The programs without which the task is refused; names in PROGRAMS."""
    config: tuple[Step, ...]
    evaluator: Evaluator
    parameters: dict[str, Draw] = {}
    oracle: tuple[OracleStep, ...] = ()
    ends: Literal["by_policy", "when_closed"] = "by_policy"
    """`when_closed`: the episode ends when no window is left."""
    snapshot: str = ""
    source: str = ""
    trajectory: str = ""
    related_apps: tuple[str, ...] = ()

    def values(self, seed: int) -> Values:
        """The parameters' values for this seed, drawn in the order in which they are written."""
        chance = random.Random(f"{self.id}#{seed}")
        values: dict[str, Value] = {}
        for name, draw in self.parameters.items():
            values[name] = draw.draw(chance, values)
        return values

    def instance(self, seed: int) -> TaskFile:
        """The task with every placeholder filled in. A literal brace is written twice."""
        values = self.values(seed)
        raw = self.model_dump(mode="json", exclude={"parameters"}, exclude_unset=True)
        return TaskFile.model_validate(_fill(raw, values))

    def missing(self) -> list[str]:
        """The programs that this machine lacks."""
        return [name for name in self.needs if shutil.which(name) is None]


def _each(given: Getter | tuple[Getter, ...] | None, functions: Sequence[str]) -> Sequence[Getter | None]:
    if isinstance(given, tuple):
        return given
    return [given] * len(functions)


def _fill(raw: JsonValue, values: Values) -> JsonValue:
    match raw:
        case str():
            return raw.format_map(values)
        case list():
            return [_fill(one, values) for one in raw]
        case dict():
            return {key: _fill(value, values) for key, value in raw.items()}
        case _:
            return raw


@functools.cache
def words() -> tuple[str, ...]:
    """Short English words, for names and texts."""
    return tuple((FOLDER.parent / "words.txt").read_text(encoding="utf-8").split())


@functools.cache
def task_names() -> tuple[str, ...]:
    """Every task's name, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@functools.cache
def load(name: str) -> TaskFile:
    """The task of this name. Raises UserError with the closest names if there is none."""
    if name not in task_names():
        raise no_task("desktop", name, task_names())
    path = FOLDER / f"{name}.json"
    try:
        return TaskFile.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        lines = [explain(str(path), problem, TaskFile) for problem in error.errors()]
        raise UserError("\n".join(lines) + " (docs/worlds.md describes the fields)") from None


def check_task(name: str) -> None:
    """Raises UserError for a task that does not exist, or whose programs are missing here."""
    if missing := load(name).missing():
        packages = " ".join(PROGRAMS[program] for program in missing)
        raise UserError(
            f"environment.tasks.names: task {name} needs {', '.join(missing)}: run `apt-get install "
            f"--no-install-recommends {packages}`, or leave the task out"
        )
