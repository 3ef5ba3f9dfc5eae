"""From a YAML file and overrides to a checked config, or one message that names field, value and remedy."""

from __future__ import annotations

import difflib
import re
import types
import typing
from pathlib import Path

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dart.config.base import ConfigError, called, remedy
from dart.config.policy import BUILT_IN_PROMPTS, PromptTexts
from dart.config.tasks import TaskFile, read_task_file
from dart.config.whole import Config
from dart.config.yaml_text import NotYaml, read_yaml, read_yaml_file

_PASSWORD = re.compile(r"(?<=:)(?!//).+(?=@)|(?<=password=)[^&']+")
"""In a URL. A password may have any characters; the last @ ends it."""


def load(path: Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a YAML config, apply `section.field=value` overrides, and check it.

    Raises ConfigError with one message about the first problems found: each names field, value and remedy.
    """
    try:
        raw = read_yaml_file(path)
    except FileNotFoundError:
        raise ConfigError(
            f"config {path} does not exist: name a YAML file, for example configs/ladder_demo.yaml"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"config {path} is a folder: name a YAML file in it") from None
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read ({error.strerror}): name a readable YAML file") from None
    except NotYaml as error:
        raise ConfigError(f"config {path} is not YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"config {path} {called(raw)}: write sections such as model: and stop:, "
            "as configs/ladder_demo.yaml has them"
        )
    before = _prompt(raw)
    for override in overrides:
        _override(raw, override)
    given = any(override.startswith("agent.template") for override in overrides)
    if isinstance(agent := raw.get("agent"), dict) and _prompt(raw) != before and not given:
        agent.pop("template", None)  # a run's config.yaml has the contents of its prompt's file beside the name
    return parse(raw, str(path), path.parent)


def parse(raw: dict[str, object], where: str = "config", folder: Path | None = None) -> Config:
    """Check a config that is already a dictionary. `folder`: where its file of tasks is looked for; none: in the
    current one. Raises ConfigError."""
    try:
        return Config.model_validate(_with_prompt(_with_tasks(raw, folder or Path()), folder or Path()))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(where, problem) for problem in error.errors())) from None


def _with_tasks(raw: dict[str, object], folder: Path) -> dict[str, object]:
    """The config with the contents of the file that `environment.tasks.file` names."""
    environment = raw.get("environment")
    tasks = environment.get("tasks") if isinstance(environment, dict) else None
    if not isinstance(environment, dict) or not isinstance(tasks, dict) or tasks.get("file") is None:
        return raw
    path, contents = read_task_file(tasks, folder)
    try:
        fields = TaskFile.model_validate(contents).fields()
    except ValidationError as error:
        raise ConfigError("\n".join(explain(str(path), problem, TaskFile) for problem in error.errors())) from None
    return raw | {"environment": environment | {"tasks": tasks | fields | {"file": None}}}


def _with_prompt(raw: dict[str, object], folder: Path) -> dict[str, object]:
    """The config with the contents of the file that `agent.prompt` names, unless it has them already."""
    agent = raw.get("agent")
    named = agent.get("prompt") if isinstance(agent, dict) else None
    if not isinstance(agent, dict) or not isinstance(named, str) or agent.get("template") is not None:
        return raw
    if named in BUILT_IN_PROMPTS:
        return raw
    path = folder / named
    try:
        contents = read_yaml_file(path)
    except OSError:
        known = ", ".join(BUILT_IN_PROMPTS)
        raise ConfigError(
            f"agent.prompt (it is {named!r}): use {known}, or name a file: {path} cannot be read"
        ) from None
    except NotYaml as error:
        raise ConfigError(f"agent.prompt: {path} is not YAML: {error}") from None
    try:
        template = PromptTexts.model_validate(contents)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(str(path), problem, PromptTexts) for problem in error.errors())) from None
    return raw | {"agent": agent | {"template": template.model_dump()}}


def _prompt(raw: dict[str, object]) -> object:
    agent = raw.get("agent")
    return agent.get("prompt") if isinstance(agent, dict) else None


def _override(raw: dict[str, object], override: str) -> None:
    key, separator, value = override.partition("=")
    *parents, last = key.split(".")
    if not separator or not last:
        raise ConfigError(f"override {override!r} is not section.field=value, for example stop.updates=10")
    node = raw
    for parent in parents:
        inner = node.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        node = inner
    try:
        node[last] = read_yaml(value)
    except NotYaml:
        raise ConfigError(
            f"override {override!r}: {value} is not a YAML value: quote it, or close its brackets"
        ) from None


def explain(where: str, problem: ErrorDetails, model: type[BaseModel] = Config, above: str = "") -> str:
    """One pydantic problem as one line: field, value and remedy. `above`: the path to the model, as in "section."."""
    field = above + ".".join(str(part) for part in problem["loc"]) or "(whole)"
    value = problem["input"]
    written = "empty" if value is None else _PASSWORD.sub("***", repr(value))
    shown = "" if isinstance(value, dict | BaseModel) else f" (it is {written})"
    if problem["type"] == "extra_forbidden":
        known = _fields_beside(model, problem["loc"])
        close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{where}: {field} is not a known field{shown}: {hint}"
    if problem["type"] == "missing":
        return f"{where}: {field} is missing: {remedy(problem)}"
    return f"{where}: {field}{shown}: {remedy(problem)}"


def _fields_beside(section: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location[:-1]:
        if isinstance(part, int):
            continue  # an entry of a list, whose model is known already
        annotation = section.model_fields[part].annotation
        if typing.get_origin(annotation) is tuple:
            annotation = typing.get_args(annotation)[0]
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return sorted(section.model_fields)
