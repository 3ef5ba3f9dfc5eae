"""One environment of the world `desktop`: a desktop, replaced by a fresh one after every episode."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from pydantic import BaseModel
from Xlib import error as xerror

from dart.core.action import Action, Observe, Wait
from dart.core.types import Image, Observation, Task
from dart.workers.env.desktop import setup
from dart.workers.env.desktop.grading.verdict import grade
from dart.workers.env.desktop.oracle import Oracle
from dart.workers.env.desktop.session import Session
from dart.workers.env.desktop.tasks import TaskFile, check_task, load
from dart.workers.env.desktop.tree import Node
from dart.workers.env.desktop.world import DesktopOptions
from dart.worlds import EnvironmentFailure, SyncEnv, Verdict
from dart.worlds.pictures import NO_IMAGE


class DesktopEnv(SyncEnv):
    """Boots its first desktop when it is made. Raises EnvironmentFailure whenever a desktop fails."""

    def __init__(self, options: BaseModel, screen: tuple[int, int]) -> None:
        assert isinstance(options, DesktopOptions)
        super().__init__(options, screen)
        self._settings = options
        self._task: TaskFile | None = None
        """The episode's task, filled in; None on a fresh desktop."""
        self._launched: list[int] = []
        self._oracle: Oracle | None = None
        self._verdict: Verdict | None = None
        """Set when the world itself has ended the episode."""
        self._closing = False
        self.closed = threading.Event()
        self._session: Session | None = None
        self._boot()

    def reset(self, task: Task) -> Observation:
        """Prepare the task on a fresh desktop. Raises UserError for a task that cannot run here."""
        check_task(task.name)
        if self._task is not None or not self.probe():
            self._boot()
        self._task, self._oracle, self._verdict = load(task.name).instance(task.seed), None, None
        self._launched = setup.carry_out(self._desktop, self._task.config)
        return Observation(self._look(self._settings.rest_seconds), self._task.instruction)

    def act(self, action: Action) -> Observation:
        """Carry out the action; once the episode is over, change nothing."""
        if self._verdict is not None:
            return Observation(NO_IMAGE, "", True, self._verdict.reward)
        before = self._desktop.windows.all()
        self._carry_out(action)
        image = self._look(self._settings.settle_seconds)
        if self._current.ends == "when_closed" and self._desktop.windows.all() != before:
            if setup.closed(self._desktop, self._launched):
                self._verdict = self._grade(Observe())
                return Observation(image, "", True, self._verdict.reward)
            image = self._look(self._settings.rest_seconds)  # of the window that has followed
        return Observation(image, last_action_error=self._desktop.devices.refused(action))

    def conclude(self, action: Action) -> Image:
        if self._verdict is not None:
            return NO_IMAGE
        self._carry_out(action)
        return self._look(self._settings.settle_seconds)

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        """By what the desktop holds, also at the step limit."""
        if self._verdict is None:
            self._verdict = self._grade(last)
        return self._verdict

    def suggest(self) -> Action | None:
        if self._oracle is None:
            self._oracle = Oracle(self._current, self._desktop)
        return self._oracle.next()

    @property
    def target(self) -> Node | None:
        """The widget that the oracle's last action clicks; None if it was not a click."""
        return self._oracle.target if self._oracle else None

    def probe(self) -> bool:
        return self._session is not None and self._session.alive()

    def renew(self) -> bool:
        """Replace the desktop, so that no reset waits for a boot."""
        self._boot()
        return True

    def close(self) -> None:
        self._closing = True
        try:
            self._end()
        finally:
            self.closed.set()

    def kill(self) -> None:
        """End the desktop's processes from any thread, so that a call that hangs in it fails."""
        self._closing = True
        if (session := self._session) is not None:
            session.kill()

    @property
    def session(self) -> Session | None:
        """The desktop in use now; None after a boot that failed."""
        return self._session

    @property
    def _desktop(self) -> Session:
        if self._session is None:
            raise EnvironmentFailure("there is no desktop: its last boot failed")
        return self._session

    @property
    def _current(self) -> TaskFile:
        if self._task is None:
            raise EnvironmentFailure("no episode has begun")
        return self._task

    def _boot(self) -> None:
        self._end()
        if self._closing:
            raise EnvironmentFailure("the environment is being closed")
        self._task = self._oracle = self._verdict = None
        self._session = Session(self.screen)
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            self._session.boot()
            undo.pop_all()

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Wait):
            time.sleep(max(0.0, min(action.seconds, self._settings.max_wait_seconds)))
        devices = self._desktop.devices
        if not devices.refused(action):
            with _server_lost():
                devices.carry_out(action, self._settings.max_wait_seconds)

    def _look(self, still: float) -> Image:
        settings, desktop = self._settings, self._desktop
        with _server_lost():
            pixels = desktop.screen.settled(still, max(still, settings.max_settle_seconds))
            if not desktop.alive():  # the picture of a dead server stays as it was
                raise EnvironmentFailure("the desktop has died")
        return desktop.screen.encode(pixels, settings.screenshot_format, settings.jpeg_quality)

    def _grade(self, last: Action) -> Verdict:
        with _server_lost():
            if self._desktop.windows.all():
                still = self._settings.rest_seconds
                self._desktop.screen.settled(still, max(still, self._settings.max_settle_seconds))
            return grade(self._desktop, self._current, last)


@contextlib.contextmanager
def _server_lost() -> Iterator[None]:
    try:
        yield
    except (xerror.ConnectionClosedError, ConnectionError) as error:
        raise EnvironmentFailure(f"the desktop's X server has died: {error}") from None
