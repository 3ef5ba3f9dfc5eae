"""One headless Chromium for many environments: a `Page` is one tab in a browser context of its own.

Always true: every call on a page ends within its timeout, with a result or an EnvironmentFailure; after a failure
the page is `broken` and must be closed and replaced. When Chromium itself dies or hangs, all its pages are broken, and
the next `new_page` starts another Chromium; that it hangs is found out when it makes no page.

Pages draw whenever they want to, as on a screen of 60 Hz, and nothing that one of them does is waited for by another.
The driver's own scripts run in a JavaScript world of their own, where a page's functions are not.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
    Tab,
    find_executable,
    network,
)
from dart.workers.env.inputs import Call, during_drag, is_key
from dart.workers.env.keyboard import CONTROL
from dart.worlds.contract import EnvironmentFailure

__all__ = ["Browser", "EnvironmentFailure", "Page", "PageCrashed", "PageTimeout", "ProtocolError"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_OWN_WORLD, _COPIED, _DRAGS = "dart", "dartCopied", "dartDrags"
_IN_ALL_DOCUMENTS = {"worldName": _OWN_WORLD, "runImmediately": True}
NOTHING_COPIED = "{}"
SIGN_OF_LIFE_SECONDS = 10.0  # Chromium says its version in milliseconds, whatever its pages do
INPUT_SECONDS = 1.0  # for the page to handle one input
REST_SECONDS = 1.0  # for all that an action began, of which a new document may take as long
REQUEST_SECONDS = 0.3  # for each request of an action, and for what a new document loads: some are never answered
LOOK_SECONDS = 1.0  # for a screenshot: a page draws nothing until its style sheets and first scripts are there
MOST_TABS = 8
# What a person waits for after an action; not streams, and nothing that nobody sees.
_AWAITED = frozenset({"Document", "Stylesheet", "Image", "Font", "Script", "XHR", "Fetch"})
_TURN = "new Promise(done => setTimeout(done))"  # what the page has put off until "next" has been done then
_FRAME = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"  # a page learns of a scroll in a frame


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
    """One tab, and those that it opens: the last one is shown and gets the input until it is closed, by itself or by
    Ctrl+W. Where the last of all closes itself, an empty one is opened. Every call ends within a small multiple of
    `timeout` seconds."""

    def __init__(self, connection: Connection, context: str, viewport: tuple[int, int], timeout: float) -> None:
        self.timeout = timeout
        self.failure: EnvironmentFailure | None = None
        self._connection = connection
        self._context = context
        self._viewport = viewport
        self._tabs: list[Tab] = []
        self._loaded: asyncio.Future[None] | None = None
        self._begun: dict[str, float] = {}
        """The loads of frames and the requests that have begun since the last action did, and have not ended; each
        with the time until which it is waited for."""
        self._changed = asyncio.Event()
        self._seen = b""
        self._copied = NOTHING_COPIED
        """What is on the page's own clipboard, in the form that clipboard.js gives it."""
        self._offered = NOTHING_COPIED
        connection.listen(context, self._on_tab)

    @classmethod
    async def open(
        cls, connection: Connection, viewport: tuple[int, int], timeout: float, only: str | None = None
    ) -> Page:
        page: Page | None = None
        try:
            async with asyncio.timeout(timeout):
                context = (await connection.send("Target.createBrowserContext", network(only)))["browserContextId"]
                page = cls(connection, context, viewport, timeout)
                await connection.send("Browser.setDownloadBehavior", {"behavior": "deny", "browserContextId": context})
                await page._open_tab()
                await page._until(lambda: bool(page._tabs))
                await page.call("Runtime.evaluate", expression="0")
        except (TimeoutError, EnvironmentFailure) as error:
            if page is not None:
                page._dispose()
            if isinstance(error, EnvironmentFailure):
                raise
            raise PageTimeout(f"Chromium made no page within {timeout:g} s") from None
        return page

    @property
    def broken(self) -> bool:
        return self.failure is not None

    async def call(self, method: str, **parameters: object) -> Message:
        """One DevTools command."""
        return await self._bounded(self._send(method, parameters, await self._tab(0)), method)

    async def calls(self, calls: Sequence[Call]) -> list[Message]:
        """Several commands, sent at once and carried out in order."""
        tab = await self._tab(0)
        futures = [self._send(method, parameters, tab) for method, parameters in calls]
        return await self._bounded(asyncio.gather(*futures), calls[-1][0])

    async def evaluate(self, expression: str, wait: bool = False, own_world: bool = False) -> Any:
        """The JSON value of a JavaScript expression in the page's own tab; `wait`: of the promise it returns.

        `own_world`: where the document's variables, and what it has made of the browser's functions, are not seen.
        Raises ProtocolError if it throws.
        """
        where = {"uniqueContextId": (await self._tab(0)).world} if own_world else {}
        how = {"returnByValue": True, "awaitPromise": wait, **where}
        result = await self.call("Runtime.evaluate", expression=expression, **how)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise ProtocolError(details.get("exception", {}).get("description") or details.get("text", "it threw"))
        return result["result"].get("value")

    async def navigate(self, url: str) -> None:
        """Load `url` in the page's own tab and wait for its load event; one that does not come is done without."""
        for tab in self._tabs[1:]:
            self._close_tab(tab)
        await self._offer_copied()
        loaded = self._loaded = asyncio.get_running_loop().create_future()
        result = await self.call("Page.navigate", url=url)
        if "errorText" in result:
            raise ProtocolError(f"{url} did not load: {result['errorText']}")
        if await self._came(loaded, self.timeout / 2, await self._tab(0)):
            loaded.result()
        else:
            await self.call("Page.stopLoading")

    # ---- what a person does ----

    async def input(self, calls: Sequence[Call]) -> None:
        """Input commands: the page has handled each before the next, and all when this returns.

        A navigation or a request that they began has ended then, too, or is not waited for any longer.
        """
        await self._offer_copied()
        self._begun.clear()
        for method, parameters in calls:
            tab = await self._tab(-1)
            kind = parameters.get("type")
            if len(self._tabs) > 1 and is_key(parameters, "w") and parameters["modifiers"] == CONTROL:
                self._close_tab(tab)
                continue
            dragged = tab.drag
            await self._handled(tab, *during_drag((method, parameters), dragged))
            if kind == "mouseMoved" and parameters.get("button") == "left" and dragged is None:
                await self._handled(tab, "Runtime.evaluate", {"expression": "0"})  # dragstart comes before this
                if await self._drags(tab):
                    drag = during_drag((method, parameters), tab.drag)[1]
                    await self._handled(tab, "Input.dispatchDragEvent", {**drag, "type": "dragEnter"})
                    await self._handled(tab, "Input.dispatchDragEvent", drag)
            elif kind == "mouseReleased" or is_key(parameters, "Escape"):
                tab.drag = None
        scrolled = any(parameters.get("type") == "mouseWheel" for _, parameters in calls)
        await self._rest(_FRAME if scrolled else _TURN)

    async def _handled(self, tab: Tab, method: str, parameters: Mapping[str, object]) -> None:
        """One command, to a tab that may be closed by it, or be loading and take it later."""
        reply = self._send(method, parameters, tab)
        if await self._came(reply, INPUT_SECONDS, tab) and tab in self._tabs:
            reply.result()

    async def _drags(self, tab: Tab) -> bool:
        """Whether something is dragged now; a drag that has just begun is waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INPUT_SECONDS):
                await self._until(lambda: not tab.drags or tab.drag is not None)
        tab.drags = ""
        return tab.drag is not None

    async def _rest(self, turn: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_SECONDS):
                while True:
                    await self._turn(turn)
                    if self._awaited() <= 0:
                        return
                    while (left := self._awaited()) > 0:
                        self._changed.clear()
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._changed.wait(), left)

    def _awaited(self) -> float:
        """For how many seconds there is something to wait for."""
        return max(self._begun.values(), default=0.0) - time.monotonic()

    async def _turn(self, turn: str) -> None:
        tab = await self._tab(-1)
        await self._until(lambda: bool(tab.world) or tab not in self._tabs)
        parameters = {"expression": turn, "awaitPromise": True, "uniqueContextId": tab.world}
        with contextlib.suppress(ProtocolError):  # the document has gone meanwhile: what it began is known
            await self._send("Runtime.evaluate", parameters, tab)

    async def pass_time(self, seconds: float) -> None:
        """Let the page run for a while."""
        await asyncio.sleep(seconds)

    async def screenshot(self) -> bytes:
        """The viewport as PNG, as it is now; what was seen last, if nothing is drawn within LOOK_SECONDS."""
        end = time.monotonic() + self.timeout
        while True:
            tab = await self._tab(-1)
            if tab.shot is None or tab.shot.done():
                options = {"format": "png", "optimizeForSpeed": True}
                tab.shot = self._send("Page.captureScreenshot", options, tab)
            shot = tab.shot
            if await self._came(shot, LOOK_SECONDS, tab):
                if not shot.exception():
                    self._seen = base64.b64decode(shot.result()["data"])
                    return self._seen
                if tab not in self._tabs:
                    continue
            if self._seen:
                return self._seen
            if time.monotonic() > end:
                self.failure = PageTimeout(f"no screenshot within {self.timeout:g} s")
                raise self.failure
            await self._bounded(self._send("Page.stopLoading", {}, tab), "Page.stopLoading")

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
        self._offered = self._copied
        for tab in list(self._tabs):
            old, tab.offer = tab.offer, self._offer_to(tab)
            if old is not None and await self._came(old, self.timeout, tab) and not old.exception():
                self._send("Page.removeScriptToEvaluateOnNewDocument", old.result(), tab)
            await self._came(tab.offer, self.timeout, tab)

    def _offer_to(self, tab: Tab) -> asyncio.Future[Message]:
        script = {"source": f"{_script('clipboard.js')}({self._offered})", **_IN_ALL_DOCUMENTS}
        return self._send("Page.addScriptToEvaluateOnNewDocument", script, tab)

    async def close(self) -> None:
        """Close the page and its context; never fails, and does not wait for the page."""
        self.failure = self.failure or PageCrashed("the page was closed")
        with contextlib.suppress(EnvironmentFailure, TimeoutError):
            async with asyncio.timeout(self.timeout):
                await self._dispose()
        for owner in (self._context, *(tab.session for tab in self._tabs)):
            self._connection.forget(owner, self.failure)

    def _dispose(self) -> asyncio.Future[Message]:
        return self._connection.send("Target.disposeBrowserContext", {"browserContextId": self._context})

    # ---- waiting ----

    def _send(self, method: str, parameters: Mapping[str, object], tab: Tab) -> asyncio.Future[Message]:
        if self.failure is not None:
            raise self.failure
        return self._connection.send(method, parameters, tab.session)

    async def _tab(self, place: int) -> Tab:
        """The tab at `place`, once there is one."""
        if not self._tabs:
            await self._bounded(self._until(lambda: bool(self._tabs)), "a new tab")
        return self._tabs[place]

    async def _bounded(self, awaitable: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self.timeout):
                return await awaitable
        except TimeoutError:
            self.failure = PageTimeout(f"{what}: no answer within {self.timeout:g} s")
            raise self.failure from None

    async def _came(self, future: asyncio.Future[T], seconds: float, tab: Tab) -> bool:
        """Whether it is done within `seconds`. If not, the tab must answer something, or it is a PageTimeout."""
        await asyncio.wait([future], timeout=min(seconds, self.timeout))
        if not future.done():
            with contextlib.suppress(ProtocolError):
                await self._bounded(self._send("Runtime.evaluate", {"expression": "0"}, tab), "the page")
        if self.failure is not None:
            raise self.failure
        return future.done()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    # ---- what the browser tells ----

    def _open_tab(self) -> asyncio.Future[Message]:
        return self._connection.send("Target.createTarget", {"url": "about:blank", "browserContextId": self._context})

    def _on_tab(self, event: Message) -> None:
        """A new tab: set it up, then let it begin."""
        if "params" not in event:  # all are told that Chromium has died
            self.failure = self.failure or PageCrashed("Chromium died")
            return
        info = event["params"]["targetInfo"]
        tab = Tab(event["params"]["sessionId"], info["targetId"])
        if len(self._tabs) == MOST_TABS or self.failure is not None:
            self._close_tab(tab)
            return
        self._connection.listen(tab.session, functools.partial(self._on_event, tab))
        width, height = self._viewport
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        for domain in ("Inspector", "Page", "Network", "Runtime"):  # without Runtime the binding is not made
            self._send(f"{domain}.enable", {}, tab)
        bindings = [{"name": name, "executionContextName": _OWN_WORLD} for name in (_COPIED, _DRAGS)]
        set_up: list[Call] = [
            ("Emulation.setDeviceMetricsOverride", metrics),
            ("Emulation.setFocusEmulationEnabled", {"enabled": True}),
            ("Input.setInterceptDrags", {"enabled": True}),
            *(("Runtime.addBinding", binding) for binding in bindings),
            ("Page.addScriptToEvaluateOnNewDocument", {"source": _script("input.js"), **_IN_ALL_DOCUMENTS}),
        ]
        for method, parameters in set_up:
            self._send(method, parameters, tab)
        tab.offer = self._offer_to(tab)
        self._send("Runtime.runIfWaitingForDebugger", {}, tab)
        if self._tabs:
            self._begin(tab.target, REST_SECONDS)  # the same as its main frame
        self._tabs.append(tab)
        self._changed.set()

    def _close_tab(self, tab: Tab) -> None:
        self._connection.send("Runtime.runIfWaitingForDebugger", {}, tab.session)
        self._connection.send("Target.closeTarget", {"targetId": tab.target})
        self._gone(tab)

    def _gone(self, tab: Tab, crashed: bool = False) -> None:
        """A tab was closed, or its process has died: if that was the page's own, it is the page's end."""
        own = tab in self._tabs[:1]
        if own and crashed:
            self.failure = self.failure or PageCrashed("the page's process died")
        elif tab in self._tabs:
            self._tabs.remove(tab)
            if not self._tabs and self.failure is None:
                self._open_tab()
        if own and self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)
        self._connection.forget(tab.session, self.failure or ProtocolError("the tab was closed"))
        self._begun.clear()

    def _begin(self, what: str, seconds: float) -> None:
        self._begun[what] = time.monotonic() + seconds

    def _on_event(self, tab: Tab, event: Message) -> None:
        told = event.get("params", {})
        match event["method"]:
            case "Page.loadEventFired":
                if tab in self._tabs[:1] and self._loaded is not None and not self._loaded.done():
                    self._loaded.set_result(None)
            case "Page.frameStartedLoading":
                self._begin(told["frameId"], REST_SECONDS)
            case "Page.frameNavigated":  # the new document is there
                if told["frame"]["id"] in self._begun:
                    self._begin(told["frame"]["id"], REQUEST_SECONDS)
            case "Page.frameStoppedLoading" | "Page.frameDetached":
                self._begun.pop(told["frameId"], None)
            case "Network.requestWillBeSent":
                if (kind := told.get("type")) in _AWAITED:
                    self._begin(told["requestId"], REST_SECONDS if kind == "Document" else REQUEST_SECONDS)
            case "Network.loadingFinished" | "Network.loadingFailed":
                self._begun.pop(told["requestId"], None)
            case _:
                self._on_change(tab, event["method"], told)
        self._changed.set()

    def _on_change(self, tab: Tab, method: str, told: Message) -> None:
        match method:
            case "Runtime.executionContextCreated":
                context = told["context"]
                if context["name"] == _OWN_WORLD and context["auxData"]["frameId"] == tab.target:
                    tab.world = context["uniqueId"]
            case "Runtime.executionContextDestroyed":
                if told.get("executionContextUniqueId") == tab.world:
                    tab.world = ""
            case "Runtime.executionContextsCleared":
                tab.world = ""
            case "Runtime.bindingCalled":
                if told["name"] == _COPIED:
                    self._copied = told["payload"]
                elif told["name"] == _DRAGS:
                    tab.drags = told["payload"]
            case "Input.dragIntercepted":
                tab.drag = told["data"]
            case "Page.javascriptDialogOpening":
                # Nobody can see the dialog, and the page is blocked until it is answered: as by pressing Return.
                answer = {"accept": True, "promptText": told.get("defaultPrompt", "")}
                self._connection.send("Page.handleJavaScriptDialog", answer, tab.session)
            case "Inspector.targetCrashed" | "Target.detachedFromTarget":
                self._gone(tab, method == "Inspector.targetCrashed")


@functools.cache
def _script(name: str) -> str:
    return (Path(assets.__file__).parent / "web" / name).read_text(encoding="utf-8").strip()
