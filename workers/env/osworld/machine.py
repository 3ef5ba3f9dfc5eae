"""A client of the server that OSWorld runs inside each virtual machine (`desktop_env/server/main.py` in OSWorld).

Requests that only read, or that can be repeated without harm, are retried; those that run programs never are, because a
program may have run although its answer was lost. Everything that goes wrong is a MachineError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, JsonValue, ValidationError

from dart.worlds import EnvironmentFailure

Command = str | Sequence[str]
M = TypeVar("M", bound=BaseModel)
READ_SECONDS, READS, PAUSE_SECONDS = 15.0, 3, 1.0
ACTION_SECONDS = 150.0
"""The server itself ends a command after 120 s."""
PRELUDE = "import pyautogui; import time; pyautogui.FAILSAFE = False; "
"""What OSWorld's controller puts before each program."""


class MachineError(EnvironmentFailure):
    """The machine did not answer, or answered with a failure."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a machine's services are reached. `id` is the pool's name for it."""

    id: str
    host: str
    server: int
    chromium: int
    vnc: int
    vlc: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.server}"


class Ran(BaseModel):
    """A program's end. `returncode` other than 0 is not an error of the machine."""

    output: str = ""
    error: str = ""
    returncode: int = 0


class Machine:
    """One machine. The HTTP client is shared and is not closed here."""

    def __init__(self, address: Address, client: httpx.AsyncClient) -> None:
        self.address, self._client = address, client

    # ---- reading ----

    async def screenshot(self) -> bytes:
        """The screen with its pointer, as PNG."""
        return (await self._read("GET", "/screenshot")).content

    async def answers(self) -> bool:
        """Whether it gives a screenshot now, at the first request."""
        try:
            await self._request("GET", "/screenshot", READ_SECONDS)
        except MachineError:
            return False
        return True

    async def wait(self, seconds: float) -> None:
        """Return as soon as it gives a screenshot. Raises MachineError after `seconds`."""
        until = time.monotonic() + seconds
        while not await self.answers():
            if time.monotonic() > until:
                raise MachineError(f"{self.address.url} gave no screenshot within {seconds:g} s")
            await asyncio.sleep(PAUSE_SECONDS)

    # ---- running programs: never retried ----

    async def execute(self, command: Command, *, shell: bool = False, seconds: float = ACTION_SECONDS) -> Ran:
        """Run a command and wait for its end."""
        answer = await self._request("POST", "/execute", seconds, json=_command(command, shell))
        return _parsed(Ran, answer)

    async def pyautogui(self, program: str) -> Ran:
        """Run a Python program after OSWorld's prelude."""
        return await self.execute(["python", "-c", PRELUDE + program])

    async def execute_with_verification(
        self, command: Command, verification: Mapping[str, JsonValue], most_seconds: float, interval: float, shell: bool
    ) -> None:
        """Run a command, and wait until the machine sees what `verification` says. Raises MachineError if it does
        not."""
        asked = {
            **_command(command, shell),
            "verification": dict(verification), "max_wait_time": most_seconds, "check_interval": interval,
        }  # fmt: skip
        await self._request("POST", "/setup/execute_with_verification", ACTION_SECONDS + most_seconds, json=asked)

    async def launch(self, command: Command, *, shell: bool = False) -> None:
        """Start a program, and do not wait for it."""
        await self._request("POST", "/setup/launch", ACTION_SECONDS, json=_command(command, shell))

    async def open(self, path: str, seconds: float) -> None:
        """Open a file or an application, and wait until it has a window."""
        await self._request("POST", "/setup/open_file", seconds, json={"path": path})

    # ---- changes that may be repeated ----

    async def upload(self, path: str, source: Path) -> None:
        """Write a local file to `path` on the machine."""
        content = await asyncio.to_thread(source.read_bytes)
        parts = {"file_data": (Path(path).name, content)}
        await self._read("POST", "/setup/upload", ACTION_SECONDS, data={"file_path": path}, files=parts)

    async def activate_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> None:
        await self._window("/setup/activate_window", name, strict, by_class)

    async def close_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> None:
        await self._window("/setup/close_window", name, strict, by_class)

    async def change_wallpaper(self, path: str) -> None:
        await self._read("POST", "/setup/change_wallpaper", json={"path": path})

    async def _window(self, route: str, name: str, strict: bool, by_class: bool) -> None:
        await self._read("POST", route, json={"window_name": name, "strict": strict, "by_class": by_class})

    # ---- requests ----

    async def _read(
        self,
        method: str,
        route: str,
        seconds: float = READ_SECONDS,
        *,
        json: JsonValue | None = None,
        data: Mapping[str, str] | None = None,
        files: Mapping[str, tuple[str, bytes]] | None = None,
    ) -> httpx.Response:
        """A request that may be repeated."""
        for attempt in range(READS):
            try:
                return await self._request(method, route, seconds, json=json, data=data, files=files)
            except MachineError:
                if attempt == READS - 1:
                    raise
            await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
        raise AssertionError("unreachable")

    async def _request(
        self,
        method: str,
        route: str,
        seconds: float,
        *,
        json: JsonValue | None = None,
        data: Mapping[str, str] | None = None,
        files: Mapping[str, tuple[str, bytes]] | None = None,
    ) -> httpx.Response:
        url = self.address.url + route
        try:
            # The client's timeouts are for each read; the whole answer must be there in time.
            async with asyncio.timeout(seconds):
                answer = await self._client.request(method, url, json=json, data=data, files=files, timeout=seconds)
        except TimeoutError:
            raise MachineError(f"{url} did not answer within {seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise MachineError(f"{url} failed: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise MachineError(f"{url} answered {answer.status_code}: {answer.text[:500]}")
        return answer


def _command(command: Command, shell: bool) -> dict[str, JsonValue]:
    return {"command": command if isinstance(command, str) else list(command), "shell": shell}


def _parsed(model: type[M], answer: httpx.Response) -> M:
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise MachineError(
            f"{answer.url}: {answer.text[:200]!r} is not the answer expected ({error.error_count()} errors)"
        ) from None
