"""Every kind of input, as a real X client sees it."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from desktop_samples import HANG_SECONDS, booted, needs_desktop, until

from dart.core import action as a

if TYPE_CHECKING:
    from dart.workers.env.desktop.session import Session

pytestmark = [pytest.mark.desktop, needs_desktop]
SIZE = (320, 240)
MIDDLE = a.Point(0.5, 0.5)


class Client:
    """A full-screen window, and the events that reach it, as texts."""

    def __init__(self, name: str) -> None:
        from Xlib import X, display

        self.X = X
        self.display = display.Display(name)
        root = self.display.screen().root
        mask = X.KeyPressMask | X.KeyReleaseMask | X.ButtonPressMask | X.ButtonReleaseMask | X.PointerMotionMask
        self.window = root.create_window(
            0, 0, *SIZE, 0, X.CopyFromParent, event_mask=mask | X.FocusChangeMask | X.StructureNotifyMask,
            background_pixel=0xFFFFFF, override_redirect=True,
        )  # fmt: skip
        self.window.map()
        self.window.set_input_focus(X.RevertToParent, X.CurrentTime)
        self.display.sync()
        self.seen: list[str] = []
        self.pressed: list[int] = []
        """When buttons went down and up, in milliseconds of the server's clock."""

    def read(self, last: str) -> list[str]:
        """What has been seen since the last call, up to and including this event."""
        began = time.monotonic()
        while last not in self.seen:
            assert time.monotonic() - began < HANG_SECONDS, f"{last} did not come, but {self.seen}"
            select.select([self.display.fileno()], [], [], 0.05)
            while self.display.pending_events():
                self._take(self.display.next_event())
        seen, self.seen = self.seen, []
        return seen

    def _take(self, event: object) -> None:
        X = self.X
        kind = event.type  # type: ignore[attr-defined]
        if kind == X.MappingNotify:
            self.display.refresh_keyboard_mapping(event)
        elif kind in (X.KeyPress, X.KeyRelease):
            level = 1 if event.state & X.ShiftMask else 0  # type: ignore[attr-defined]
            keysym = self.display.keycode_to_keysym(event.detail, level)  # type: ignore[attr-defined]
            keysym = keysym or self.display.keycode_to_keysym(event.detail, 0)  # type: ignore[attr-defined]
            control = "C-" if event.state & X.ControlMask else ""  # type: ignore[attr-defined]
            self.seen.append(f"{'down' if kind == X.KeyPress else 'up'} {control}{keysym:x}")
        elif kind in (X.ButtonPress, X.ButtonRelease):
            way = "press" if kind == X.ButtonPress else "release"
            control = "C-" if event.state & X.ControlMask else ""  # type: ignore[attr-defined]
            place = f"{event.root_x},{event.root_y}"  # type: ignore[attr-defined]
            self.pressed.append(event.time)  # type: ignore[attr-defined]
            self.seen.append(f"{way} {control}{event.detail} at {place}")  # type: ignore[attr-defined]
        elif kind == X.MotionNotify:
            held = "held " if event.state & X.Button1Mask else ""  # type: ignore[attr-defined]
            self.seen.append(f"{held}move {event.root_x},{event.root_y}")  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def desk() -> Iterator[tuple[Session, Client]]:
    with booted(SIZE) as session:
        client = Client(session.display)
        until(lambda: client.window.get_attributes().map_state == client.X.IsViewable, "the client's window shows")
        yield session, client


Desk = tuple["Session", Client]


def do(desk: Desk, action: a.Action, last: str) -> list[str]:
    session, client = desk
    session.devices.carry_out(action)
    return client.read(last)


def test_moves_and_clicks(desk: Desk) -> None:
    assert do(desk, a.Move(a.Point(0.25, 0.75)), "move 80,180")[-1] == "move 80,180"
    seen = do(desk, a.Click(MIDDLE), "release 1 at 160,120")
    assert seen == ["move 160,120", "press 1 at 160,120", "release 1 at 160,120"]
    for button, number in (("middle", 2), ("right", 3)):
        seen = do(desk, a.Click(None, button), f"release {number} at 160,120")  # type: ignore[arg-type]
        assert seen == [f"press {number} at 160,120", f"release {number} at 160,120"]
    corner = a.Click(a.Point(0.9999, 0.0))
    assert do(desk, corner, "release 1 at 319,0")[0] == "move 319,0"


def test_double_clicks_and_modifiers(desk: Desk) -> None:
    session, client = desk
    session.devices.carry_out(a.Click(MIDDLE, count=2))
    session.devices.carry_out(a.Move(a.Point(0.1, 0.1)))
    seen = client.read("move 32,24")
    assert [one for one in seen if "move" not in one] == ["press 1 at 160,120", "release 1 at 160,120"] * 2
    seen = do(desk, a.Click(None, "left", 1, ("Control_L",)), "up C-ffe3")
    assert seen == ["down ffe3", "press C-1 at 32,24", "release C-1 at 32,24", "up C-ffe3"]


def test_buttons_drags_and_the_wheel(desk: Desk) -> None:
    assert do(desk, a.Button(MIDDLE, mode="down"), "press 1 at 160,120")[-1] == "press 1 at 160,120"
    assert do(desk, a.Move(a.Point(0.5, 0.25)), "held move 160,60")
    assert do(desk, a.Button(None, mode="up"), "release 1 at 160,60")
    seen = do(desk, a.Drag((a.Point(0.1, 0.1), a.Point(0.5, 0.5))), "release 1 at 160,120")
    assert seen[:2] == ["move 32,24", "press 1 at 32,24"]
    moves = [one for one in seen if one.startswith("held move")]
    assert len(moves) > 3
    assert moves[-1] == "held move 160,120"
    seen = do(desk, a.Drag((a.Point(0.1, 0.1),)), "release 1 at 32,24")
    assert seen[0] == "press 1 at 160,120", "a path of one point starts at the pointer"
    for (dx, dy), button in {(0, 3): 5, (0, -1): 4, (2, 0): 7, (-1, 0): 6}.items():
        session, client = desk
        session.devices.carry_out(a.Scroll(MIDDLE, dx, dy))
        session.devices.carry_out(a.Move(a.Point(0.1, 0.1)))
        seen = client.read("move 32,24")
        assert seen.count(f"press {button} at 160,120") == abs(dx + dy)
        assert not [one for one in seen if one.startswith("press") and f"press {button}" not in one]


def test_chords_are_pressed_in_order_and_released_in_reverse(desk: Desk) -> None:
    seen = do(desk, a.Keys(("Control_L", "Shift_L", "t")), "up C-ffe3")
    assert [one.replace("C-", "") for one in seen] == [
        "down ffe3",
        "down ffe1",
        "down 54",
        "up 54",
        "up ffe1",
        "up ffe3",
    ]
    assert do(desk, a.Keys(("Return",)), "up ff0d") == ["down ff0d", "up ff0d"]
    assert do(desk, a.Keys(("F5",), "down"), "down ffc2") == ["down ffc2"]
    assert do(desk, a.Keys(("F5",), "up"), "up ffc2") == ["up ffc2"]
    assert do(desk, a.Keys(("no_such_key", "a")), "up 61") == ["down 61", "up 61"]


def test_text_with_characters_that_the_layout_lacks(desk: Desk) -> None:
    text = "aB1!é€ßж☃\tz"
    seen = do(desk, a.TypeText(text), "up 7a")
    expected = ["61", "42", "31", "21", "e9", "10020ac", "df", "1000436", "1002603", "ff09", "7a"]
    assert [one.split()[1] for one in seen if one.startswith("down") and "ffe1" not in one] == expected


def test_more_new_characters_than_the_layout_has_room_for(desk: Desk) -> None:
    session, _ = desk
    text = "".join(chr(0x0400 + number) for number in range(250)) + "z"
    session.devices.carry_out(a.TypeText(text[:-1]))
    assert do(desk, a.TypeText("z"), "up 7a")[-1] == "up 7a"
    again = do(desk, a.TypeText("\u0400\u04f9z"), "up 7a")
    assert [one for one in again if one.startswith("down")] == ["down 1000400", "down 10004f9", "down 7a"]


def test_a_button_is_held_and_a_drag_takes_its_time(desk: Desk) -> None:
    session, client = desk
    drag = a.Drag((a.Point(0.25, 0.5), a.Point(0.25, 0.75), MIDDLE), duration_seconds=0.4)
    for action, most, milliseconds in (
        (a.Click(MIDDLE, hold_seconds=0.3), 60.0, 290),
        (a.Click(MIDDLE, hold_seconds=3600.0), 0.2, 190),
        (drag, 60.0, 390),
    ):
        client.pressed = []
        session.devices.carry_out(action, most)
        client.read("release 1 at 160,120")
        down, up = client.pressed
        assert up - down >= milliseconds


def test_an_unknown_key_refuses_its_chord(desk: Desk) -> None:
    devices = desk[0].devices
    assert devices.refused(a.Keys(("Control_L", "NoSuchKey"))) == "X has no key NoSuchKey"
    assert devices.refused(a.Keys(("Control_L", "F13"))) == devices.refused(a.Click(MIDDLE)) == ""
