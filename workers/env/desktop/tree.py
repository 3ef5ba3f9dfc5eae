"""The accessibility tree of a desktop's applications (AT-SPI over D-Bus): what is where, and what it says.

Only the oracle and the graders read it; a policy sees pixels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from jeepney import DBusAddress, MessageType, new_method_call
from jeepney.io.blocking import DBusConnection, open_dbus_connection
from jeepney.wrappers import DBusErrorResponse, unwrap_msg

PATH, INTERFACE = "/org/a11y/atspi/accessible", "org.a11y.atspi"
SHOWING = 25
SCREEN_COORDINATES = 0
SECONDS = 5.0
TICK_SECONDS = 0.05
MOST_NODES = 3000
TEXTUAL = frozenset({"text", "entry", "password text", "terminal", "paragraph", "label", "static"})
"""Roles of widgets that are asked for their text; others complain about it in their logs."""
Reference = tuple[str, str]
"""Bus name and path of an accessible object."""


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    role: str
    text: str
    left: int
    top: int
    width: int
    height: int


class Tree:
    """A connection to the accessibility bus. Raises OSError if there is none."""

    def __init__(self, session_bus: str) -> None:
        with open_dbus_connection(session_bus) as session:
            where = DBusAddress("/org/a11y/bus", bus_name="org.a11y.Bus", interface="org.a11y.Bus")
            reply = session.send_and_get_reply(new_method_call(where, "GetAddress"), timeout=SECONDS)
            (address,) = unwrap_msg(reply)
        self._bus: DBusConnection = open_dbus_connection(str(address))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bus.close()

    def nodes(self) -> Iterator[Node]:
        """What is showing, parents first. Applications that do not answer are left out."""
        open_ends: list[tuple[Reference, int]] = [(("org.a11y.atspi.Registry", f"{PATH}/root"), 0)]
        for _ in range(MOST_NODES):
            if not open_ends:
                return
            at, depth = open_ends.pop()
            if depth > 1:  # the registry and the applications themselves are not widgets
                if not self._shows(at):
                    continue
                yield self._node(at)
            children = self._ask(at, "Accessible", "GetChildren")
            found = children[0] if children else []
            assert isinstance(found, list)
            open_ends += [((str(child[0]), str(child[1])), depth + 1) for child in reversed(found)]

    def find(self, name: str, role: str | None = None) -> Node | None:
        """The first widget of this name (or text) that shows, and of this role if one is given."""
        for node in self.nodes():
            if name in (node.name, node.text) and role in (None, node.role) and node.width > 0 and node.height > 0:
                return node
        return None

    def await_node(self, name: str, role: str | None, seconds: float) -> Node | None:
        """As `find`, once there is such a widget; None if none appears within `seconds`."""
        began = time.monotonic()
        while (found := self.find(name, role)) is None and time.monotonic() - began < seconds:
            time.sleep(TICK_SECONDS)
        return found

    def _node(self, at: Reference) -> Node:
        name = self._ask(at, "Properties", "Get", "ss", (f"{INTERFACE}.Accessible", "Name"))
        role = self._ask(at, "Accessible", "GetRoleName")
        textual = role is not None and role[0] in TEXTUAL
        text = self._ask(at, "Text", "GetText", "ii", (0, -1)) if textual else None
        box = self._ask(at, "Component", "GetExtents", "u", (SCREEN_COORDINATES,))
        edges = box[0] if box else (0, 0, 0, 0)
        assert isinstance(edges, tuple)
        left, top, width, height = (int(edge) for edge in edges)
        named = name[0] if name else ("s", "")
        assert isinstance(named, tuple)
        said = str(text[0]) if text else ""
        return Node(str(named[1]), str(role[0]) if role else "", said, left, top, width, height)

    def _shows(self, at: Reference) -> bool:
        answer = self._ask(at, "Accessible", "GetState")
        words = answer[0] if answer else []
        assert isinstance(words, list)
        return bool(words and words[0] >> SHOWING & 1)

    def _ask(
        self, at: Reference, interface: str, method: str, signature: str = "", body: tuple[object, ...] = ()
    ) -> tuple[object, ...] | None:
        """The reply's body; None if the object has gone, or has no such interface."""
        whole = "org.freedesktop.DBus.Properties" if interface == "Properties" else f"{INTERFACE}.{interface}"
        call = new_method_call(DBusAddress(at[1], bus_name=at[0], interface=whole), method, signature or None, body)
        try:
            reply = self._bus.send_and_get_reply(call, timeout=SECONDS)
        except TimeoutError:
            return None
        if reply.header.message_type is MessageType.error:
            return None
        try:
            found: tuple[object, ...] = unwrap_msg(reply)
        except DBusErrorResponse:
            return None
        return found
