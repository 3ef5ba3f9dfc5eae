"""The client against OSWorld's in-VM server, as published, on routes that tasks use (support/osworld/desktop.py)."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from osworld.desktop import HEIGHT, WIDTH, Desktop, desktop, needs_server

from dart.core.action import Action, Button, Click, Code, Drag, Keys, Move, Point, Scroll, TypeText
from dart.workers.env.osworld.machine import Address, Machine, MachineError
from dart.workers.env.osworld.programs import Typing, program
from dart.worlds import from_png

pytestmark = needs_server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desktop]:
    with desktop(tmp_path_factory.mktemp("desktop")) as started:
        yield started


@pytest.fixture
async def machine(running: Desktop) -> AsyncIterator[Machine]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield Machine(Address("one", "127.0.0.1", running.port, 9222, 8006, 8080), client)


async def shown(machine: Machine, condition: str) -> None:
    """Wait until a window's title has the words; the test's hang guard is a minute."""
    for _ in range(300):
        if condition in (await machine.execute(["wmctrl", "-l"])).output:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"no window {condition!r}")


async def do(machine: Machine, action: Action, typing: Typing = "clipboard") -> None:
    ran = await machine.pyautogui(program(action, (WIDTH, HEIGHT), typing))
    assert ran.returncode == 0, ran.error


async def pointer(machine: Machine) -> tuple[int, int]:
    x, y = (await machine.pyautogui("print(*pyautogui.position())")).output.split()
    return int(x), int(y)


async def test_reading_routes(machine: Machine) -> None:
    image = from_png(await machine.screenshot())
    assert (image.width, image.height) == (WIDTH, HEIGHT)
    assert await machine.answers()


async def test_files(machine: Machine, running: Desktop, tmp_path: Path) -> None:
    source, there = tmp_path / "words.txt", running.home / "folder" / "words.txt"
    source.write_bytes(b"\x00some \xff bytes" * 1000)
    await machine.upload(str(there), source)
    assert there.read_bytes() == source.read_bytes()


async def test_programs(machine: Machine) -> None:
    ran = await machine.execute(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (ran.output, ran.error, ran.returncode) == ("out\n", "err\n", 3)
    assert (await machine.execute("echo $((1 + 1))", shell=True)).output == "2\n"
    with pytest.raises(MachineError, match="/execute answered 500"):
        await machine.execute(["no-such-program"])
    await machine.execute_with_verification(["true"], {"command_success": "true"}, 2.0, 0.2, False)
    with pytest.raises(MachineError, match="verification_failed"):
        await machine.execute_with_verification(["true"], {"command_success": "false"}, 0.5, 0.2, False)


async def test_an_execute_that_breaks_off_is_not_sent_again(machine: Machine, running: Desktop) -> None:
    counted = running.home / "counted"
    with pytest.raises(MachineError, match="did not answer within"):
        await machine.execute(["sh", "-c", f"echo x >> {counted}; sleep 3"], seconds=1.0)
    await asyncio.sleep(4)
    assert counted.read_text() == "x\n"


@pytest.mark.skipif(shutil.which("xterm") is None, reason="xterm is not installed")
async def test_windows(machine: Machine, running: Desktop) -> None:
    await machine.launch(["xterm", "-T", "one window", "-e", "cat"])
    await machine.launch("xterm -T two-window -e cat")
    await shown(machine, "one window")
    await shown(machine, "two-window")
    await machine.activate_window("one window", strict=True)
    await shown(machine, "one window")
    active = await machine.execute(["xdotool", "getactivewindow", "getwindowname"])
    assert active.output == "one window\n"
    await machine.open("xterm", 60)
    with pytest.raises(MachineError, match="/setup/open_file answered 404"):
        await machine.open("no-such-application", 60)
    for title in ("one window", "two-window"):
        await machine.close_window(title, strict=True)
    for _ in range(100):
        left = (await machine.execute(["wmctrl", "-l"])).output
        if "window" not in left:
            break
        await asyncio.sleep(0.2)
    else:
        raise AssertionError(f"the windows were not closed: {left}")
    await machine.execute(["pkill", "xterm"])  # the one that was opened by name would take later tests' clicks


async def test_the_pointer_goes_where_the_action_says(machine: Machine) -> None:
    for point in (Point(0.0, 0.0), Point(0.5, 0.25), Point(0.999, 0.999)):
        await do(machine, Move(point))
        x, y = await pointer(machine)
        assert abs(x - point.x * WIDTH) <= 1 and abs(y - point.y * HEIGHT) <= 1
    await do(machine, Drag((Point(0.2, 0.2), Point(0.4, 0.4))))
    assert await pointer(machine) == (round(0.4 * WIDTH), round(0.4 * HEIGHT))
    for action in (
        Click(None, "right", 1, ("Control_L",)), Button(Point(0.9, 0.9), mode="down"), Button(None, mode="up"),
        Scroll(Point(0.9, 0.9), 2, -3), Drag((Point(0.6, 0.6),)), Click(Point(0.9, 0.9), count=5), Code("python", "1"),
        Drag((Point(0.1, 0.1), Point(0.2, 0.1), Point(0.2, 0.2)), "middle"), Keys(("Escape",), "down"),
        Keys(("Escape",), "up"),
    ):  # fmt: skip
        await do(machine, action)


@pytest.mark.parametrize("typing", ["keyboard", "clipboard"])
@pytest.mark.skipif(shutil.which("mousepad") is None or shutil.which("xclip") is None, reason="no mousepad or xclip")
async def test_text_arrives_as_it_was_written(machine: Machine, running: Desktop, typing: Typing) -> None:
    words = 'it\'s <b>"bold"</b> & 100% {done}\n' + ("" if typing == "keyboard" else "café → ü\nend")
    path = running.home / f"{typing}.txt"
    path.write_text("")
    await machine.launch(["mousepad", "--disable-server", str(path)])
    await shown(machine, path.name)
    await do(machine, Click(Point(0.5, 0.5)))
    await do(machine, TypeText(words), typing)
    await do(machine, Keys(("Control_L", "s")))
    until = time.monotonic() + 30
    while not path.read_text().strip() and time.monotonic() < until:
        await asyncio.sleep(0.2)
    assert path.read_text().rstrip("\n") == words.rstrip("\n")
    await machine.close_window(path.name)


async def test_a_dead_machine_is_an_error_not_an_answer(tmp_path: Path) -> None:
    with desktop(tmp_path / "mortal") as mortal:
        async with httpx.AsyncClient(trust_env=False) as client:
            machine = Machine(Address("two", "127.0.0.1", mortal.port, 9222, 8006, 8080), client)
            assert await machine.answers()
            mortal.kill()
            assert not await machine.answers()
            with pytest.raises(MachineError, match="/screenshot failed: ConnectError"):
                await machine.screenshot()
