"""One desktop: Xvfb, a D-Bus session with the accessibility bus, openbox, and a home of its own in one folder.

    FOLDER/home     HOME, with the settings of toolkits: no blinking caret, no animations
    FOLDER/tmp      TMPDIR
    FOLDER/run      XDG_RUNTIME_DIR, with the sockets of both buses
    FOLDER/screen   Xvfb's frame buffer
    FOLDER/log      what every program printed

The clipboard belongs to the X server, so it is the desktop's own, too. Programs get a clean environment: no variable of
the worker's but PATH. This is no sandbox: they run as the worker's user, with its files and its network.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from Xlib import display as xdisplay
from Xlib import error as xerror

from dart import assets
from dart.core.action import Move, Point
from dart.workers.env.desktop.inputs import InputDevices
from dart.workers.env.desktop.processes import Processes
from dart.workers.env.desktop.screen import Screen
from dart.workers.env.desktop.windows import Windows
from dart.worlds import EnvironmentFailure

BOOT_SECONDS = 60.0
ASSETS = Path(assets.__file__).parent / "desktop"
BACKGROUND = 0x3A6EA5
_GTK3 = """[Settings]
gtk-cursor-blink=false
gtk-enable-animations=false
gtk-font-name=DejaVu Sans 10
gtk-recent-files-enabled=false
"""
_GTK2 = 'gtk-cursor-blink=0\ngtk-font-name="DejaVu Sans 10"\n'
_GSETTINGS = "[org/xfce/mousepad/preferences/window]\npath-in-title=false\n"
"""Paths in titles would differ from desktop to desktop."""
_SHELL = "PS1='$ '\nunset HISTFILE\n"
_XTERM = "XTerm*faceName: DejaVu Sans Mono\nXTerm*faceSize: 10\nXTerm*cursorBlink: false\n"
_FOLDERS = ("Desktop", "Documents", "Downloads", "Pictures")


class Session:
    """Make one with `boot`. Not for two threads at once, except `kill`."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size
        self._processes = Processes()
        self.folder = self._processes.folder
        self.home = self.folder / "home"
        self.display = ""
        self._outputs = itertools.count(1)
        self._vital: list[int] = []
        """Processes that a desktop cannot do without."""
        self._connection: xdisplay.Display | None = None
        self.screen: Screen
        self.devices: InputDevices
        self.windows: Windows

    def boot(self) -> None:
        """Raises EnvironmentFailure if something does not start; then `close` it."""
        self._furnish()
        began = time.monotonic()
        width, height = self.size
        answer = self.folder / "display"
        server = [
            "Xvfb", "-screen", "0", f"{width}x{height}x24", "-fbdir", str(self.folder / "screen"), "-nolisten", "tcp",
            "-noreset", "-dpi", "96", "-extension", "GLX",  # without GLX it takes 14 MB instead of 67
        ]  # fmt: skip
        self._vital = [self._start(server, "Xvfb", answer)]
        self._until(lambda: answer.exists() and answer.read_text().endswith("\n"), began, "Xvfb")
        self.display = f":{answer.read_text().strip()}"
        bus = ["dbus-daemon", "--session", "--nofork", "--nopidfile", f"--address={self.bus}"]
        self._vital.append(self._start(bus, "dbus-daemon"))
        self._until((self.folder / "run" / "bus").exists, began, "dbus-daemon")
        self._vital.append(self._start(["openbox", "--sm-disable", "--config-file", str(ASSETS / "openbox.xml")], "wm"))
        self._connect()
        self._until(self.windows.managed, began, "openbox")
        self.devices.carry_out(Move(Point(0.5, 0.5)))

    @property
    def bus(self) -> str:
        return f"unix:path={self.folder / 'run' / 'bus'}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every program."""
        return {
            "PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.home), "USER": "user", "LOGNAME": "user",
            "SHELL": shutil.which("bash") or "/bin/sh", "LANG": "C.UTF-8", "TZ": "UTC", "DISPLAY": self.display,
            "TMPDIR": str(self.folder / "tmp"), "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "DBUS_SESSION_BUS_ADDRESS": self.bus, "GDK_BACKEND": "x11", "GSETTINGS_BACKEND": "keyfile",
            "GTK_USE_PORTAL": "0", "GIO_USE_VFS": "local", "SAL_USE_VCLPLUGIN": "gtk3", "BASH_ENV": "",
            "XAUTHORITY": str(self.home / ".Xauthority"),
        }  # fmt: skip

    def run(self, argv: Sequence[str], name: str | None = None) -> int:
        """Start a program in the home folder, and return its process id. Its output goes to its log."""
        return self._start(argv, name or Path(argv[0]).name)

    def output(self, argv: Sequence[str], seconds: float) -> tuple[int, str]:
        """A program's exit code, and what it printed, without its errors. Raises EnvironmentFailure."""
        name = f"output-{next(self._outputs)}"
        pid = self.run(["sh", "-c", 'exec "$@" 2>/dev/null', "sh", *argv], name)
        return self.wait(pid, seconds, argv[0]), self.log(name).read_text(errors="replace")

    def wait(self, pid: int, seconds: float, what: str) -> int:
        """A program's exit code. Raises EnvironmentFailure if it takes longer."""
        return self._processes.wait(pid, seconds, what)

    def ended(self, pid: int) -> int | None:
        """A program's exit code; None while it runs."""
        return self._processes.ended(pid)

    def log(self, name: str) -> Path:
        return self.folder / "log" / name

    def alive(self) -> bool:
        """Whether the server, the bus and the window manager run, and the server answers."""
        if self._connection is None or not self._processes.alive():
            return False
        if any(self._processes.ended(pid) is not None for pid in self._vital):
            return False
        try:
            return self.windows.managed()
        except (xerror.ConnectionClosedError, OSError):
            return False

    def kill(self) -> None:
        """End everything now; from any thread. A call that waits for the X server then fails."""
        self._processes.kill()

    def close(self) -> None:
        """End every process and remove the folder."""
        if self._connection is not None:
            with contextlib.suppress(AttributeError, BufferError):  # not made yet, or another thread reads it
                self.screen.close()
            self._processes.kill()  # first: closing flushes, and a server that is stopped would block it
            with contextlib.suppress(xerror.DisplayError, xerror.ConnectionClosedError, OSError):
                self._connection.close()
        self._processes.close()

    def _furnish(self) -> None:
        """The folders and settings; the mode keeps other users out."""
        for name in (
            "tmp",
            "run",
            "screen",
            "log",
            "home/.config/gtk-3.0",
            "home/.config/glib-2.0/settings",
            *(f"home/{name}" for name in _FOLDERS),
        ):
            (self.folder / name).mkdir(parents=True, mode=0o700)
        files = {
            ".config/gtk-3.0/settings.ini": _GTK3, ".gtkrc-2.0": _GTK2, ".bashrc": _SHELL, ".Xresources": _XTERM,
            ".config/glib-2.0/settings/keyfile": _GSETTINGS,
            ".config/user-dirs.dirs": "".join(
                f'XDG_{variable}_DIR="$HOME/{name}"\n'
                for variable, name in zip(("DESKTOP", "DOCUMENTS", "DOWNLOAD", "PICTURES"), _FOLDERS, strict=True)
            ),
        }  # fmt: skip
        for path, text in files.items():
            (self.home / path).write_text(text)

    def _start(self, argv: Sequence[str], name: str, display: Path | None = None) -> int:
        return self._processes.start(argv, self.environment, self.home, self.log(name), display)

    def _connect(self) -> None:
        try:
            self._connection = xdisplay.Display(self.display)
        except (xerror.DisplayError, xerror.ConnectionClosedError, OSError) as error:
            raise EnvironmentFailure(f"display {self.display} does not answer: {error}") from None
        root = self._connection.screen().root
        root.change_attributes(background_pixel=BACKGROUND)
        root.clear_area()
        resources = self._connection.intern_atom("RESOURCE_MANAGER"), self._connection.intern_atom("STRING")
        root.change_property(*resources, 8, (self.home / ".Xresources").read_bytes())
        self.screen = Screen(self.folder / "screen" / "Xvfb_screen0", self.size)
        self.devices = InputDevices(self._connection, self.size)
        self.windows = Windows(self._connection)

    def _until(self, ready: Callable[[], bool], began: float, what: str) -> None:
        while not ready():
            if any(self._processes.ended(pid) is not None for pid in self._vital):
                raise EnvironmentFailure(f"{what} did not start: {self._printed()}")
            if time.monotonic() - began > BOOT_SECONDS:
                raise EnvironmentFailure(f"{what} was not ready within {BOOT_SECONDS:g} s: {self._printed()}")
            time.sleep(0.004)

    def _printed(self) -> str:
        """The ends of the logs."""
        logs = sorted((self.folder / "log").iterdir())
        return "; ".join(f"{one.name}: {one.read_text(errors='replace')[-200:].strip()}" for one in logs) or "no output"
