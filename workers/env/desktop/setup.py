"""The steps that prepare a task on a desktop, and those that follow its episode (OSWorld's `config`, `postconfig`)."""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw
from pydantic import BaseModel, ConfigDict

from dart.workers.env.desktop.session import Session
from dart.workers.env.desktop.tasks import Step
from dart.workers.env.desktop.tree import Tree
from dart.workers.env.desktop.windows import Window
from dart.worlds import EnvironmentFailure

WINDOW_SECONDS = 120.0
"""How long a program may take to show its window; LibreOffice and GIMP take long when a machine starts many at once."""
COMMAND_SECONDS = 60.0
CLOSE_SECONDS = 10.0
LATE_SECONDS = 10.0
"""How long after a program has ended its window may appear: some hand over to another process."""


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Launch(_Parameters):
    command: str | tuple[str, ...]
    shell: bool = False
    window: str | None = ""
    """Wait until a new window has this in its title; null: it has no window."""


class Execute(_Parameters):
    command: str | tuple[str, ...]
    shell: bool = False


class Sleep(_Parameters):
    seconds: float


class WriteFile(_Parameters):
    path: str
    text: str


class Shape(_Parameters):
    box: tuple[int, int, int, int]
    fill: str


class DrawPicture(_Parameters):
    """A PNG (or what the path's ending says): rectangles on a background."""

    path: str
    size: tuple[int, int]
    fill: str
    shapes: tuple[Shape, ...] = ()


class AwaitWidget(_Parameters):
    """Wait until the accessibility tree has a widget of this name: a program may show an empty window first."""

    name: str
    role: str | None = None


class OnWindow(_Parameters):
    window_name: str


def carry_out(session: Session, steps: Sequence[Step]) -> list[int]:
    """The processes that were launched. Raises EnvironmentFailure for a step that fails."""
    launched: list[int] = []
    for number, step in enumerate(steps):
        try:
            _carry_out(session, step, f"step-{number}", launched)
        except EnvironmentFailure as error:
            raise EnvironmentFailure(f"the set-up's step {number} ({step.type}) failed: {error}") from None
    return launched


def _carry_out(session: Session, step: Step, log: str, launched: list[int]) -> None:
    match step.type:
        case "launch":
            launched += _launch(session, Launch.model_validate(step.parameters), log)
        case "execute" | "command":
            execute = Execute.model_validate(step.parameters)
            code = session.wait(session.run(words(execute), log), COMMAND_SECONDS, str(execute.command))
            if code:
                said = session.log(log).read_text(errors="replace")[-300:]
                raise EnvironmentFailure(f"{execute.command} ended with {code}: {said}")
        case "sleep":
            time.sleep(Sleep.model_validate(step.parameters).seconds)
        case "write_file":
            file = WriteFile.model_validate(step.parameters)
            path = place(session, file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, encoding="utf-8")
        case "picture":
            _draw(session, DrawPicture.model_validate(step.parameters))
        case "await_widget":
            awaited = AwaitWidget.model_validate(step.parameters)
            with Tree(session.bus) as tree:
                if tree.await_node(awaited.name, awaited.role, WINDOW_SECONDS) is None:
                    raise EnvironmentFailure(f"no widget {awaited.name!r} appeared in {WINDOW_SECONDS:g} s")
        case "activate_window" | "maximise_window" | "close_window":
            _ask_manager(session, step.type, OnWindow.model_validate(step.parameters).window_name)


def words(of: Launch | Execute) -> list[str]:
    """The command as a list; a plain text is split as a shell would, or given to one."""
    if of.shell:
        return ["sh", "-c", of.command if isinstance(of.command, str) else shlex.join(of.command)]
    return shlex.split(of.command) if isinstance(of.command, str) else list(of.command)


def place(session: Session, path: str) -> Path:
    """A path of the desktop: `~` and relative ones lie in its home folder."""
    return session.home / path.removeprefix("~").lstrip("/") if path.startswith("~") else session.home / path


def _launch(session: Session, launch: Launch, log: str) -> list[int]:
    before = {window.id for window in session.windows.all()}
    pid = session.run(words(launch), log)
    if launch.window is None:
        return []
    began = last = time.monotonic()
    while not any(window.id not in before and launch.window in window.title for window in session.windows.all()):
        code, now = session.ended(pid), time.monotonic()
        last = now if code is None else last
        if not session.alive():
            raise EnvironmentFailure(f"the desktop died while {launch.command} was starting")
        if now - began > WINDOW_SECONDS or now - last > LATE_SECONDS:
            said = session.log(log).read_text(errors="replace")[-300:] or "nothing"
            state = "runs" if code is None else f"ended with {code}"
            raise EnvironmentFailure(f"{launch.command} showed no window in {now - began:.0f} s; it {state}: {said}")
        time.sleep(0.01)
    return [pid]


def _ask_manager(session: Session, step: str, name: str) -> None:
    found = next((window for window in session.windows.all() if name in window.title), None)
    if found is None:
        raise EnvironmentFailure(f"no window has {name!r} in its title")
    match step:
        case "activate_window":
            session.windows.activate(found)
        case "maximise_window":
            session.windows.maximise(found)
        case _:
            session.windows.close(found)
            _gone(session, found)


def _gone(session: Session, window: Window) -> None:
    """Wait until the window has closed, or shows no sign of it: it may ask whether to save."""
    began = time.monotonic()
    while window.id in {one.id for one in session.windows.all()} and time.monotonic() - began < CLOSE_SECONDS:
        time.sleep(0.01)


def _draw(session: Session, wanted: DrawPicture) -> None:
    picture = Image.new("RGB", wanted.size, wanted.fill)
    for shape in wanted.shapes:
        ImageDraw.Draw(picture).rectangle(shape.box, fill=shape.fill)
    path, out = place(session, wanted.path), io.BytesIO()
    picture.save(out, Image.registered_extensions()[path.suffix.lower()])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out.getvalue())


def closed(session: Session, launched: Sequence[int]) -> bool:
    """Whether no window is left, and none follows: the programs that had them have ended, or show nothing for long."""
    began = time.monotonic()
    while not session.windows.all():
        if all(session.ended(pid) is not None for pid in launched) or time.monotonic() - began > CLOSE_SECONDS:
            return True
        time.sleep(0.01)
    return False
