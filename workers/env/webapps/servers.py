"""The applications' servers: a process for each application and worker, started on demand, ended with the worker.

Each has a keeper (`desktop.processes`), so that it ends however the worker dies, and an empty folder to run in, which
goes with it. A server that has ended or does not answer is replaced for the next episode; episodes that still hold it
fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import time
from collections import defaultdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from dart.wire.channel import free_port
from dart.workers.env.desktop.processes import Processes, sweep
from dart.workers.env.webapps.options import WebAppsOptions
from dart.worlds import EnvironmentFailure

log = logging.getLogger(__name__)
KEPT = "webapp"
"""What these folders and keepers are called: dart-webapp-…"""
ASKING = "dart-asks"
"""A session that no episode has: asking for its state shows whether the server answers."""
MOST_BYTES = 64 << 20
START_TRIES = 3
POLL_SECONDS = 0.1


class Difference(BaseModel):
    """What `/go` answers: a session's state at first and now, and how they differ, in the application's own form."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    initial_state: JsonValue
    current_state: JsonValue
    state_diff: JsonValue


class Server:
    """One application, running. Make one with `start`."""

    def __init__(self, name: str, processes: Processes, pid: int, port: int, seconds: float) -> None:
        self.name, self.port = name, port
        self.users = 0
        self.idle_since = time.monotonic()
        self._processes, self._pid, self._seconds = processes, pid, seconds
        self._closed = False

    @classmethod
    async def start(cls, folder: Path, options: WebAppsOptions) -> Server:
        """Raises EnvironmentFailure with what it printed if it does not start."""
        said = ""
        for _ in range(START_TRIES):  # the free port may be somebody else's by the time that the server takes it
            processes = await asyncio.to_thread(Processes, KEPT)
            async with contextlib.AsyncExitStack() as undo:
                undo.push_async_callback(asyncio.to_thread, processes.close)
                server = await cls._spawn(folder, options, processes)
                if await server._comes_up(options.start_seconds):
                    undo.pop_all()
                    return server
                ended = processes.ended(server._pid) is not None
                said = (processes.folder / "log").read_text(errors="replace").strip()[-500:]
            if not ended:
                break
        raise EnvironmentFailure(
            f"the application {folder.name} did not start within {options.start_seconds:g} s: "
            f"{said or 'it printed nothing'}"
        )

    @classmethod
    async def _spawn(cls, folder: Path, options: WebAppsOptions, processes: Processes) -> Server:
        port = free_port()
        command = [word.format(folder=folder, port=port) for word in options.command]
        home, where = str(processes.folder), processes.folder / "run"
        where.mkdir()
        environment = {
            "PATH": os.environ.get("PATH", os.defpath), "HOME": home, "TMPDIR": home, "CUA_GYM_HARDENED": "0",
            "NO_COLOR": "1", "BROWSER": "none",
        }  # fmt: skip
        pid = await asyncio.to_thread(processes.start, command, environment, where, processes.folder / "log")
        return cls(folder.name, processes, pid, port, options.answer_seconds)

    async def _comes_up(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.alive():
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        await asyncio.to_thread(self._ask, "GET", f"/go?sid={ASKING}")
                        return True
                    await asyncio.sleep(POLL_SECONDS)
        return False

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        """A folder that lives as long as the server."""
        return self._processes.folder

    def alive(self) -> bool:
        """Whether its process runs."""
        return not self._closed and self._processes.alive() and self._processes.ended(self._pid) is None

    async def answers(self) -> bool:
        """Whether it runs and keeps its contract."""
        with contextlib.suppress(EnvironmentFailure):
            await self.difference(ASKING)
            return True
        return False

    async def difference(self, sid: str) -> Difference:
        """What `/go` says of a session. Raises EnvironmentFailure if there is no such answer."""
        answer = await self._answer("GET", f"/go?sid={sid}")
        try:
            return Difference.model_validate_json(answer)
        except ValidationError:
            raise EnvironmentFailure(
                f"the application {self.name} answers /go with {answer[:80]!r}, not with initial_state, current_state "
                "and state_diff: use one that keeps CUA-Gym-Hub's contract"
            ) from None

    async def forget(self, sid: str) -> None:
        """Have it drop a session's files."""
        await self._answer("POST", f"/post?sid={sid}", json.dumps({"action": "reset"}).encode())

    def close(self) -> None:
        """End it and remove its folder."""
        self._closed = True
        self._processes.close()

    async def _answer(self, method: str, path: str, body: bytes = b"") -> bytes:
        if not self.alive():
            raise EnvironmentFailure(f"the application {self.name} has died")
        try:
            return await asyncio.to_thread(self._ask, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            what = f"{method} {path.partition('?')[0]}"
            raise EnvironmentFailure(f"the application {self.name} does not answer {what}: {error}") from None

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self._seconds)
        try:
            connection.request(method, path, body or None, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            answer = response.read(MOST_BYTES)
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"HTTP {response.status}: {answer[:200]!r}")
        return answer


class Servers:
    """The worker's servers. At most one runs for each application."""

    def __init__(self, options: WebAppsOptions) -> None:
        self._options = options
        self._running: dict[Path, Server] = {}
        self._starting: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def open(self) -> None:
        """End what killed workers have left."""
        await asyncio.to_thread(sweep, KEPT)

    async def take(self, application: Path) -> Server:
        """A server that answers; `give` it back. Raises EnvironmentFailure."""
        async with self._starting[application]:
            server = self._running.get(application)
            if server is not None and not await self._still_answers(server):
                log.warning("the application %s does not answer and is started again", server.name)
                await self._end(application)
                server = None
            if server is None:
                await self._make_room()
                server = self._running[application] = await Server.start(application, self._options)
                server.users += 1
            return server

    async def give(self, server: Server) -> None:
        server.users -= 1
        server.idle_since = time.monotonic()

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(self._end(application) for application in list(self._running)))

    async def _still_answers(self, server: Server) -> bool:
        """Whether it answers: then it has one user more, from before it is asked, so that nobody ends it meanwhile."""
        server.users += 1
        answers = False
        try:
            answers = await server.answers()
        finally:
            server.users -= not answers
        return answers

    async def _make_room(self) -> None:
        """End the one that has been idle longest, if too many run and one is idle."""
        idle = [application for application, server in self._running.items() if not server.users]
        if idle and len(self._running) >= self._options.most_applications:
            await self._end(min(idle, key=lambda application: self._running[application].idle_since))

    async def _end(self, application: Path) -> None:
        """Nothing if another has ended it already."""
        if (server := self._running.pop(application, None)) is not None:
            await asyncio.to_thread(server.close)
