"""A desktop: its layout, what two of them share (nothing), and what is left when it ends (nothing)."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from desktop_samples import alive, booted, ended, needs_desktop, remains, until
from PIL import Image

from dart.core import action as a
from dart.workers.env.desktop import processes
from dart.worlds import EnvironmentFailure

pytestmark = [pytest.mark.desktop, needs_desktop]
DAEMON = "import os, sys, time\nif os.fork(): sys.exit()\nos.setsid()\nif os.fork(): sys.exit()\n"
SLEEPER = DAEMON + "open(sys.argv[1], 'w').write(str(os.getpid()) + '\\n')\ntime.sleep(1000)\n"


def daemon(session: object, *before: str) -> int:
    """The process id of a daemon that has left its parent, its process group and its session."""
    note = session.home / "daemon"  # type: ignore[attr-defined]
    session.run([*before, sys.executable, "-c", SLEEPER, str(note)], "daemon")  # type: ignore[attr-defined]
    until(lambda: note.exists() and note.read_text().endswith("\n"), "the daemon has begun")
    return int(note.read_text())


@pytest.mark.parametrize("size", [(320, 240), (317, 241), (1280, 720)])
def test_the_screenshot_is_the_screen_to_the_pixel(size: tuple[int, int]) -> None:
    from Xlib import X, display

    with booted(size) as session:
        session.devices.carry_out(a.Move(a.Point(0.3, 0.3)))
        pixels = session.screen.settled(0.3, 5.0)
        shot = session.screen.encode(pixels, "png", 85)
        with Image.open(io.BytesIO(shot.data)) as picture:
            assert (picture.size, picture.format, shot.width, shot.height) == (size, "PNG", *size)
            ours = picture.convert("RGB").tobytes()
        root = display.Display(session.display).screen().root
        theirs = root.get_image(0, 0, *size, X.ZPixmap, 0xFFFFFFFF).data
        # The server leaves its own pointer out of pictures that clients ask for.
        different = [
            number
            for number, (rgb, bgrx) in enumerate(zip(_triples(ours, 3), _triples(theirs, 4), strict=True))
            if rgb != bgrx[2::-1]
        ]
        at = [(number % size[0] - int(0.3 * size[0]), number // size[0] - int(0.3 * size[1])) for number in different]
        assert different, "the pointer is seen"
        assert all(-4 < x < 30 and -4 < y < 30 for x, y in at)
        jpeg = session.screen.encode(pixels, "jpeg", 85)
        with Image.open(io.BytesIO(jpeg.data)) as picture:
            assert (picture.size, picture.format, jpeg.media_type) == (size, "JPEG", "image/jpeg")


def _triples(data: bytes, width: int) -> list[bytes]:
    return [data[at : at + width] for at in range(0, len(data), width)]


def test_the_screenshot_waits_until_the_screen_is_still() -> None:
    from Xlib import display

    with booted() as session:
        other = display.Display(session.display)
        root = other.screen().root
        still = session.screen.settled(0.05, 1.0)
        began = time.monotonic()
        assert session.screen.settled(0.3, 5.0) == still
        assert time.monotonic() - began >= 0.3
        pid = session.run(
            [sys.executable, "-c", _BLINKER, session.display, os.environ.get("PYTHONPATH", "")], "blinker"
        )
        until(lambda: session.screen.pixels() != still, "the screen changes")
        began = time.monotonic()
        session.screen.settled(0.5, 1.0)
        assert time.monotonic() - began >= 1.0, "it changes all the time, so the longest wait ends it"
        os.kill(pid, signal.SIGKILL)
        root.change_attributes(background_pixel=0)
        other.sync()
        assert session.screen.settled(0.3, 30.0) == session.screen.pixels()


_BLINKER = f"""
import sys, time
sys.path[:0] = {[one for one in sys.path if one]!r}
from Xlib import display
d = display.Display(sys.argv[1])
root = d.screen().root
for number in range(10_000):
    root.change_attributes(background_pixel=number * 4099 % (1 << 24))
    root.clear_area()
    d.sync()
    time.sleep(0.02)
"""


def test_programs_get_a_home_and_no_variables_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    with booted() as session:
        pid = session.run(["sh", "-c", "env; pwd"], "env")
        assert session.wait(pid, 30.0, "env") == 0
        lines = session.log("env").read_text().splitlines()
        told = dict(line.partition("=")[::2] for line in lines[:-1])
        assert lines[-1] == told["HOME"] == str(session.home)
        assert {told[name].startswith(str(session.folder)) for name in ("TMPDIR", "XDG_RUNTIME_DIR")} == {True}
        assert "SECRET_TOKEN" not in told
        assert (session.folder.stat().st_mode & 0o777) == 0o700
        with pytest.raises(EnvironmentFailure, match="there is no program no-such-program"):
            session.run(["no-such-program"])


def test_two_desktops_share_no_clipboard_home_or_windows() -> None:
    with booted() as one, booted() as other:
        assert one.display != other.display
        assert one.home != other.home
        one.run(["xterm", "-T", "Only here"], "xterm")
        until(one.windows.all, "the terminal's window")
        one.run(["yad", "--entry", "--title=Copy", "--entry-text=mine"], "yad")
        until(lambda: (now := one.windows.active()) is not None and now.title == "Copy", "the dialog")
        one.screen.settled(0.3, 10.0)

        def copied() -> bool:
            one.devices.carry_out(a.Keys(("Control_L", "a")))
            one.devices.carry_out(a.Keys(("Control_L", "c")))
            return one.windows.clipboard() == "mine"

        until(copied, "the text is in the clipboard")
        assert other.windows.clipboard() == ""
        assert other.windows.all() == []
        assert sorted(window.title for window in one.windows.all()) == ["Copy", "Only here"]


def test_the_end_takes_daemons_along_and_leaves_no_trace() -> None:
    with booted() as session:
        pids = [daemon(session), daemon(session, "env", "-i")]
        session.run(["xterm"], "xterm")
        until(session.windows.all, "the terminal's window")
        pids += processes.marked(session.folder)
        assert len(pids) >= 5
        assert remains(session.folder, session.display) == [str(session.folder)]
        assert all(alive(pid) for pid in pids)
    ended(pids)
    assert remains(session.folder, session.display) == []


def test_a_killed_x_server_leaves_no_socket() -> None:
    with booted() as session:
        assert session.alive()
        os.kill(int((session.folder / "x-server").read_text()), signal.SIGKILL)
        until(lambda: not session.alive(), "it is noticed")
    assert remains(session.folder, session.display) == []


WORKER = """
import sys, time
from dart.workers.env.desktop.session import Session
session = Session((320, 240))
session.boot()
print(session.folder, session.display, session._processes._keeper.pid, flush=True)
time.sleep(1000)
"""


def worker() -> tuple[subprocess.Popen[str], Path, str, int, list[int]]:
    """A process with a desktop: it, the desktop's folder and display, its keeper, and the desktop's processes."""
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder, display, keeper = process.stdout.readline().split()
    return process, Path(folder), display, int(keeper), processes.marked(Path(folder))


def test_a_killed_worker_s_desktop_ends_itself() -> None:
    process, folder, display, keeper, pids = worker()
    assert len(pids) >= 3
    process.kill()
    process.wait()
    until(lambda: not folder.exists() and not alive(keeper), "the keeper has ended everything")
    ended(pids)
    assert remains(folder, display) == []


def test_what_a_killed_keeper_left_is_swept_up_and_nothing_else() -> None:
    with booted() as living:
        process, folder, display, keeper, pids = worker()
        os.kill(keeper, signal.SIGKILL)
        process.kill()
        process.wait()
        assert any(alive(pid) for pid in pids)
        until(lambda: processes.sweep() or not folder.exists(), "the sweep")
        ended(pids)
        assert living.alive()
        assert living.folder.exists()
        assert remains(folder, display) == []


def test_closing_after_the_keeper_was_killed_leaves_nothing() -> None:
    with booted() as session:
        pids = processes.marked(session.folder)
        os.kill(session._processes._keeper.pid, signal.SIGKILL)
        until(lambda: not session.alive(), "it is noticed")
    ended(pids)
    assert remains(session.folder, session.display) == []
