"""`dart serve-world`: the world that a config names, as an OpenEnv environment server.

The env worker's role hosts the world, as in a run: it boots and renews `environment.slots` environments, limits every
call, and does not believe a reward of 0 from a dead one. Each WebSocket session is one of its assignments, and each
reset within a session another attempt. The messages are OpenEnv's (types reset, step, state, close → observation,
state, error), so that OpenEnv's clients can talk to it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import os
import random
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from dart import __version__
from dart.config import Environment, EnvWorkerConfig, load
from dart.config.base import remedy
from dart.core.action_json import KINDS, action_from_json
from dart.core.loopback import is_loopback
from dart.core.types import Task
from dart.errors import UserError, ungrouped
from dart.malloc import keep_memory
from dart.processes.settings import ending_signals
from dart.v1 import session_pb2 as pb
from dart.wire.channel import TOKEN_ENVIRONMENT, address_of, listen
from dart.wire.convert import action_to_proto, image_from_proto, task_to_proto
from dart.wire.role import CommandError, Offering, WorkerRole
from dart.worlds.missing import package
from dart.worlds.plugs import check

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.websockets import WebSocket

PACKAGES = ("starlette", "uvicorn", "websockets")
BOOT_PATIENCE_SECONDS = 600.0
"""How long a reset waits for an environment that still boots or is renewed."""
MOST_REQUEST_BYTES = 1 << 20
FORBIDDEN = 1008
TASK_REFUSED = "TASK_REFUSED"
"""The code for a task that cannot be run, however often it is tried; OpenEnv has none."""
CODES = {pb.FAILURE_CODE_INVALID: "VALIDATION_ERROR", pb.FAILURE_CODE_TASK: TASK_REFUSED}
"""What a command failed with → the code of the answer, if it is not the environment's failure."""
REFUSED_SECONDS = 5.0
"""How long a client for which there is no room stays connected, to read why."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command was given."""

    config: Path
    overrides: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000


class Host(WorkerRole, Offering, Protocol):
    """The env worker's role (`dart.workers.env.role`)."""

    patience: float


def serve_world(options: ServeOptions) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises UserError for anything that the user can fix."""
    environment = load(options.config, options.overrides).environment
    if missing := package(*PACKAGES, extra="serve"):
        raise UserError(missing)
    token = os.environ.pop(TOKEN_ENVIRONMENT, None)
    if not token and not is_loopback(options.host):
        raise UserError(f"--host {options.host} is open to the network: set {TOKEN_ENVIRONMENT}, or use 127.0.0.1")
    check(environment.kind, environment.options, environment.tasks.all)
    try:
        listening = listen(options.host, options.port)
    except OSError as error:
        raise UserError(
            f"--port {options.port} on {options.host}: {error.strerror}: stop the other program, or use --port 0 for "
            "any free port"
        ) from None
    keep_memory()
    import uvloop

    with listening, contextlib.suppress(asyncio.CancelledError):  # by a signal
        uvloop.run(_serve(environment, listening, token))


async def _serve(environment: Environment, listening: socket.socket, token: str | None) -> None:
    role: Host = importlib.import_module("dart.workers.env.role").EnvRole()
    role.patience = BOOT_PATIENCE_SECONDS
    server = WorldServer(role, environment, token)
    http = _http_server(server.app())

    this, begun = asyncio.current_task(), False
    assert this is not None

    def stop() -> None:
        # Sessions end in peace. The world's start, which may take minutes, is cut short, and so is all else the second
        # time.
        if not begun or http.should_exit:
            this.cancel()
        http.should_exit = True

    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await role.prepare(EnvWorkerConfig(environment=environment).model_dump_json())
        begun = True
        host, port = listening.getsockname()[:2]
        click.echo(
            f"serving {environment.kind} at http://{address_of(host, port)}: at most {environment.slots} sessions; "
            "Ctrl-C ends it"
        )
        with ungrouped(UserError):
            async with asyncio.TaskGroup() as tasks:
                environments = tasks.create_task(role.run(server.heard))
                await http.serve(sockets=[listening])
                environments.cancel()
    finally:
        await role.close()


def _http_server(app: Starlette) -> uvicorn.Server:
    from dart.processes.http import HttpServer

    return HttpServer(app, ws_max_size=MOST_REQUEST_BYTES, timeout_graceful_shutdown=5)


# ---- messages ----


class Refused(Exception):
    """A request that cannot be done: OpenEnv's code and a message. The session goes on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Message(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(extra="ignore")

    type: str = ""
    data: dict[str, JsonValue] = {}


class Start(BaseModel):
    """The data of a reset. What is missing is chosen: the first task, a random training seed."""

    model_config = ConfigDict(extra="forbid")

    task: str | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 64)
    episode_id: str | None = Field(None, max_length=255)


class Session:
    """One client's session: an environment of its own from a reset to the next, or to the end of the session."""

    def __init__(self, role: Host, environment: Environment, name: str) -> None:
        self._role, self._environment, self._name = role, environment, name
        self._attempt = 0
        self._running = False
        self._task: Task | None = None
        self._episode = ""
        self._steps = 0

    async def answer(self, text: str) -> dict[str, JsonValue] | None:
        """The answer to a message; None ends the session."""
        try:
            message = Message.model_validate_json(text)
            match message.type:
                case "reset":
                    return {"type": "observation", "data": await self._reset(Start.model_validate(message.data))}
                case "step":
                    return {"type": "observation", "data": await self._step(message.data)}
                case "state":
                    return {"type": "state", "data": self._state()}
                case "close":
                    return None
                case _:
                    raise Refused("UNKNOWN_TYPE", f"{message.type!r} is not reset, step, state or close")
        except ValidationError as error:
            first = error.errors()[0]
            code = "INVALID_JSON" if first["type"] == "json_invalid" else "VALIDATION_ERROR"
            where = ".".join(map(str, first["loc"])) or "the message"
            return _error(code, f"{where}: {remedy(first)}")
        except Refused as refused:
            return _error(refused.code, str(refused))

    async def end(self) -> None:
        """Give the environment back; it is renewed for the next session."""
        if self._attempt:
            await self._role.handle(pb.Release(assignment=self._assignment()))
        self._running = False

    async def _reset(self, start: Start) -> dict[str, JsonValue]:
        await self.end()
        tasks = self._environment.tasks
        name = start.task if start.task is not None else tasks.all[0]
        try:
            # It may ask servers, for as long as other sessions would otherwise stand still.
            await asyncio.to_thread(check, self._environment.kind, self._environment.options, (name,))
        except UserError as error:
            raise Refused(TASK_REFUSED, str(error)) from None
        seed = start.seed
        if seed is None:
            seed = 0 if name in tasks.single_instance else random.randrange(*tasks.train_seeds)
        self._task = Task(self._environment.kind, name, seed)
        self._episode, self._steps = start.episode_id or secrets.token_hex(8), 0
        self._attempt += 1
        seen = await self._ask(pb.Reset(assignment=self._assignment(), task=task_to_proto(self._task)))
        if goals := len(seen.goal_images):
            # Without them its instruction would ask for something else.
            why = f"its instruction has {goals} pictures, and observations here have no place for them: leave it out"
            raise Refused(TASK_REFUSED, f"task {name}: {why}")
        self._running = True
        return self._told(seen)

    async def _step(self, data: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """`last`: it is the last action before the client's step limit, so the answer is the verdict."""
        if not self._running:
            raise Refused("EXECUTION_ERROR", "no episode is running: send reset first")
        last = data.get("last", False)
        try:
            if not isinstance(last, bool):
                raise ValueError(f"last is {last!r}: it must be true or false")
            # OpenEnv's own models send metadata with every action.
            action = action_from_json({key: value for key, value in data.items() if key not in ("last", "metadata")})
        except ValueError as error:
            raise Refused("VALIDATION_ERROR", str(error)) from None
        try:
            told = action_to_proto(action)
        except ValueError as error:
            why = f"action {data['kind']}: {error}: its whole numbers have 32 bits, and count is not negative"
            raise Refused("VALIDATION_ERROR", why) from None
        self._steps += 1
        seen = await self._ask(pb.Act(assignment=self._assignment(), action=told, last=last))
        self._running = not seen.done
        return self._told(seen)

    async def _ask(self, command: pb.Reset | pb.Act) -> pb.Observed:
        try:
            reply = await self._role.handle(command)
        except CommandError as error:
            self._running = False
            raise Refused(CODES.get(error.code, "EXECUTION_ERROR"), str(error)) from None
        assert isinstance(reply, pb.Observed)
        return reply

    def _told(self, seen: pb.Observed) -> dict[str, JsonValue]:
        assert self._task is not None
        image = image_from_proto(seen.image)
        return {
            "observation": {
                "screenshot": base64.b64encode(image.data).decode() if image.data else None,
                "media_type": image.media_type,
                "width": image.width,
                "height": image.height,
                "instruction": seen.instruction,
                "accessibility_tree": seen.accessibility_tree,
                "last_action_error": seen.last_action_error,
                "task": self._task.name,
                "seed": self._task.seed,
                "evidence": json.loads(seen.evidence_json) if seen.evidence_json else None,
            },
            "reward": seen.reward if seen.done else None,
            "done": seen.done,
        }

    def _state(self) -> dict[str, JsonValue]:
        task = self._task
        return {
            "episode_id": self._episode or None,
            "step_count": self._steps,
            "task": task.name if task else None,
            "seed": task.seed if task else None,
            "running": self._running,
        }

    def _assignment(self) -> pb.Assignment:
        return pb.Assignment(assignment_id=self._name, attempt=self._attempt)


def _error(code: str, message: str, **more: JsonValue) -> dict[str, JsonValue]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


# ---- the server ----


class WorldServer:
    """Sessions of one world, and what OpenEnv's servers say about themselves."""

    def __init__(self, role: Host, environment: Environment, token: str | None = None) -> None:
        self._role, self._environment, self._token = role, environment, token
        self._sessions = 0
        self._begun = 0
        self._slots = pb.Slots()

    def heard(self, slots: pb.Slots) -> None:
        """What the role reports about its environments."""
        self._slots = slots

    def app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route, WebSocketRoute

        routes = (("/health", self._health), ("/metadata", self._metadata), ("/schema", self._schema))
        return Starlette(
            routes=[WebSocketRoute("/ws", self._session), *(Route(path, answer) for path, answer in routes)]
        )

    async def _session(self, client: WebSocket) -> None:
        from starlette.websockets import WebSocketDisconnect

        # A page in somebody's browser may open a WebSocket to this machine; only browsers name an origin.
        if "origin" in client.headers or not self._may_enter(client.headers.get("authorization", "")):
            await client.close(FORBIDDEN)
            return
        await client.accept()
        most = self._environment.slots
        if self._sessions >= most:
            full = f"all {most} sessions are in use: wait, or serve with --set environment.slots={most + 1}"
            counts: dict[str, JsonValue] = {"active_sessions": self._sessions, "max_sessions": most}
            await client.send_json(_error("CAPACITY_REACHED", full, **counts))
            # Closed at once, a client that sends first would find a closed socket, and not the reason.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFUSED_SECONDS):
                    await client.receive()
            await client.close()
            return
        self._sessions += 1
        self._begun += 1
        session = Session(self._role, self._environment, f"session-{self._begun}")
        try:
            while True:
                message = await client.receive()
                if message["type"] == "websocket.disconnect":
                    return
                text = message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace")
                if (answer := await session.answer(text)) is None:
                    break
                await client.send_json(answer)
            await client.close()
        except WebSocketDisconnect:
            return
        finally:
            await session.end()
            self._sessions -= 1

    def _may_enter(self, authorization: str) -> bool:
        given = authorization.removeprefix("Bearer ").encode()
        return self._token is None or secrets.compare_digest(given, self._token.encode())

    async def _health(self, request: Request) -> JSONResponse:
        from starlette.responses import JSONResponse

        booted = self._slots.count
        said: dict[str, JsonValue] = {
            "status": "healthy" if booted else "degraded",
            "sessions": self._sessions,
            "most_sessions": self._environment.slots,
            "environments": booted,
        }
        return JSONResponse(said | ({"reason": self._slots.reason} if self._slots.reason else {}))

    async def _metadata(self, request: Request) -> JSONResponse:
        from starlette.responses import JSONResponse

        names = ", ".join(self._environment.tasks.all)
        return JSONResponse(
            {
                "name": self._environment.kind,
                "description": f"The world {self._environment.kind} of dart. Tasks: {names}",
                "version": __version__,
            }
        )

    async def _schema(self, request: Request) -> JSONResponse:
        """Of an action only its kinds: their fields are in dart/core/action.py."""
        from starlette.responses import JSONResponse

        action = {"type": "object", "required": ["kind"], "properties": {"kind": {"enum": list(KINDS)}}}
        fields = (
            "screenshot", "media_type", "width", "height", "instruction", "accessibility_tree", "last_action_error",
            "task", "seed", "evidence",
        )  # fmt: skip
        seen = {"type": "object", "properties": {name: {} for name in fields}}
        state = {"type": "object", "properties": {name: {} for name in ("episode_id", "step_count", "task", "seed")}}
        return JSONResponse({"action": action, "observation": seen, "state": state})
