"""What a device's programs do here: a drawing that touches change, a text box, settings and files.

Touches leave marks where they were, so that a screenshot shows to the pixel where the device was touched.
"""

from __future__ import annotations

import base64
import io
import json
import time
from pathlib import Path

from PIL import Image, ImageDraw

GROUND = {"home": (30, 60, 90), "notes": (240, 230, 200), "web": (255, 255, 255)}
SWITCH, BOX, LIST = (0.1, 0.2, 0.9, 0.3), (0.1, 0.4, 0.9, 0.5), (0.0, 0.6, 1.0, 1.0)
"""Fractions of the screen: a switch, a text box, a list that scrolls."""
MARK, LINE = (255, 0, 0), (0, 0, 255)
ON, OFF = (0, 200, 0), (120, 120, 120)
KEYBOARD = "com.android.adbkeyboard/.AdbIME"
APPS = {"com.example.notes": "notes"}
QUIET = ("screencap", "getprop", "pidof", "wm", "cat")
Reply = tuple[int, bytes]


class Phone:
    def __init__(self, size: tuple[int, int], override: tuple[int, int] | None, events: Path, keyboard: bool) -> None:
        self.natural, self.override, self.events, self.keyboard = size, override, events, keyboard
        self.properties = {"sys.boot_completed": "1"}
        self.settings: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.chosen = ""
        """The keyboard; empty: Android's own."""
        self.go("home")

    def go(self, page: str) -> None:
        self.page, self.text, self.focused, self.offset = page, "", False, 0
        self.marks: list[tuple[int, int]] = []
        self.lines: list[tuple[int, int, int, int]] = []

    @property
    def size(self) -> tuple[int, int]:
        width, height = self.override or self.natural
        return (height, width) if self.settings.get("system/user_rotation") in ("1", "3") else (width, height)

    def run(self, words: list[str]) -> Reply:
        """A program of the device: its exit status and what it prints."""
        name, *rest = words
        if name not in QUIET:
            with self.events.open("a") as out:
                out.write(json.dumps(words) + "\n")
        try:
            done = getattr(self, f"do_{name}")(rest)
        except (AttributeError, ValueError, IndexError) as error:
            return 255, f"Error: {name} {rest}: {error}\n".encode()
        return done if isinstance(done, tuple) else (0, done if isinstance(done, bytes) else (done or "").encode())

    # ---- programs ----

    def do_getprop(self, rest: list[str]) -> str:
        return self.properties.get(rest[0], "") + "\n"

    def do_setprop(self, rest: list[str]) -> None:
        self.properties[rest[0]] = rest[1]

    def do_pidof(self, rest: list[str]) -> str | Reply:
        return "1234\n" if rest == ["system_server"] else (1, b"")

    def do_wm(self, rest: list[str]) -> str:
        lines = [f"Physical size: {self.natural[0]}x{self.natural[1]}"]
        if self.override:
            lines.append(f"Override size: {self.override[0]}x{self.override[1]}")
        return "\n".join(lines) + "\n"

    def do_settings(self, rest: list[str]) -> str | None:
        verb, space, key, *value = rest
        if verb == "put":
            self.settings[f"{space}/{key}"] = value[0]
            return None
        return self.settings.get(f"{space}/{key}", "null") + "\n"

    def do_cat(self, rest: list[str]) -> str | Reply:
        return self.files.get(rest[0]) or (1, f"cat: {rest[0]}: No such file or directory\n".encode())

    def do_ime(self, rest: list[str]) -> str | Reply:
        if rest == ["reset"]:
            self.chosen = ""
            return "Reset current input method\n"
        if not self.keyboard or rest[1] != KEYBOARD:
            return 0, f"Unknown input method {rest[1]} cannot be {rest[0]} for user #0\n".encode()
        self.chosen = KEYBOARD if rest[0] == "set" else self.chosen
        return f"Input method {KEYBOARD}: now {rest[0]}\n"

    def do_monkey(self, rest: list[str]) -> str | Reply:
        package = rest[rest.index("-p") + 1]
        if package not in APPS:
            return 252, b"** No activities found to run, monkey aborted.\n"
        self.go(APPS[package])
        return "Events injected: 1\n"

    def do_am(self, rest: list[str]) -> str:
        match rest:
            case ["start", "-n", component]:
                package = component.partition("/")[0]
                if package not in APPS:
                    return f"Error: Activity class {{{component}}} does not exist.\n"  # with status 0, as on devices
                self.go(APPS[package])
            case ["start", "-a", "android.intent.action.VIEW", "-d", url]:
                self.go("web")
                self.text = url
            case ["broadcast", "-a", "ADB_INPUT_B64", "--es", "msg", message]:
                heard = self.focused and self.chosen == KEYBOARD
                self.text += base64.b64decode(message).decode() if heard else ""
            case ["force-stop", package]:
                if APPS.get(package) == self.page:
                    self.go("home")
            case _:
                raise ValueError("unknown")
        return "Starting\n"

    def do_uiautomator(self, rest: list[str]) -> str:
        width, height = self.size
        box = [f"[{int(x1 * width)},{int(y1 * height)}][{int(x2 * width)},{int(y2 * height)}]"
               for x1, y1, x2, y2 in (SWITCH, BOX)]  # fmt: skip
        on = str(self.switch == "1").lower()
        self.files[rest[1]] = (
            "<?xml version='1.0' encoding='UTF-8' standalone='yes' ?><hierarchy rotation=\"0\">"
            f'<node class="android.widget.FrameLayout" text="" bounds="[0,0][{width},{height}]">'
            f'<node class="android.widget.Switch" text="Demo" content-desc="" clickable="true" checked="{on}" '
            f'resource-id="com.example:id/demo" bounds="{box[0]}" />'
            f'<node class="android.widget.EditText" text="{self.text}" clickable="true" bounds="{box[1]}" />'
            "</node></hierarchy>"
        )
        return f"UI hierchary dumped to: {rest[1]}\n"

    # ---- input ----

    def do_input(self, rest: list[str]) -> None:
        verb, *values = rest
        match verb:
            case "tap":
                self.tap(*(int(value) for value in values))
            case "swipe":
                self.swipe(*(int(value) for value in values))
            case "motionevent":
                kind, x, y = values[0], int(values[1]), int(values[2])
                self.down = (x, y) if kind == "DOWN" else self.down
                self.lines.append((*self.down, x, y))
                self.down = (x, y)
            case "text":
                self.type(values)
            case "keyevent":
                self.key(values[0])
            case "keycombination":
                self.settings["test/chord"] = "+".join(values)
            case _:
                raise ValueError(f"unknown command {verb}")

    def type(self, values: list[str]) -> None:
        """As Android does: `%s` is a space, and it cannot type what is not ASCII."""
        (text,) = values
        text.encode("ascii")
        self.text += text.replace("%s", " ") if self.focused else ""

    def key(self, name: str) -> None:
        name = name.removeprefix("KEYCODE_")
        if name == "HOME" or name == "BACK":
            self.go("home")
        elif name == "DEL":
            self.text = self.text[:-1]
        elif name in ("ENTER", "TAB"):
            self.text += "\n" if name == "ENTER" else "\t"
        self.settings["test/key"] = name

    def tap(self, x: int, y: int) -> None:
        self.marks.append((x, y))
        if self.inside(SWITCH, x, y):
            self.settings["global/demo"] = "0" if self.switch == "1" else "1"
        self.focused = self.inside(BOX, x, y)

    def swipe(self, x: int, y: int, to_x: int, to_y: int, ms: int = 300) -> None:
        self.lines.append((x, y, to_x, to_y))
        self.settings["test/ms"] = str(ms)
        if self.inside(LIST, x, y):
            self.offset += y - to_y

    def inside(self, area: tuple[float, float, float, float], x: int, y: int) -> bool:
        width, height = self.size
        return area[0] <= x / width < area[2] and area[1] <= y / height < area[3]

    @property
    def switch(self) -> str:
        return self.settings.get("global/demo", "0")

    # ---- the screen ----

    def do_screencap(self, rest: list[str]) -> bytes:
        width, height = self.size
        picture = Image.new("RGB", (width, height), GROUND[self.page])
        draw = ImageDraw.Draw(picture)

        def area(fractions: tuple[float, float, float, float], colour: tuple[int, int, int]) -> None:
            x1, y1, x2, y2 = fractions
            draw.rectangle((int(x1 * width), int(y1 * height), int(x2 * width) - 1, int(y2 * height) - 1), fill=colour)

        area(SWITCH, ON if self.switch == "1" else OFF)
        area(BOX, (255, 255, 255))
        draw.text((int(0.12 * width), int(0.42 * height)), self.text, fill=(0, 0, 0))
        if self.settings.get("test/caret") == "1" and time.time() % 0.4 < 0.2:
            draw.line((20, int(0.42 * height), 20, int(0.48 * height)), fill=(0, 0, 0))
        for y in range(int(0.6 * height) - self.offset % 20, height, 20):
            draw.line((0, y, width, y), fill=(200, 200, 0))
        for line in self.lines:
            draw.line(line, fill=LINE)
        for mark in self.marks:
            draw.point(mark, fill=MARK)
        out = io.BytesIO()
        picture.save(out, "PNG", compress_level=1)
        warning = b"[Warning] Multiple displays were found, but no display id was specified!\n"
        return (warning if self.settings.get("test/displays") == "2" else b"") + out.getvalue()
