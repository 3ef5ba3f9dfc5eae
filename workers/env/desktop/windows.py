"""What a desktop's window manager and X server tell: its windows, which one is active, and the clipboard."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass

from Xlib import X, Xatom, display, error
from Xlib.protocol import event
from Xlib.xobject.drawable import Window as XWindow

CLIPBOARD_SECONDS = 2.0
_ADD, _PAGER = 1, 2
"""Numbers of the EWMH standard: add a state; the message comes from a pager."""


@dataclass(frozen=True, slots=True)
class Window:
    id: int
    title: str


class Windows:
    """The top-level windows that the window manager manages."""

    def __init__(self, connection: display.Display) -> None:
        self._display, self._root = connection, connection.screen().root

    def managed(self) -> bool:
        """Whether a window manager runs."""
        found = self._numbers(self._root, "_NET_SUPPORTING_WM_CHECK")
        if not found:
            return False
        check = self._display.create_resource_object("window", found[0])
        return bool(self._numbers(check, "_NET_SUPPORTING_WM_CHECK"))

    def all(self) -> list[Window]:
        """Without those that ask to be left out of task bars."""
        return [
            Window(number, self._title(window))
            for number in self._numbers(self._root, "_NET_CLIENT_LIST")
            if (window := self._display.create_resource_object("window", number)) and not self._hidden(window)
        ]

    def active(self) -> Window | None:
        found = self._numbers(self._root, "_NET_ACTIVE_WINDOW")
        if not found or not found[0]:
            return None
        return Window(found[0], self._title(self._display.create_resource_object("window", found[0])))

    def activate(self, window: Window) -> None:
        self._ask(window, "_NET_ACTIVE_WINDOW", _PAGER)

    def maximise(self, window: Window) -> None:
        sides = [self._display.intern_atom(f"_NET_WM_STATE_MAXIMIZED_{side}") for side in ("VERT", "HORZ")]
        self._ask(window, "_NET_WM_STATE", _ADD, *sides, _PAGER)

    def close(self, window: Window) -> None:
        """As a click on the close button; the program may ask whether to save."""
        self._ask(window, "_NET_CLOSE_WINDOW", X.CurrentTime, _PAGER)

    def _ask(self, window: Window, message: str, *data: int) -> None:
        words = [*data, *[0] * (5 - len(data))]
        kind = self._display.intern_atom(message)
        told = event.ClientMessage(window=window.id, client_type=kind, data=(32, words))
        self._root.send_event(told, event_mask=X.SubstructureRedirectMask | X.SubstructureNotifyMask)
        self._display.sync()

    def clipboard(self) -> str:
        """The text in the clipboard; empty if there is none, or its owner does not answer."""
        atom = self._display.intern_atom
        window = self._root.create_window(0, 0, 1, 1, 0, X.CopyFromParent)
        try:
            window.convert_selection(atom("CLIPBOARD"), atom("UTF8_STRING"), atom("DART_CLIPBOARD"), X.CurrentTime)
            self._display.flush()
            began = time.monotonic()
            while (left := CLIPBOARD_SECONDS - (time.monotonic() - began)) > 0:
                while self._display.pending_events():
                    told = self._display.next_event()
                    if told.type == X.SelectionNotify and told.requestor.id == window.id:
                        found = window.get_full_property(atom("DART_CLIPBOARD"), X.AnyPropertyType)
                        return bytes(found.value).decode("utf-8", "replace") if found and told.property else ""
                select.select([self._display.fileno()], [], [], min(left, 0.05))
            return ""
        finally:
            window.destroy()
            self._display.flush()

    def _hidden(self, window: XWindow) -> bool:
        return self._display.intern_atom("_NET_WM_STATE_SKIP_TASKBAR") in self._numbers(window, "_NET_WM_STATE")

    def _numbers(self, window: XWindow, name: str) -> list[int]:
        try:
            found = window.get_full_property(self._display.intern_atom(name), X.AnyPropertyType)
        except error.BadWindow:
            return []
        return list(found.value) if found is not None and found.format == 32 else []

    def _title(self, window: XWindow) -> str:
        for name in (self._display.intern_atom("_NET_WM_NAME"), Xatom.WM_NAME):
            try:
                found = window.get_full_property(name, X.AnyPropertyType)
            except error.BadWindow:
                return ""
            if found is not None:
                return found.value.decode("utf-8", "replace") if isinstance(found.value, bytes) else str(found.value)
        return ""
