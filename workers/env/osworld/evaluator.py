"""OSWorld's own evaluators, in processes of their own that speak JSON lines (`evaluator_process.py`).

They need Python 3.12 and some hundred megabytes of packages, so they live in a virtual environment of their own, which
`python -m dart.workers.env.osworld install-evaluators` makes. A process that takes too long is killed and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, JsonValue

from dart.errors import UserError
from dart.workers.env.osworld.machine import Address, MachineError
from dart.workers.env.osworld.setup import NotEvaluated
from dart.workers.env.osworld.tasks import OSWorldTask, Step
from dart.worlds import limited
from dart.worlds.missing import at_home
from dart.worlds.programs import end

log = logging.getLogger(__name__)
PROGRAM = Path(__file__).with_name("evaluator_process.py")
REQUIREMENT = "osworld-cube==0.3.0"
CHECK_SECONDS = 180.0
"""Importing a metric's packages takes seconds on a quiet machine."""
LINE_BYTES = 1 << 20
Last = Literal["DONE", "FAIL", ""]


class Graded(BaseModel):
    """What OSWorld's evaluator says. `error`: what it raised, which counts as a reward of 0."""

    reward: float
    error: str = ""


class _Answer(BaseModel):
    id: int
    reward: float | None = None
    error: str = ""
    machine_lost: str = ""
    not_evaluated: str = ""
    broken: str = ""


def python(folder: Path) -> Path:
    """The interpreter of the evaluators' environment."""
    return at_home(folder) / "bin" / "python"


def missing(folder: Path) -> str | None:
    """What is wrong with the evaluators' environment, and the remedy; None if it is there."""
    remedy = "run `python -m dart.workers.env.osworld install-evaluators`"
    executable = python(folder)
    if not executable.is_file():
        return f"environment.options.evaluators: {executable} does not exist: {remedy}"
    found = subprocess.run(
        [executable, "-c", "from importlib.metadata import version; print(version('osworld-cube'))"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if found.returncode != 0:
        return f"environment.options.evaluators: {folder} has no osworld-cube: {remedy}"
    wanted = REQUIREMENT.partition("==")[2]
    if found.stdout.strip() != wanted:
        return (
            f"environment.options.evaluators: {folder} has osworld-cube {found.stdout.strip()}, not {wanted}: {remedy}"
        )
    return None


class _Process:
    """One evaluator process, started when it is first asked."""

    def __init__(self, executable: Path) -> None:
        self._executable = executable
        self._process: Process | None = None
        self._asked = 0

    async def ask(self, asked: Mapping[str, JsonValue], seconds: float) -> _Answer:
        """Raises TimeoutError, and MachineError if the process ends without an answer; it is then replaced."""
        async with contextlib.AsyncExitStack() as undo:
            # Also if it is cancelled: an answer that nobody reads would be taken for the next one's.
            undo.push_async_callback(self.close)
            async with asyncio.timeout(seconds):
                answer = await self._ask(asked)
            undo.pop_all()
        return answer

    async def _ask(self, asked: Mapping[str, JsonValue]) -> _Answer:
        if self._process is None:
            # If the worker is killed, the next one may revert the machine that this process is about to change.
            tied = (sys.executable, "-I", "-S", limited.__file__, str(os.getpid()), "0", "0")
            self._process = await asyncio.create_subprocess_exec(
                *tied, self._executable, PROGRAM, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES, start_new_session=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked += 1
        self._process.stdin.write(json.dumps({"id": self._asked, **asked}).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise ConnectionResetError("the evaluator's process ended: its own words are in the worker's log")
        return _Answer.model_validate_json(line)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await end(process)


class Evaluators:
    """`count` evaluator processes, each used by one machine at a time."""

    def __init__(self, folder: Path, count: int, seconds: float) -> None:
        self._seconds = seconds
        self._processes = [_Process(python(folder)) for _ in range(count)]
        self._free: asyncio.Queue[_Process] = asyncio.Queue()
        for process in self._processes:
            self._free.put_nowait(process)
        self._checked: set[str] = set()
        """Metrics and getters that can be used here. Of the others a missing package may be installed meanwhile."""

    async def check(self, task: OSWorldTask) -> None:
        """Raises NotEvaluated if a package that the task's metrics or getters need is missing."""
        key = json.dumps(task.evaluator_json, sort_keys=True)
        if key not in self._checked:
            answer = await self._ask({"op": "check", "evaluator": task.evaluator_json}, CHECK_SECONDS)
            if answer.not_evaluated:
                raise NotEvaluated(answer.not_evaluated)
            self._checked.add(key)

    async def step(self, step: Step, given: Mapping[str, JsonValue]) -> None:
        """Carry out a set-up step. Raises MachineError and NotEvaluated."""
        asked: dict[str, JsonValue] = {"op": "step", "step": step.model_dump(mode="json"), **given}
        await self._ask(asked, self._seconds)

    async def evaluate(self, task: OSWorldTask, last: Last, given: Mapping[str, JsonValue]) -> Graded:
        """Raises MachineError if the machine is lost, and NotEvaluated if the task cannot be graded here."""
        asked: dict[str, JsonValue] = {"op": "evaluate", "evaluator": task.evaluator_json, "last": last, **given}
        answer = await self._ask(asked, self._seconds)
        if answer.reward is None:
            raise MachineError("the evaluator gave no reward")
        return Graded(reward=answer.reward, error=answer.error)

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _ask(self, asked: Mapping[str, JsonValue], seconds: float) -> _Answer:
        process = await self._free.get()
        try:
            answer = await process.ask(asked, seconds)
        except TimeoutError:
            raise MachineError(f"OSWorld's evaluator took longer than {seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise MachineError(f"OSWorld's evaluator failed: {error}") from error
        finally:
            self._free.put_nowait(process)
        if answer.machine_lost:
            raise MachineError(answer.machine_lost)
        if answer.broken:
            raise MachineError(f"OSWorld's evaluator failed: {answer.broken}")
        if answer.not_evaluated and asked["op"] != "check":
            raise NotEvaluated(answer.not_evaluated)
        return answer


def given(address: Address, cache: Path, screen: tuple[int, int], password: str) -> dict[str, JsonValue]:
    """What an evaluator process is told about the machine."""
    machine: dict[str, JsonValue] = asdict(address)
    return {"machine": machine, "cache": str(cache), "screen": list(screen), "password": password}


async def without_evaluator(folder: Path, tasks: Mapping[str, OSWorldTask]) -> dict[str, str]:
    """Tasks that the evaluators in the folder cannot grade, and why."""
    evaluators, found = Evaluators(folder, 1, CHECK_SECONDS), {}
    try:
        for name, task in tasks.items():
            try:
                await evaluators.check(task)
            except NotEvaluated as error:
                found[name] = str(error)
    finally:
        await evaluators.close()
    return found


def check_installed(folder: Path) -> None:
    """Raises UserError if the evaluators are not there."""
    if problem := missing(folder):
        raise UserError(problem)
