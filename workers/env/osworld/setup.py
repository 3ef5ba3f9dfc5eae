"""The set-up steps of OSWorld's tasks, carried out as OSWorld's `SetupController` does, but with every failure raised.

A step that the machine fails is the machine's failure (MachineError), which voids the attempt; a step that can never
work (an address that does not have its file, a step that needs an account) is NotEvaluated: the task has no result,
which is not the same as a reward of 0. The exit status of a program is not looked at, unless the step says `until`,
because OSWorld does not look at it either.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from dart.errors import UserError
from dart.workers.env.osworld.machine import Command, Machine, MachineError, Ran
from dart.workers.env.osworld.tasks import ACCOUNTS, UNIMPLEMENTED, Step

DOWNLOAD_SECONDS, DOWNLOADS = 300.0, 5
LAUNCH_SECONDS = 2.0
"""Waited after each `launch`, as OSWorld does."""
UNTIL_PAUSE_SECONDS, UNTIL_FAILURES = 0.3, 5
BY_EVALUATOR = frozenset({"chrome_open_tabs", "chrome_close_tabs", "update_browse_history"})
"""Steps that speak to Chromium or write its files: OSWorld's own code carries them out, in the evaluators' process."""
PASSING = (408, 425, 429)
"""Statuses below 500 that say "not now"."""


class NotEvaluated(UserError):
    """The task cannot be run or graded here, whatever the policy does: it has no result."""


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _File(_Parameters):
    url: str = Field(min_length=1)
    path: str = Field(min_length=1)


class Download(_Parameters):
    type: Literal["download"]
    files: tuple[_File, ...]


class _LocalFile(_Parameters):
    local_path: Path
    path: str = Field(min_length=1)


class Upload(_Parameters):
    type: Literal["upload_file", "upload"]
    files: tuple[_LocalFile, ...]


class Open(_Parameters):
    type: Literal["open"]
    path: str = Field(min_length=1)


class Launch(_Parameters):
    type: Literal["launch"]
    command: str | tuple[str, ...] = Field(min_length=1)
    shell: bool = False


class Until(_Parameters):
    returncode: int | None = None
    stdout: str | None = None
    stderr: str | None = None

    def met(self, ran: Ran) -> bool:
        return (
            (self.returncode is not None and ran.returncode == self.returncode)
            or (self.stdout is not None and self.stdout in ran.output)
            or (self.stderr is not None and self.stderr in ran.error)
        )


class Execute(_Parameters):
    type: Literal["execute", "command"]
    command: str | tuple[str, ...] = Field(min_length=1)
    stdout: str = ""
    stderr: str = ""
    shell: bool = False
    until: Until | None = None


class ExecuteWithVerification(_Parameters):
    type: Literal["execute_with_verification"]
    command: str | tuple[str, ...] = Field(min_length=1)
    verification: dict[str, JsonValue] = {}
    max_wait_time: float = 10.0
    check_interval: float = 1.0
    shell: bool = False


class Sleep(_Parameters):
    type: Literal["sleep"]
    seconds: float = Field(ge=0)


class Window(_Parameters):
    type: Literal["activate_window", "close_window"]
    window_name: str = Field(min_length=1)
    strict: bool = False
    by_class: bool = False


class Wallpaper(_Parameters):
    type: Literal["change_wallpaper"]
    path: str = Field(min_length=1)


Known = Download | Upload | Open | Launch | Execute | ExecuteWithVerification | Sleep | Window | Wallpaper
_KNOWN: TypeAdapter[Known] = TypeAdapter(Annotated[Known, Field(discriminator="type")])


def read(step: Step) -> Known | Step:
    """The step with its parameters; steps that OSWorld's own code carries out stay as they are. Raises NotEvaluated."""
    if step.type in BY_EVALUATOR:
        return step
    if why := (ACCOUNTS | UNIMPLEMENTED).get(step.type):
        raise NotEvaluated(f"set-up step {step.type} is not supported: {why}")
    try:
        return _KNOWN.validate_python({"type": step.type, **step.parameters})
    except ValidationError as error:
        raise NotEvaluated(f"set-up step {step.type} is not one of OSWorld's: {error}") from None


class Downloads:
    """Files from addresses, each fetched once and kept in a folder. Shared by all machines of a worker."""

    def __init__(self, folder: Path, client: httpx.AsyncClient) -> None:
        self._folder, self._client = folder, client
        self._locks: dict[str, asyncio.Lock] = {}

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, url: str) -> Path:
        """The file's path. Raises NotEvaluated if the address does not give it, MachineError if it may do so later."""
        path = self._folder / str(uuid.uuid5(uuid.NAMESPACE_URL, url))
        async with self._locks.setdefault(url, asyncio.Lock()):
            if not path.exists():
                await self._fetch(url, path)
        return path

    async def _fetch(self, url: str, path: Path) -> None:
        for attempt in range(DOWNLOADS):
            try:
                return await self._fetch_once(url, path)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if _passes(error) and attempt == DOWNLOADS - 1:
                    raise MachineError(f"{url} does not answer now ({type(error).__name__}: {error})") from None
                if not _passes(error):
                    raise NotEvaluated(
                        f"{url} cannot be downloaded ({type(error).__name__}: {error}): leave the task out, or put the "
                        f"file at {path}"
                    ) from None
            await asyncio.sleep(2.0**attempt)

    async def _fetch_once(self, url: str, path: Path) -> None:
        """Into a file of its own beside it first: another worker may be fetching the same, and a download that breaks
        off must leave nothing that looks whole."""
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                async with self._client.stream("GET", url, timeout=DOWNLOAD_SECONDS, follow_redirects=True) as answer:
                    answer.raise_for_status()
                    async for piece in answer.aiter_bytes():
                        file.write(piece)
                file.close()
                await asyncio.to_thread(part.replace, path)
            finally:
                await asyncio.to_thread(part.unlink, missing_ok=True)


def _passes(error: httpx.HTTPError | httpx.InvalidURL) -> bool:
    """Whether the address may give its file later: the network or the server has a bad moment, or it wants a pause."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500 or error.response.status_code in PASSING
    return not isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol)


@dataclass(frozen=True, slots=True)
class Setup:
    """Carries out steps on one machine. `folder` keeps what programs print, for the evaluator."""

    machine: Machine
    downloads: Downloads
    folder: Path
    screen: tuple[int, int]
    password: str
    step_seconds: float
    by_evaluator: Callable[[Step], Awaitable[None]]
    """Carries out the steps in BY_EVALUATOR. Raises MachineError and NotEvaluated."""

    async def run(self, steps: tuple[Step, ...]) -> None:
        """Raises MachineError if a step fails, and NotEvaluated if one can never work, naming it."""
        read_all = [read(step) for step in steps]  # what can never work is said before anything is changed
        for number, step in enumerate(read_all, 1):
            where = f"set-up step {number} of {len(steps)} ({step.type})"
            try:
                await self._step(step)
            except NotEvaluated as error:
                raise NotEvaluated(f"{where}: {error}") from None
            except MachineError as error:
                raise MachineError(f"{where} failed: {error}") from error

    async def _step(self, step: Known | Step) -> None:
        match step:
            case Step():
                await self.by_evaluator(step)
            case Download():
                for file in step.files:
                    await self.machine.upload(file.path, await self.downloads.get(file.url))
            case Upload():
                await self._upload(step)
            case Open():
                await self.machine.open(step.path, self.step_seconds)
            case Launch():
                await self.machine.launch(self._launched(step), shell=step.shell)
                await asyncio.sleep(LAUNCH_SECONDS)
            case Execute():
                await self._execute(step)
            case ExecuteWithVerification():
                await self.machine.execute_with_verification(
                    step.command, step.verification, step.max_wait_time, step.check_interval, step.shell
                )
            case Sleep():
                await asyncio.sleep(step.seconds)
            case Window():
                close = step.type == "close_window"
                change = self.machine.close_window if close else self.machine.activate_window
                await change(step.window_name, strict=step.strict, by_class=step.by_class)
            case Wallpaper():
                await self.machine.change_wallpaper(step.path)

    async def _upload(self, step: Upload) -> None:
        for file in step.files:
            if not file.local_path.is_file():
                raise NotEvaluated(f"{file.local_path} does not exist on the env worker's machine: put the file there")
            await self.machine.upload(file.path, file.local_path)

    @staticmethod
    def _launched(step: Launch) -> Command:
        """A command of several words without a shell is split at spaces, as OSWorld does."""
        if isinstance(step.command, str) and not step.shell and len(step.command.split()) > 1:
            return tuple(step.command.split())
        return step.command

    async def _execute(self, step: Execute) -> None:
        """Once; or with `until`, again until it holds. Five failures of the machine, or the time limit, are too
        many."""
        command, failures, began = self._filled(step.command), 0, time.monotonic()
        while True:
            try:
                ran = await self.machine.execute(command, shell=step.shell)
            except MachineError:
                failures += 1
                if step.until is None or failures >= UNTIL_FAILURES:
                    raise
            else:
                self._keep(step, ran)
                if step.until is None or step.until.met(ran):
                    return
            if time.monotonic() - began > self.step_seconds:
                raise MachineError(f"{command!r} did not fulfil `until` within {self.step_seconds:g} s")
            await asyncio.sleep(UNTIL_PAUSE_SECONDS)

    def _keep(self, step: Execute, ran: Ran) -> None:
        for name, text in ((step.stdout, ran.output), (step.stderr, ran.error)):
            if name:
                (self.folder / Path(name).name).write_text(text, encoding="utf-8")

    def _filled(self, command: str | tuple[str, ...]) -> Command:
        """With the password and the screen's size in their places."""
        width, height = self.screen
        values = {
            "{CLIENT_PASSWORD}": self.password, "{SCREEN_WIDTH_HALF}": str(width // 2),
            "{SCREEN_HEIGHT_HALF}": str(height // 2), "{SCREEN_WIDTH}": str(width), "{SCREEN_HEIGHT}": str(height),
        }  # fmt: skip

        def filled(text: str) -> str:
            for name, value in values.items():
                text = text.replace(name, value)
            return text

        return filled(command) if isinstance(command, str) else tuple(filled(word) for word in command)
