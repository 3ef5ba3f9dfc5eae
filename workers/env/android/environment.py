"""One environment of the world `android`: a device, and where its tasks come from."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from dart.core.action import Action
from dart.core.types import Image, Observation, Task
from dart.workers.env.android.adb import DeviceError
from dart.workers.env.android.device import Phone
from dart.workers.env.android.gestures import Named, Refused
from dart.workers.env.android.options import AndroidOptions
from dart.worlds import Env, Verdict

log = logging.getLogger(__name__)
CLOSE_SECONDS = 60.0
"""How long the last task's tear-down may take when the environment is given up."""


class Tasks(Protocol):
    """Prepares and grades tasks on one device. Every method raises DeviceError if device or server do not answer."""

    @property
    def step_limit(self) -> int | None:
        """The task's own limit, if it has one."""

    async def begin(self, name: str, seed: int) -> str:
        """Prepare the task; returns its instruction. Raises UserError if there is no such task."""

    async def verdict(self, last: Action, at_limit: bool) -> Verdict: ...

    async def end(self) -> None:
        """Tear down what `begin` began, also if that failed; nothing if there is nothing."""

    async def open_app(self, name: str) -> str:
        """Open an app by a name that is not a package; returns why it could not."""

    async def alive(self) -> bool: ...


class AndroidEnv(Env):
    """One device, with its tasks."""

    def __init__(self, options: AndroidOptions, screen: tuple[int, int], phone: Phone, tasks: Tasks) -> None:
        super().__init__(options, screen)
        self._settings, self.phone, self._tasks = options, phone, tasks
        self._steps = 0

    async def reset(self, task: Task) -> Observation:
        """An episode that was given up is torn down first, as `renew` would."""
        await self._tasks.end()
        self._steps = 0
        instruction = await self._tasks.begin(task.name, task.seed)
        await self.phone.measure()  # a task may change the screen's size
        return await self._seen(instruction)

    async def act(self, action: Action) -> Observation:
        error = await self._carry_out(action)
        if self._steps >= (self._tasks.step_limit or self._steps + 1):
            return Observation(await self._settled(), done=True)  # the verdict is about what it has become
        return await self._seen(error=error)

    async def conclude(self, action: Action) -> Image:
        await self._carry_out(action)
        return await self._settled()

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        return await self._tasks.verdict(last, at_limit)

    async def probe(self) -> bool:
        return await self.phone.alive() and await self._tasks.alive()

    async def renew(self) -> bool:
        """Tear the task down, and make the device ready as `renew` says."""
        await self._tasks.end()
        await self.phone.renew()
        return True

    async def close(self) -> None:
        """Leave no task behind, if the device still answers."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._tasks.end()
        except (DeviceError, TimeoutError) as error:
            log.warning("%s: its last task was not torn down: %s", self.phone.name, error or "it took too long")

    async def _carry_out(self, action: Action) -> str:
        """Returns why the action could not be carried out; empty if it was."""
        self._steps += 1
        try:
            done = await self.phone.carry_out(action)
        except Refused as error:
            return str(error)
        return await self._tasks.open_app(done.app) if isinstance(done, Named) else done

    async def _settled(self) -> Image:
        return await self.phone.settled(self._settings.settle_seconds, self._settings.max_settle_seconds)

    async def _seen(self, instruction: str = "", error: str = "") -> Observation:
        image = await self._settled()
        tree = await self.phone.tree() if self._settings.accessibility_tree else ""
        return Observation(image, instruction, accessibility_tree=tree, last_action_error=error)
