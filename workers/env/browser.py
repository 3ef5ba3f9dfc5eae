"""One headless Chromium for many environments: a `Page` is one tab in a browser context of its own.

Always true: every call on a page ends within its timeout, with a result or an EnvironmentFailure; after a failure
the page is `broken` and must be closed and replaced. When Chromium itself dies or hangs, all its pages are broken, and
the next `new_page` starts another Chromium; that it hangs is found out when it makes no page.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dart import assets
from dart.errors import UserError
from dart.workers.env.devtools import (
    Connection,
    Message,
    PageCrashed,
    PageTimeout,
    ProtocolError,
    find_executable,
)
from dart.worlds.contract import EnvironmentFailure

__all__ = ["Browser", "EnvironmentFailure", "Page", "PageCrashed", "PageTimeout", "ProtocolError"]

log = logging.getLogger(__name__)
T = TypeVar("T")
Call = tuple[str, Mapping[str, object]]

_SENT_WITH_FRAMES = ("mouseMoved", "mouseWheel")  # the page gets these when a frame begins, all others at once
# Taking an element out of the layout for a moment closes its popup and changes nothing else.
_CLOSE_POPUPS = """for (const element of document.querySelectorAll(':is(select, input):open')) {
  const display = element.style.display;
  element.style.display = 'none';
  element.offsetHeight;
  element.style.display = display;
}"""
_CLIPBOARD = Path(assets.__file__).parent / "web" / "clipboard.js"
_CLIPBOARD_WORLD, _COPIED = "dart-clipboard", "dartCopied"
NOTHING_COPIED = "{}"
FRAME_SECONDS = 0.05  # between two frames while time passes
FRAME_LIMIT_SECONDS = 5.0  # while one page draws, all others wait
INPUT_FRAME_SECONDS = 0.005  # between two frames until the page has handled an input: a scroll takes two or three
NO_PROXY = "http://127.0.0.1:1"  # nothing listens on port 1
SIGN_OF_LIFE_SECONDS = 10.0  # Chromium says its version in milliseconds, whatever its pages do
SCREENSHOT_TRIES = 5  # just after a page has loaded, a frame may come without a picture


class Browser:
    """Chromium, restarted when it has died. Make one with `Browser.launch`."""

    def __init__(self, executable: str, connection: Connection) -> None:
        self._executable = executable
        self._connection = connection
        self._starting = asyncio.Lock()

    @classmethod
    @contextlib.asynccontextmanager
    async def launch(cls, executable: str | None = None) -> AsyncIterator[Browser]:
        """Start Chromium; all its processes are gone when the context ends. Raises UserError if it cannot start."""
        path = await asyncio.to_thread(find_executable, executable)
        browser = cls(path, await Connection.launch(path))
        try:
            yield browser
        finally:
            await browser._connection.close()

    @property
    def pid(self) -> int:
        """Chromium's process id."""
        return self._connection.pid

    @property
    def version(self) -> str:
        """For example "HeadlessChrome/156.0.8078.79"."""
        return self._connection.version

    async def new_page(self, viewport: tuple[int, int], timeout: float, only: str | None = None) -> Page:
        """An empty page in a context of its own, in a new Chromium if the old one has died.

        `only`: the one server that its pages may reach, as in "127.0.0.1:8000", or "" for none at all.
        """
        async with self._starting:
            if self._connection.lost.is_set():
                await self._connection.close()
                try:
                    self._connection = await Connection.launch(self._executable)
                except UserError as error:  # it started before, so the cause may be temporary
                    raise PageCrashed(str(error)) from error
        connection = self._connection
        try:
            return await Page.open(connection, viewport, timeout, only)
        except PageTimeout:
            await _close_if_hung(connection)
            raise


async def _close_if_hung(connection: Connection) -> None:
    """Close Chromium if it does not answer at all. Its other pages hang as well then."""
    try:
        async with asyncio.timeout(SIGN_OF_LIFE_SECONDS):
            await connection.send("Browser.getVersion", {})
    except (TimeoutError, EnvironmentFailure):
        log.warning("Chromium does not answer any more and is started again")
        await connection.close()


class Page:
    """One tab. Every call ends within `timeout` seconds."""

    def __init__(self, connection: Connection, context: str, session: str, timeout: float) -> None:
        self.timeout = timeout
        self.failure: EnvironmentFailure | None = None
        self._connection = connection
        self._context = context
        self._session = session
        self._loaded: asyncio.Future[None] | None = None
        self._copied = NOTHING_COPIED
        """What is on the page's own clipboard, in the form that clipboard.js gives it."""
        self._offered, self._offer = "", ""
        """What its documents paste, and the script by which they know it."""
        connection.listen(session, self._on_event)

    @classmethod
    async def open(
        cls, connection: Connection, viewport: tuple[int, int], timeout: float, only: str | None = None
    ) -> Page:
        width, height = viewport
        context: str | None = None
        try:
            async with asyncio.timeout(timeout):
                context = (await connection.send("Target.createBrowserContext", _network(only)))["browserContextId"]
                parameters = {"url": "about:blank", "browserContextId": context, "width": width, "height": height}
                if connection.frames_on_demand:
                    parameters["enableBeginFrameControl"] = True
                target = (await connection.send("Target.createTarget", parameters))["targetId"]
                attached = await connection.send("Target.attachToTarget", {"targetId": target, "flatten": True})
                page = cls(connection, context, attached["sessionId"], timeout)
                metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await page.calls(
                    [
                        ("Inspector.enable", {}),
                        ("Page.enable", {}),
                        ("Emulation.setDeviceMetricsOverride", metrics),
                        ("Emulation.setFocusEmulationEnabled", {"enabled": True}),
                        ("Runtime.enable", {}),  # without it the binding is not made
                        ("Runtime.addBinding", {"name": _COPIED, "executionContextName": _CLIPBOARD_WORLD}),
                    ]
                )
                await page._offer_copied()
        except (TimeoutError, EnvironmentFailure) as error:
            if context is not None:
                connection.send("Target.disposeBrowserContext", {"browserContextId": context})
            if isinstance(error, EnvironmentFailure):
                raise
            raise PageTimeout(f"Chromium made no page within {timeout:g} s") from None
        return page

    @property
    def broken(self) -> bool:
        return self.failure is not None

    async def call(self, method: str, **parameters: object) -> Message:
        """One DevTools command."""
        return await self._bounded(self._send(method, parameters), method)

    async def calls(self, calls: Sequence[Call]) -> list[Message]:
        """Several commands, sent at once and carried out in order."""
        futures = [self._send(method, parameters) for method, parameters in calls]
        return await self._bounded(asyncio.gather(*futures), calls[-1][0])

    async def evaluate(self, expression: str, wait: bool = False) -> Any:
        """The JSON value of a JavaScript expression; `wait`: of the promise it returns. ProtocolError if it throws."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=wait)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise ProtocolError(details.get("exception", {}).get("description") or details.get("text", "it threw"))
        return result["result"].get("value")

    async def navigate(self, url: str) -> None:
        """Load `url` and wait for its load event."""
        await self._offer_copied()
        self._loaded = asyncio.get_running_loop().create_future()
        loaded = self._loaded
        result = await self.call("Page.navigate", url=url)
        if "errorText" in result:
            raise ProtocolError(f"{url} did not load: {result['errorText']}")
        await self._bounded(loaded, f"loading {url}")

    async def input(self, calls: Sequence[Call]) -> None:
        """Input commands, carried out in order; the page has handled them when this returns."""
        await self._offer_copied()
        if not self._connection.frames_on_demand:
            await self.calls(calls)
            return
        for batch in _batches(calls):
            futures = [self._send(method, parameters) for method, parameters in batch]
            last = batch[-1][1].get("type")
            if last in _SENT_WITH_FRAMES:
                await self._bounded(self._frames_until_done(futures, last == "mouseWheel"), batch[-1][0])
            await self._bounded(asyncio.gather(*futures), batch[-1][0])
        await self._close_popups()

    async def clear_clipboard(self) -> None:
        """Forget what was copied on this page. Every page has a clipboard of its own (dart/assets/web/clipboard.js)."""
        self._copied = NOTHING_COPIED
        await self._offer_copied()

    async def collect_garbage(self) -> None:
        """Free what the page's earlier documents have left. By itself Chromium's heap grows for hours first."""
        await self.call("HeapProfiler.collectGarbage")

    async def _offer_copied(self) -> None:
        """Let all documents of the page, and those that it loads later, paste what was copied last."""
        if self._copied == self._offered:
            return
        offered, old = self._copied, self._offer
        script = {"source": f"{_clipboard()}({offered})", "worldName": _CLIPBOARD_WORLD, "runImmediately": True}
        self._offer = (await self.call("Page.addScriptToEvaluateOnNewDocument", **script))["identifier"]
        self._offered = offered
        if old:
            await self.call("Page.removeScriptToEvaluateOnNewDocument", identifier=old)

    async def _frames_until_done(self, futures: Sequence[asyncio.Future[Message]], scrolls: bool) -> None:
        await self._close_popups()
        pending: set[asyncio.Future[Message]] = set(futures)
        while pending:
            await self._frame()
            _, pending = await asyncio.wait(pending, timeout=INPUT_FRAME_SECONDS)
        if scrolls:  # one more frame: the page learns of a scroll only after it has been drawn
            await self._frame()

    async def _close_popups(self) -> None:
        """Close the list of a select and the picker of a date: both are separate windows, which no screenshot shows.

        While one is open, no frame on demand ever ends. The keyboard operates both controls without them.
        """
        await self.evaluate(_CLOSE_POPUPS)

    async def pass_time(self, seconds: float) -> None:
        """Let the page run for a while, drawing frames for its animations."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, FRAME_SECONDS))
            if self._connection.frames_on_demand:
                await self.evaluate("0")
                await self._frame(noDisplayUpdates=True)

    async def screenshot(self) -> bytes:
        """The viewport as PNG, drawn now."""
        options = {"format": "png", "optimizeForSpeed": True}
        if not self._connection.frames_on_demand:
            return base64.b64decode((await self.call("Page.captureScreenshot", **options))["data"])
        for _ in range(SCREENSHOT_TRIES):
            result = await self._frame(screenshot=options)
            if "screenshotData" in result:
                return base64.b64decode(result["screenshotData"])
        self.failure = PageCrashed(f"no screenshot in {SCREENSHOT_TRIES} frames")
        raise self.failure

    async def close(self) -> None:
        """Close the page and its context; never fails, and does not wait for the page."""
        self.failure = self.failure or PageCrashed("the page was closed")
        with contextlib.suppress(EnvironmentFailure, TimeoutError):
            async with asyncio.timeout(self.timeout):
                await self._dispose()
        self._connection.forget(self._session, self.failure)

    def _dispose(self) -> asyncio.Future[Message]:
        return self._connection.send("Target.disposeBrowserContext", {"browserContextId": self._context})

    async def _frame(self, **parameters: object) -> Message:
        """Draw one frame. Call it only when the page has just answered, because all other pages wait meanwhile.

        The lock is released when the frame has ended, even if the caller is cancelled before.
        """
        await self._connection.drawing.acquire()
        try:
            frame = self._send("HeadlessExperimental.beginFrame", parameters)
        except EnvironmentFailure:
            self._connection.drawing.release()
            raise
        limit = min(self.timeout, FRAME_LIMIT_SECONDS)
        timer = asyncio.get_running_loop().call_later(limit, self._frame_is_late, limit)

        def ended(_: object) -> None:
            timer.cancel()
            self._connection.drawing.release()

        frame.add_done_callback(ended)
        return await asyncio.shield(frame)

    def _frame_is_late(self, limit: float) -> None:
        """Dispose of the hung page: no other page can draw until it is gone."""
        failure = self.failure = self.failure or PageTimeout(f"no frame within {limit:g} s")
        self._dispose().add_done_callback(lambda _: self._connection.forget(self._session, failure))

    def _send(self, method: str, parameters: Mapping[str, object]) -> asyncio.Future[Message]:
        if self.failure is not None:
            raise self.failure
        return self._connection.send(method, parameters, self._session)

    async def _bounded(self, awaitable: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self.timeout):
                return await awaitable
        except TimeoutError:
            self.failure = PageTimeout(f"{what}: no answer within {self.timeout:g} s")
            raise self.failure from None

    def _on_event(self, event: Message) -> None:
        match event["method"]:
            case "Page.loadEventFired":
                if self._loaded is not None and not self._loaded.done():
                    self._loaded.set_result(None)
            case "Runtime.bindingCalled":
                if event["params"]["name"] == _COPIED:
                    self._copied = event["params"]["payload"]
            case "Page.javascriptDialogOpening":
                # Nobody can see or answer the dialog, and the page is blocked until it is answered.
                self._connection.send("Page.handleJavaScriptDialog", {"accept": True}, self._session)
            case "Inspector.targetCrashed" | "Target.detachedFromTarget":
                self.failure = self.failure or PageCrashed("the page's process died")
                self._connection.forget(self._session, self.failure)
                if self._loaded is not None and not self._loaded.done():
                    self._loaded.set_exception(self.failure)
                    self._loaded.exception()


def _network(only: str | None) -> dict[str, object]:
    """What a context must be made with to reach `only` that server: everything else goes to a proxy that is not there.

    Without <-loopback> every server on this machine would be reached without the proxy.
    """
    return {} if only is None else {"proxyServer": NO_PROXY, "proxyBypassList": f"<-loopback>;{only}"}


@functools.cache
def _clipboard() -> str:
    return _CLIPBOARD.read_text(encoding="utf-8").strip()


def _batches(calls: Sequence[Call]) -> list[list[Call]]:
    """Cut after every call that must reach the page alone: consecutive movements would be merged into one."""
    batches: list[list[Call]] = [[]]
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        batches[-1].append(call)
        if following is None:
            break
        if call[1].get("type") == "mouseWheel" or call[1].get("type") == following[1].get("type") == "mouseMoved":
            batches.append([])
    return batches
