"""CUA-Gym's task bundles: a folder for each task with `task.json`, `initial_setup.py` and `reward.py`.

As published, the programs name their application by a placeholder (`__CUA_GYM_GMAIL_URL__`) or by the address that it
had when it was hosted (`https://cua-gym-gmail.xlang.ai`), and hand the session's id on in `/tmp/task_web_sid`.
`fill_in` puts the worker's own in their places, as the publishers' `materialize_dataset_urls.py` does.
"""

from __future__ import annotations

import difflib
import io
import re
import tokenize
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from dart.errors import UserError
from dart.workers.env.webapps.options import PREVIEW, WebAppsOptions
from dart.worlds.missing import at_home

NAME = re.compile(r"[\w-][\w.-]*")
DESCRIPTIONS = ("task.json", "config.json", "task_config.json")
SID_FILE = "/tmp/task_web_sid"
JUDGE = "reward_judge"
_NAMED = re.compile(
    r"__CUA_GYM_(?P<placeholder>[A-Z0-9_]+?)_(?P<part>URL|HOST)__"
    r"|(?P<scheme>https?://)?cua-gym-(?P<hosted>[a-z0-9-]+)\.xlang\.ai"
)
_IMPORTS_JUDGE = re.compile(rf"^\s*(from|import)\s+{JUDGE}\b", re.MULTILINE)
FIELD = "environment.tasks.names"


class Description(BaseModel):
    """What is read of `task.json`."""

    model_config = ConfigDict(extra="ignore")
    instruction: str = Field(min_length=1, validation_alias=AliasChoices("instruction", "task_instruction"))


@dataclass(frozen=True, slots=True)
class WebTask:
    """A task: its instruction, the folder of its application, and the texts of its programs."""

    name: str
    instruction: str
    application: Path
    setup: str | None
    """None if it begins with the application's own data."""
    reward: str


class Tasks:
    """The tasks and applications of two folders. Raises UserError if one of them is not there."""

    def __init__(self, options: WebAppsOptions) -> None:
        self._options = options
        self.folder, self.applications = at_home(options.tasks_folder), at_home(options.applications).resolve()
        for field, folder, remedy in (
            ("applications", self.applications, "name `websites` of a clone of CUA-Gym-Hub"),
            ("tasks_folder", self.folder, "name the folder that CUA-Gym's archive of tasks was unpacked in"),
        ):
            if not folder.is_dir():
                raise UserError(f"environment.options.{field} {folder} is not a folder: {remedy}")
        self._known = {key(one.name): one for one in sorted(self.applications.iterdir()) if one.is_dir()}
        if not self._known:
            raise UserError(
                f"environment.options.applications {self.applications} has no applications: "
                "name `websites` of a clone of CUA-Gym-Hub"
            )

    def load(self, name: str) -> WebTask:
        """Raises UserError if there is no such task, or it cannot be run here."""
        folder = self.folder / name
        if not NAME.fullmatch(name) or not folder.is_dir():
            raise UserError(f"{FIELD}: {self.folder} has no task {name!r}: {self._hint(name)}")
        setup, reward = folder / "initial_setup.py", folder / "reward.py"
        if not reward.is_file():
            raise UserError(f"{FIELD}: task {name} has no reward.py: only bundles with one can be run, leave it out")
        if not setup.is_file() and (others := sorted(folder.glob("initial_setup.*"))):
            raise UserError(f"{FIELD}: task {name} has {others[0].name}, which is for a desktop: leave it out")
        programs = [path.read_text(encoding="utf-8") for path in (setup, reward) if path.is_file()]
        application = self._application(name, programs)
        return WebTask(
            name, self._instruction(folder), application, programs[0] if programs[1:] else None, programs[-1]
        )

    def check(self, names: Collection[str]) -> None:
        """Raises UserError unless all of these tasks exist, can be run, and have built applications."""
        applications = {self.load(name).application for name in names}
        if self._options.command == PREVIEW:
            for folder in sorted(applications):
                if problem := unbuilt(folder):
                    raise UserError(problem)

    def _instruction(self, folder: Path) -> str:
        for name in DESCRIPTIONS:
            if (path := folder / name).is_file():
                try:
                    return Description.model_validate_json(path.read_bytes()).instruction
                except ValidationError as error:
                    raise UserError(f"{path} is not a task of CUA-Gym ({error}): leave it out, or correct it") from None
        raise UserError(f"{folder} has none of {', '.join(DESCRIPTIONS)}: name a folder of CUA-Gym's bundles")

    def _application(self, name: str, programs: Collection[str]) -> Path:
        """The folder of the one application that the task's programs name."""
        named = {one for program in programs for one in named_in(program, name)}
        if any(_IMPORTS_JUDGE.search(program) for program in programs):
            raise UserError(f"{FIELD}: task {name} is judged by a language model ({JUDGE}), which is not supported")
        if len(named) != 1:
            found = f"uses {len(named)} applications ({', '.join(sorted(named))})" if named else "names no application"
            raise UserError(
                f"{FIELD}: task {name} {found}: only tasks of one application of CUA-Gym-Hub can be run, leave it out"
            )
        [application] = named
        if application not in self._known:
            close = difflib.get_close_matches(application, self._known, n=3)
            hint = f" (there are {', '.join(self._known[one].name for one in close)})" if close else ""
            raise UserError(
                f"{FIELD}: task {name} needs the application {application}, which environment.options.applications "
                f"{self.applications} does not have{hint}: use a clone of CUA-Gym-Hub that has it"
            )
        return self._known[application]

    def _hint(self, name: str) -> str:
        names = sorted(one.name for one in self.folder.iterdir() if one.is_dir())
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.6) or names[:3]
        return f"there are for example {', '.join(close)}" if close else "the folder is empty"


def key(name: str) -> str:
    """The form in which folders, placeholders and host names of an application are the same: `google_docs`."""
    return re.sub(r"[^a-z0-9]+", "_", name.removesuffix("_mock").casefold())


def named_in(program: str, task: str) -> set[str]:
    """The keys of the applications that a program names outside its comments. UserError if it is not Python."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(program).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        raise UserError(f"{FIELD}: a program of task {task} is not Python ({error}): leave the task out") from None
    words = (token.string for token in tokens if token.type != tokenize.COMMENT)
    return {key(found["placeholder"] or found["hosted"]) for word in words for found in _NAMED.finditer(word)}


def fill_in(program: str, host: str, sid_file: Path) -> str:
    """The program with `host` ("127.0.0.1:8000") for its application, and a file of the session's own for the id."""

    def address(found: re.Match[str]) -> str:
        return f"http://{host}" if found["part"] == "URL" or found["scheme"] else host

    return _NAMED.sub(address, program).replace(SID_FILE, str(sid_file))


def unbuilt(folder: Path) -> str | None:
    """What is missing before the application can be started, with the command that makes it."""
    missing = [one for one in ("node_modules/vite/bin/vite.js", "dist/index.html") if not (folder / one).is_file()]
    if not missing:
        return None
    return f"the application {folder.name} is not built: run `cd {folder} && npm install && npm run build`"
