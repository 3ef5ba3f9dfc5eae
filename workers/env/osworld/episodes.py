"""Episodes on one machine: set-up, actions as programs, and the verdict of OSWorld's evaluators."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
from pydantic import JsonValue

from dart.core.action import Action, Finish, Wait
from dart.core.types import Image, Observation, Task
from dart.workers.env.osworld.emulators import Emulators
from dart.workers.env.osworld.evaluator import Evaluators, Last, check_installed, given
from dart.workers.env.osworld.machine import Address, Machine, MachineError
from dart.workers.env.osworld.options import OSWorldOptions
from dart.workers.env.osworld.pools import Pool, StaticHosts
from dart.workers.env.osworld.programs import program
from dart.workers.env.osworld.setup import Downloads, NotEvaluated, Setup, read
from dart.workers.env.osworld.tasks import OSWorldTask, Step, Tasks
from dart.worlds import Env, Full, UserError, Verdict, from_png
from dart.worlds.missing import at_home

log = logging.getLogger(__name__)
TRIED_AGAIN_SECONDS = 900.0
"""How long a task that could not be graded here is refused at once."""
OLD_SECONDS = 86_400.0
"""Files of evaluations that nothing has touched for so long belong to no episode that goes on."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all environments of a worker have together."""

    options: OSWorldOptions
    screen: tuple[int, int]
    tasks: Tasks
    client: httpx.AsyncClient
    downloads: Downloads
    pool: Pool
    evaluators: Evaluators
    without_result: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Tasks that were found to be impossible to grade here: when (time.monotonic), and why."""

    @classmethod
    def make(cls, options: OSWorldOptions, screen: tuple[int, int]) -> Shared:
        """Raises UserError for a folder without tasks, and a proxy that cannot be used."""
        tasks, state = Tasks(options.tasks_folder), at_home(options.state_folder)
        # No proxies from the environment: machines are on a network of one's own. No limit: each has its own requests.
        client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None))
        pool: Pool = (
            StaticHosts(options.static, state / "hosts", client)
            if options.pool == "static"
            else Emulators(options.emulator, options.state_folder, client)
        )
        evaluators = Evaluators(options.evaluators, options.evaluator_processes, options.evaluator_seconds)
        try:
            outside = httpx.AsyncClient(follow_redirects=True)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"downloads cannot use the proxy that the environment names ({error}): correct http_proxy, https_proxy "
                "or all_proxy"
            ) from None
        return cls(options, screen, tasks, client, Downloads(state / "downloads", outside), pool, evaluators)

    async def start(self) -> None:
        await asyncio.to_thread(check_installed, self.options.evaluators)
        await asyncio.to_thread(remove_old, evaluations(self.options))
        await self.pool.start()

    async def close(self) -> None:
        """Close all of them, also if one fails to close: machines that are not given back cost money."""
        async with contextlib.AsyncExitStack() as parts:
            for close in (self.client.aclose, self.downloads.close, self.pool.close, self.evaluators.close):
                parts.push_async_callback(close)


def evaluations(options: OSWorldOptions) -> Path:
    """The folder for files of evaluations."""
    return at_home(options.state_folder) / "evaluations"


def remove_old(folder: Path) -> None:
    """Remove what workers that were killed left there. Others may be at work in the same folder."""
    for found in folder.glob("*"):
        with contextlib.suppress(OSError):
            if time.time() - found.stat().st_mtime > OLD_SECONDS:
                shutil.rmtree(found, ignore_errors=True)


class WrongScreen(MachineError):
    """A machine's screen is not as large as the config says."""


class OSWorldEnv(Env):
    """One machine, which changes when a pool replaces it. Make one with `boot`."""

    def __init__(self, shared: Shared, address: Address) -> None:
        super().__init__(shared.options, shared.screen)
        self._shared, self._settings = shared, shared.options
        self._machine: Machine | None = Machine(address, shared.client)
        self._used = not shared.pool.fresh
        """Whether an episode may have changed the machine since it was made or reverted."""
        self._shown = shared.screen
        """The size of the last screenshot: an action may change the screen's."""
        self._name = ""
        self._task: OSWorldTask | None = None

    @classmethod
    async def boot(cls, shared: Shared) -> Self:
        """Take a machine, revert it if an episode may have left something there, and wait until it answers.

        Raises Full, MachineError, and UserError for a wrong screen.
        """
        env = cls(shared, await shared.pool.take())
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(env.close)
            try:
                await (env._revert() if env._used else env._ready())
            except WrongScreen as error:
                raise UserError(str(error)) from None
            undo.pop_all()
        return env

    async def reset(self, task: Task) -> Observation:
        """Set the task up and wait; a machine that an episode has used is reverted first.

        Raises UserError for a task that cannot be graded here (NotEvaluated).
        """
        loaded = self._shared.tasks.load(task.name)
        self._name, self._task = task.name, loaded
        with self._not_evaluated():
            for step in (*loaded.config, *loaded.evaluator.postconfig):
                read(step)
            await self._shared.evaluators.check(loaded)
            await self._revert()
            self._used = True
            self._clear_files()
            await self._setup().run(loaded.config)
        await asyncio.sleep(self._settings.start_seconds)
        return Observation(await self._look(), loaded.instruction)

    async def act(self, action: Action) -> Observation:
        """An action whose program fails is the policy's mistake, and it is told so."""
        error = await self._carry_out(action)
        return Observation(await self._look(), last_action_error=error)

    async def conclude(self, action: Action) -> Image:
        await self._carry_out(action)
        return await self._look()

    async def _carry_out(self, action: Action) -> str:
        """Run the action's program, and wait. Returns what went wrong."""
        error = ""
        if words := program(action, self._shown, self._settings.typing):
            ran = await self._here().pyautogui(words)
            if ran.returncode:
                error = f"its program ended with {ran.returncode}: {ran.error[-300:]}"
        if isinstance(action, Wait):
            await asyncio.sleep(min(max(action.seconds, 0.0), self._settings.max_wait_seconds))
        await asyncio.sleep(self._settings.settle_seconds)
        return error

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        """OSWorld's own verdict, also at the step limit. A final FAIL is a success on infeasible tasks alone."""
        assert self._task is not None, "the env worker judges after a reset"
        said = self._last(last)
        with self._noted():
            graded = await self._shared.evaluators.evaluate(self._task, said, self._given())
        if graded.error:
            log.warning("%s: OSWorld's evaluator raised, which counts as 0: %s", self._name, graded.error)
        evidence = {"func": self._func, "last_action": said, "evaluator_error": graded.error}
        return Verdict(graded.reward, evidence)

    async def probe(self) -> bool:
        if self._machine is None or not await self._machine.answers():
            return False
        # The screenshot alone may still work where programs do not start any more.
        with contextlib.suppress(MachineError):
            return (await self._machine.execute(["python", "-c", "print(1)"])).output.strip() == "1"
        return False

    async def renew(self) -> bool:
        try:
            await self._revert()
        except (MachineError, Full) as error:
            log.warning("a machine could not be reverted: %s", error)
            return False
        return True

    async def close(self) -> None:
        machine, self._machine = self._machine, None
        if machine is not None:
            try:
                await self._remove_files(machine)
            finally:  # cancelled, too: a machine costs money
                await self._shared.pool.give_back(machine.address)

    # ---- the machine ----

    def _here(self) -> Machine:
        if self._machine is None:
            raise MachineError("the environment has no machine any more")
        return self._machine

    async def _revert(self) -> None:
        """Raises MachineError and Full."""
        if not self._used:
            return
        machine, self._machine = self._here(), None
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._shared.pool.give_back, machine.address)
            await self._remove_files(machine)
            address = await self._shared.pool.revert(machine.address)
            undo.pop_all()
        self._machine, self._used = Machine(address, self._shared.client), False
        await self._ready()

    async def _ready(self) -> None:
        """Wait until the machine answers. Raises WrongScreen if its screen is not the one that the config says."""
        machine = self._here()
        await machine.wait(self._settings.boot_seconds)
        image = _image(await machine.screenshot())
        if (image.width, image.height) != tuple(self.screen):
            raise WrongScreen(
                f"environment.viewport is {list(self.screen)}, but the screen of {machine.address.url} has "
                f"{image.width} x {image.height} pixels: write environment.viewport: [{image.width}, {image.height}]"
            )

    async def _look(self) -> Image:
        image = _image(await self._here().screenshot())
        self._shown = image.width, image.height
        return image

    # ---- set-up and verdict ----

    def _setup(self) -> Setup:
        settings = self._settings
        return Setup(
            self._here(), self._shared.downloads, self._files, self.screen, settings.password, settings.setup_seconds,
            self._step_by_evaluator,
        )  # fmt: skip

    async def _step_by_evaluator(self, step: Step) -> None:
        await self._shared.evaluators.step(step, self._given())

    def _given(self) -> dict[str, JsonValue]:
        return given(self._here().address, self._files, self.screen, self._settings.password)

    @property
    def _files(self) -> Path:
        """Where the evaluator keeps files of this episode: no two machines share a folder."""
        assert self._task is not None
        return self._files_of(self._here()) / self._task.id

    def _files_of(self, machine: Machine) -> Path:
        return evaluations(self._settings) / re.sub(r"[^\w.-]", "_", machine.address.id)

    async def _remove_files(self, machine: Machine) -> None:
        """Of a machine that is reverted or given back: the next one may have another name, for ever."""
        await asyncio.to_thread(shutil.rmtree, self._files_of(machine), ignore_errors=True)

    def _clear_files(self) -> None:
        shutil.rmtree(self._files.parent, ignore_errors=True)
        self._files.mkdir(parents=True)

    @property
    def _func(self) -> JsonValue:
        assert self._task is not None
        return self._task.evaluator_json["func"]

    def _last(self, last: Action) -> Last:
        """OSWorld's word for the last action.

        Its agent for UI-TARS waits at the first calls of the user, and sends FAIL only at one beyond its
        `callusr_tolerance`. Here the first call ends the episode.
        """
        match last:
            case Finish() if last.refuses:
                return "FAIL"
            case Finish("fail"):
                return self._settings.failure_is
            case Finish():
                return "DONE"
            case _:
                return ""

    def _not_evaluated(self) -> contextlib.AbstractContextManager[None]:
        """A task that has no result here is not begun again for a while: each attempt would take minutes to say the
        same. It is begun again then, because a file or a package may be there later."""
        since, why = self._shared.without_result.get(self._name, (0.0, ""))
        if why and time.monotonic() < since + TRIED_AGAIN_SECONDS:
            raise NotEvaluated(f"{self._name} is not evaluated: {why}")
        return self._noted()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Episodes that are under way are evaluated all the same: what has kept one from a result may be its own."""
        try:
            yield
        except NotEvaluated as error:
            log.error("%s is not evaluated: %s", self._name, error)
            self._shared.without_result[self._name] = (time.monotonic(), str(error))
            raise NotEvaluated(f"{self._name} is not evaluated: {error}") from None


def _image(data: bytes) -> Image:
    try:
        return from_png(data)
    except ValueError as error:
        raise MachineError(str(error)) from None
