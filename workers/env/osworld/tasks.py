"""OSWorld's task files: one JSON file for each task, in a folder for each domain (`evaluation_examples/examples`)."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from dart.errors import UserError
from dart.workers.env.osworld.options import Need
from dart.worlds.missing import at_home

Needs = Need | Literal["accounts"]
NAME = re.compile(r"[\w.-]+/[\w.-]+")
EXAMPLE = "os/94d95f96-9699-4208-98ba-3c3119edf9c2"
ACCOUNTS = {
    "googledrive": "it changes files of a Google account",
    "login": "it logs into a Google account",
    "googledrive_file": "it reads files of a Google account",
}
"""Types of set-up steps and of getters that need an account, and why they are not supported."""
UNIMPLEMENTED = {
    "proxy": "the proxies that OSWorld used are not public",
    "act": "OSWorld does not implement it", "replay": "OSWorld does not implement it",
    "tidy_desktop": "OSWorld does not implement it",
}  # fmt: skip
"""Types of set-up steps that are not supported either, and why."""
_WEBSITE_TYPES = {"info_from_website", "active_tab_html_parse", "gotoRecreationPage_and_get_html_content"}
_DOWNLOAD_TYPES = {"download", "cloud_file", "update_browse_history"}
_URL = re.compile(r"(https?://|www\.)", re.IGNORECASE)
_LOCAL = re.compile(r"https?://(localhost|127\.0\.0\.1)\b", re.IGNORECASE)
_PUBLISHED = re.compile(r"https?://(huggingface\.co/datasets/xlangai|drive\.google\.com|raw\.githubusercontent\.com)")


class Step(BaseModel):
    """One set-up step, as the file has it. `setup.py` reads the parameters."""

    type: str
    parameters: dict[str, JsonValue] = {}


class Evaluator(BaseModel):
    """What is graded and how. Only OSWorld's evaluators read the rest."""

    model_config = ConfigDict(extra="allow")
    func: str | tuple[str, ...]
    postconfig: tuple[Step, ...] = ()


class OSWorldTask(BaseModel):
    """A task as its file has it."""

    model_config = ConfigDict(extra="ignore")
    id: str
    instruction: str = Field(min_length=1)
    config: tuple[Step, ...] = ()
    evaluator: Evaluator
    proxy: bool = False

    @property
    def evaluator_json(self) -> dict[str, JsonValue]:
        """The evaluator as the file has it."""
        return self.evaluator.model_dump(mode="json", exclude_unset=True)


class Tasks:
    """The tasks of a folder. Raises UserError if it is not one of OSWorld's."""

    def __init__(self, folder: Path) -> None:
        self.folder = at_home(folder)
        problem = f"environment.options.tasks_folder {folder}"
        if not self.folder.is_dir():
            raise UserError(f"{problem} is not a folder: name `evaluation_examples/examples` of a clone of OSWorld")
        self.names = tuple(sorted(f"{path.parent.name}/{path.stem}" for path in self.folder.glob("*/*.json")))
        if not self.names:
            raise UserError(f"{problem} has no files DOMAIN/ID.json: name `evaluation_examples/examples` of OSWorld")

    def load(self, name: str) -> OSWorldTask:
        """Raises UserError if there is no such task, or its file is not one of OSWorld's."""
        self._check_there([name])
        path = self.folder / f"{name}.json"
        try:
            return OSWorldTask.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise UserError(
                f"{path} is not a task of OSWorld ({error}): leave {name} out, or correct the file"
            ) from None

    def check(self, names: Collection[str], leave_out: Sequence[Need]) -> None:
        """Raises UserError that names all tasks which cannot run, with the reasons."""
        self._check_there(names)
        wrong: list[str] = []
        for name in names:
            task = self.load(name)
            needed = needs(task)
            if "accounts" in needed:
                wrong.append(f"{name} needs an account ({'; '.join(accounts(task))})")
            steps = sorted({step.type for step in task.config} & UNIMPLEMENTED.keys())
            wrong += [f"{name} has the set-up step {step} ({UNIMPLEMENTED[step]})" for step in steps]
            wrong += [f"{name} needs {need}" for need in leave_out if need in needed]
        if wrong:
            raise UserError(
                "environment.tasks.names: these tasks are not supported, or environment.options.leave_out refuses "
                f"them: {'; '.join(wrong)}. Leave them out: `python -m dart.workers.env.osworld tasks` lists the others"
            )

    def _check_there(self, names: Collection[str]) -> None:
        """Raises UserError that names all for which there is no file."""
        if absent := [name for name in names if name not in self.names]:
            told = "; ".join(f"{name!r} ({self._hint(name)})" for name in absent)
            raise UserError(f"environment.tasks.names: {self.folder} has no task {told}")

    def _hint(self, name: str) -> str:
        domain, _, rest = name.partition("/")
        same = [one for one in self.names if one.endswith(f"/{rest or domain}")]
        close = same or difflib.get_close_matches(name, self.names, n=3, cutoff=0.6)
        return f"did you mean {', '.join(close)}?" if close else f"names are DOMAIN/ID, as in {self.names[0]}"


def check_form(name: str) -> None:
    """Raises UserError for what cannot be a task's name."""
    if not NAME.fullmatch(name):
        raise UserError(f"environment.tasks.names: {name!r} is not DOMAIN/ID, as in {EXAMPLE}: name OSWorld's tasks so")


def accounts(task: OSWorldTask) -> list[str]:
    """Why the task needs an account; empty if it needs none."""
    return [why for kind in sorted(_types(task)) if (why := ACCOUNTS.get(kind))]


def needs(task: OSWorldTask) -> frozenset[Needs]:
    """What the task needs besides its machine, from its file alone."""
    found: set[Needs] = set()
    kinds = _types(task)
    if kinds & ACCOUNTS.keys():
        found.add("accounts")
    if kinds & _DOWNLOAD_TYPES:
        found.add("downloads")
    if task.proxy or kinds & _WEBSITE_TYPES or any(_opens_website(step) for step in task.config):
        found.add("websites")
    return frozenset(found)


def _opens_website(step: Step) -> bool:
    if step.type in _DOWNLOAD_TYPES:
        return False
    words = json.dumps(step.parameters)
    return bool(_URL.search(_PUBLISHED.sub("", _LOCAL.sub("", words))))


def _types(task: OSWorldTask) -> set[str]:
    """All values of `type` in the set-up steps and in the evaluator."""
    return {step.type for step in task.config} | set(_types_in(task.evaluator_json))


def _types_in(value: JsonValue) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(kind := value.get("type"), str):
            yield kind
        for inner in value.values():
            yield from _types_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _types_in(inner)
