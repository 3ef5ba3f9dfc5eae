"""A Chromium process and its DevTools connection through a pipe (file descriptors 3 and 4 of the child).

Messages are JSON, each ended by a NUL byte. The process leads a process group of its own, keeps its profile in a
temporary folder, and ends by itself when the pipe closes, so nothing is left even when this process is killed.
A `Connection` is used once: when Chromium dies it stays lost, and `Browser` (browser.py) starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dart.errors import USER_ERROR, UserError
from dart.shortage import of_program, tight
from dart.worlds.contract import EnvironmentFailure
from dart.worlds.locks import abandoned, owned_folder

EXECUTABLES = ("chromium-headless-shell", "chromium", "google-chrome")
REMEDY = "apt-get install chromium-headless-shell"
PROFILE_PREFIX = "dart-chromium-"

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-back-forward-cache",  # otherwise every episode's page is kept, in a renderer of its own
    "--disable-site-isolation-trials",
    # RenderDocument (a new frame for each page load) costs 10 ms, ScriptStreaming (scripts parsed on other threads)
    # 8 ms; each load is a new document without them, too.
    "--disable-features=RenderDocument,ScriptStreaming,PaintHolding,SpareRendererForSitePerProcess,IsolateOrigins,"
    "Translate,OptimizationHints,MediaRouter",
    "--enable-features=NetworkServiceInProcess2",
    "--disable-smooth-scrolling",
    "--disable-renderer-backgrounding",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-extensions",
    "--disable-default-apps",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--font-render-hinting=none",
    "--disable-lcd-text",  # with it, text looks different while something moves
    "--password-store=basic",
    "--remote-debugging-pipe",
)

SURROUNDINGS = {"TZ": "UTC", "LANGUAGE": "en_US:en", "LC_ALL": "C.UTF-8"}
"""In the place of the machine's own: pages show the same dates and words wherever a worker runs."""
LANGUAGE = ("--lang=en-US", "--accept-lang=en-US,en")

Message = dict[str, Any]
"""The object in a DevTools message: parameters, a result or an event. Their shapes are Chromium's."""
LAUNCH_SECONDS = 30.0
NO_PROXY = "http://127.0.0.1:1"  # nothing listens on port 1
# A new tab does nothing until its session has been set up.
_EVERY_TAB = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True, "filter": [{"type": "page"}]}


class PageCrashed(EnvironmentFailure):
    """The page's process died, or the page was closed, or Chromium itself is gone."""


class PageTimeout(EnvironmentFailure):
    """The page did not answer in time."""


class ProtocolError(EnvironmentFailure):
    """Chromium refused a command."""


def find_executable(executable: str | None) -> str:
    """Chromium's path: `executable` if given, else the first known name on the PATH. UserError if there is none."""
    if executable is not None:
        found = shutil.which(executable)
        if found is None:
            raise UserError(
                f"environment.options.browser is {executable!r}, which is not an executable: name Chromium's, or "
                f"leave it out and run `{REMEDY}`"
            )
        return found
    for name in EXECUTABLES:
        found = shutil.which(name)
        if found is not None:
            return found
    raise UserError(f"no Chromium on the PATH (looked for {', '.join(EXECUTABLES)}): run `{REMEDY}`")


@dataclass(eq=False, slots=True)
class Tab:
    """What is known of one tab: the page's own, or one that it has opened since."""

    session: str
    target: str
    world: str = ""
    """The driver's own JavaScript world in the tab's document."""
    drag: Message | None = None
    """What is being dragged, from dragstart to drop."""
    drags: str = ""
    """Whether a drag is about to begin: perhaps, yes, or empty for no (dart/assets/web/input.js)."""
    shot: asyncio.Future[Message] | None = None
    """The last screenshot asked for; it comes when the tab draws."""
    offer: asyncio.Future[Message] | None = None
    """The script by which its documents know what they paste."""


def network(only: str | None) -> dict[str, object]:
    """What a context must be made with to reach `only` that server: everything else goes to a proxy that is not there.

    Without <-loopback> every server on this machine would be reached without the proxy.
    """
    return {} if only is None else {"proxyServer": NO_PROXY, "proxyBypassList": f"<-loopback>;{only}"}


class Connection(asyncio.Protocol):
    """One running Chromium. Calls are pipelined: `send` returns a future, replies come in any order.

    Events go to the callback of their session (see `listen`), a new tab's to that of its browser context. When the pipe
    ends, every pending call and all later ones fail with PageCrashed, and `lost` is set.
    """

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.version = ""
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[str | None, asyncio.Future[Message]]] = {}
        self._listeners: dict[str, Callable[[Message], None]] = {}
        self._buffer = bytearray()
        self._writer: asyncio.WriteTransport | None = None
        self._reader: asyncio.ReadTransport | None = None
        self._pid = 0
        self._profile: Profile | None = None

    @classmethod
    async def launch(cls, executable: str) -> Connection:
        """Start Chromium and wait until it answers. Raises UserError with what it printed if it does not."""
        self = cls()
        self._profile = await asyncio.to_thread(Profile)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)  # whatever ends the launch, a cancellation too, leaves no Chromium
            try:
                await self._spawn(executable, self._profile.folder)
                async with asyncio.timeout(LAUNCH_SECONDS):
                    self.version = str((await self.send("Browser.getVersion", {}))["product"])
                    await self.send("Target.setAutoAttach", _EVERY_TAB)
            except (OSError, EnvironmentFailure, TimeoutError) as error:
                log = self._profile.folder / "stderr"
                said = await asyncio.to_thread(lambda: log.read_text(errors="replace")[-500:] if log.exists() else "")
                short = of_program(error, said)
                raise UserError(
                    f"Chromium {executable} did not start ({error or 'no answer'}): "
                    f"{said.strip() or 'it printed nothing'}; {short or tight() or f'try it by hand, or `{REMEDY}`'}",
                    exit_code=1 if short else USER_ERROR,  # what is short now need not be when it is started again
                ) from error
            undo.pop_all()
        return self

    @property
    def pid(self) -> int:
        return self._pid

    async def _spawn(self, executable: str, profile: Path) -> None:
        """Uses posix_spawn instead of fork, because this process may have gRPC threads."""
        child_reads, we_write = _pipe()
        we_read, child_writes = _pipe()
        try:
            self._pid = os.posix_spawn(  # noqa: ASYNC221
                executable,
                [executable, *FLAGS, *LANGUAGE, f"--user-data-dir={profile}"],
                {**os.environ, **SURROUNDINGS, "HOME": str(profile)},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, str(profile / "stderr"), os.O_WRONLY | os.O_CREAT, 0o600),
                    (os.POSIX_SPAWN_DUP2, child_reads, 3),
                    (os.POSIX_SPAWN_DUP2, child_writes, 4),
                ],
                setpgroup=0,
            )
        finally:
            os.close(child_reads)
            os.close(child_writes)
        loop = asyncio.get_running_loop()
        self._reader, _ = await loop.connect_read_pipe(lambda: self, os.fdopen(we_read, "rb", buffering=0))
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(we_write, "wb", buffering=0))

    # ---- calls ----

    def send(self, method: str, params: Mapping[str, object], session: str | None = None) -> asyncio.Future[Message]:
        """Send one command now; the future holds its result. Commands are carried out in the order sent."""
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self.lost.is_set() or self._writer is None:
            _set_failure(future, PageCrashed("Chromium is gone"))
            return future
        number = next(self._ids)
        message: Message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._pending[number] = (session, future)
        future.add_done_callback(lambda _: self._pending.pop(number, None))
        self._writer.write(json.dumps(message).encode() + b"\0")
        return future

    def listen(self, session: str, callback: Callable[[Message], None]) -> None:
        """Send the events of the session, or of the tabs that a browser context opens, to `callback`."""
        self._listeners[session] = callback

    def forget(self, session: str, error: EnvironmentFailure) -> None:
        """End the session (or context): its pending calls fail with `error`, and its events are dropped."""
        self._listeners.pop(session, None)
        self._fail(error, session)

    def _fail(self, error: EnvironmentFailure, session: str | None) -> None:
        for owner, future in list(self._pending.values()):
            if (session is None or owner == session) and not future.done():
                _set_failure(future, error)

    # ---- asyncio.Protocol ----

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if b"\0" not in data:
            return
        *messages, rest = self._buffer.split(b"\0")
        self._buffer = rest
        for message in messages:
            self._dispatch(json.loads(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._fail(PageCrashed("Chromium died"), None)
        for callback in list(self._listeners.values()):
            callback({"method": "Inspector.targetCrashed"})

    def _dispatch(self, message: Message) -> None:
        number = message.get("id")
        if number is None:
            owner = message.get("sessionId", "")
            match message["method"]:
                case "Target.detachedFromTarget":
                    owner = message["params"]["sessionId"]
                case "Target.attachedToTarget":
                    owner = message["params"]["targetInfo"]["browserContextId"]
            callback = self._listeners.get(owner)
            if callback is not None:
                callback(message)
            return
        entry = self._pending.get(number)
        if entry is None or entry[1].done():
            return
        if "error" in message:
            _set_failure(entry[1], ProtocolError(message["error"].get("message", "unknown error")))
        else:
            entry[1].set_result(message["result"])

    # ---- end ----

    async def close(self) -> None:
        """Kill the process and its group and remove the profile. May be called again."""
        for transport in (self._writer, self._reader):
            if transport is not None and not transport.is_closing():
                transport.close()
        self.lost.set()
        self._fail(PageCrashed("Chromium was closed"), None)
        pid, self._pid = self._pid, 0
        profile, self._profile = self._profile, None
        await asyncio.shield(asyncio.to_thread(_reap, pid, profile))


def _set_failure(future: asyncio.Future[Message], error: EnvironmentFailure) -> None:
    future.set_exception(error)
    future.exception()  # asyncio must not warn about a pipelined call that nobody awaits any more


def _pipe() -> tuple[int, int]:
    """A pipe whose file descriptors are not inherited and lie above the numbers that the child uses."""
    ends = os.pipe()
    try:
        reading = fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, 10)
        return reading, fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        for end in ends:
            os.close(end)


class Profile:
    """A folder for one Chromium, locked while its worker lives; the next worker removes folders left unlocked."""

    def __init__(self) -> None:
        for old in abandoned(PROFILE_PREFIX):
            shutil.rmtree(old, ignore_errors=True)
        self.folder, self._lock = owned_folder(PROFILE_PREFIX)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _reap(pid: int, profile: Profile | None) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if profile is not None:
        profile.remove()
