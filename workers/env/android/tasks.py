"""Tasks of one's own: a folder with a YAML or JSON file for each (docs/android.md describes its fields)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dart.config.base import remedy
from dart.config.yaml_text import NotYaml, read_yaml_file
from dart.core.action import Action, Finish
from dart.errors import UserError
from dart.workers.env.android.adb import DeviceError
from dart.workers.env.android.device import Phone
from dart.worlds import Verdict
from dart.worlds.missing import at_home
from dart.worlds.tasks import no_task

SUFFIXES = (".yaml", ".yml", ".json")
MOST_EVIDENCE = 2000
"""Characters of a check's output that are kept as evidence."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(_Part):
    """A command line for the device's shell, and what it prints if the task is done. One of `expect` and `matches`."""

    shell: str = Field(min_length=1)
    """The policy's answer is in the variable DART_ANSWER."""
    expect: str | None = None
    """Exactly this, without white space at both ends."""
    matches: str | None = None
    """A regular expression, found anywhere in it; ^ and $ are the ends of lines."""

    @field_validator("matches")
    @classmethod
    def _valid(cls, matches: str | None) -> str | None:
        try:
            re.compile(matches or "")
        except re.error as error:
            raise ValueError(f"matches {matches!r} is not a regular expression: {error}") from None
        return matches

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.expect is None) == (self.matches is None):
            raise ValueError("give one of expect and matches")
        return self

    def done(self, output: str) -> bool:
        if self.matches is not None:
            return re.search(self.matches, output, re.MULTILINE) is not None
        return output.strip() == (self.expect or "").strip()


class TaskFile(_Part):
    """One task, which has one instance: its seed changes nothing."""

    instruction: str = Field(min_length=1)
    setup: tuple[str, ...] = ()
    """Command lines for the device's shell. One that fails voids the attempt."""
    check: Check
    tear_down: tuple[str, ...] = ()
    """Command lines that follow the verdict."""
    step_limit: int | None = Field(None, ge=1)
    """The world ends the episode after so many actions; `curation.step_limit` may end it before."""


class Folder:
    """The tasks of a folder. Raises UserError if it has none."""

    def __init__(self, folder: Path) -> None:
        self.folder = at_home(folder)
        paths = sorted(path for path in self.folder.glob("*") if path.suffix in SUFFIXES)
        self._paths = {path.stem: path for path in paths}
        if not self._paths:
            raise UserError(
                f"environment.options.tasks_folder {folder} has no task files: name a folder of .yaml or .json files"
            )

    def check(self, names: Collection[str]) -> None:
        """Raises UserError for the first name without a valid file."""
        for name in names:
            self.load(name)

    def load(self, name: str) -> TaskFile:
        """Raises UserError if there is no such task, or its file is not valid."""
        path = self._paths.get(name)
        if path is None:
            raise no_task(self.folder, name, self._paths)
        try:
            return TaskFile.model_validate(read_yaml_file(path))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise UserError(f"{path}: {where}: {remedy(first)} (docs/android.md has the fields)") from None
        except (OSError, NotYaml) as error:
            raise UserError(f"{path} cannot be read: {error}") from None


class OwnTasks:
    """The episodes of one device, of tasks from a folder."""

    def __init__(self, phone: Phone, folder: Folder) -> None:
        self._phone, self._folder = phone, folder
        self._task: TaskFile | None = None

    @property
    def step_limit(self) -> int | None:
        return self._task.step_limit if self._task else None

    async def begin(self, name: str, seed: int) -> str:
        """Set the task up from the home screen; returns its instruction. Raises DeviceError and UserError."""
        task = self._folder.load(name)
        await self._phone.home()
        self._task = task
        for command in task.setup:
            ran = await self._phone.adb.shell(command)
            if ran.status:
                raise DeviceError(f"task {name}: setup {command!r} ended with {ran.status}: {ran.output[-300:]}")
        return task.instruction

    async def verdict(self, last: Action, at_limit: bool) -> Verdict:
        """By what the check prints now, also at the step limit."""
        assert self._task is not None, "the env worker judges after a reset"
        check = self._task.check
        answer = last.answer if isinstance(last, Finish) else ""
        ran = await self._phone.adb.shell(f"export DART_ANSWER={shlex.quote(answer)}\n{check.shell}")
        evidence = {"check": check.shell, "output": ran.output[:MOST_EVIDENCE], "status": ran.status, "answer": answer}
        return Verdict(float(check.done(ran.output)), evidence)

    async def end(self) -> None:
        """Undo the task, as far as it says how. Raises DeviceError."""
        task, self._task = self._task, None
        for command in task.tear_down if task else ():
            ran = await self._phone.adb.shell(command)
            if ran.status:
                raise DeviceError(f"tear_down {command!r} ended with {ran.status}: {ran.output[-300:]}")

    async def open_app(self, name: str) -> str:
        return f"there is no app {name[:80]!r}: use its package, or a name in environment.options.apps"

    async def alive(self) -> bool:
        return True
