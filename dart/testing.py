"""Checks that a world keeps to its contract (`dart.worlds.contract`), in one line of a test of your own:

    from dart.testing import conform

    def test_my_world():
        conform("my_world:MyWorld", "a-task", "another-task")

It runs the world without a coordinator and without a model: first verb by verb, then in the env worker that will host
it. An AssertionError says what is wrong.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dart.config import Environment, EnvWorkerConfig
from dart.core.action import (
    Action,
    Button,
    Click,
    Code,
    Drag,
    Finish,
    Keys,
    Move,
    Observe,
    Point,
    Scroll,
    System,
    TypeText,
    Wait,
)
from dart.core.action_json import kind_of
from dart.core.types import Image, Observation, Task
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, task_to_proto
from dart.wire.rules.table import INSTRUCTION_CHARACTERS, MOST_GOAL_IMAGES
from dart.workers.env.role import EnvRole
from dart.worlds.contract import MOST_EVIDENCE_BYTES, Env, Verdict
from dart.worlds.plugs import check, make, read_options

T = TypeVar("T")
_MIDDLE, _CORNER = Point(0.5, 0.5), Point(0.01, 0.99)
ACTIONS: tuple[Action, ...] = (
    Observe(), Move(_MIDDLE), Click(_MIDDLE), Click(None, "right", 2, ("Control_L",)), Button(_CORNER, mode="down"),
    Button(None, mode="up"), Drag((_MIDDLE, _CORNER)), Scroll(_MIDDLE, 0, 3), Keys(("Control_L", "a")),
    TypeText("it's é\n"), Wait(0.01), System("back"), Code("python", "1"), Click(_MIDDLE, hold_seconds=0.1),
    Drag((_CORNER, _MIDDLE, _CORNER), "left", 0.1),
)  # fmt: skip
"""At least one action of each kind; a world never gets the kinds that it does not list in `actions`."""
STILL_SECONDS = (0.3, 0.2, 0.2, 0.2, 0.2, 0.2)
FINISHES = (Finish(), Finish("fail"), Finish("infeasible"), Finish("call_user"), Finish(answer="42"))


@dataclass(frozen=True, slots=True)
class _Case:
    kind: str
    tasks: Sequence[str]
    options: Mapping[str, object]
    screen: tuple[int, int]
    repeatable: bool
    seed: int


def conform(
    kind: str,
    *tasks: str,
    options: Mapping[str, object] | None = None,
    screen: tuple[int, int] = (160, 224),
    repeatable: bool = True,
    seed: int = 1,
) -> None:
    """Raises AssertionError if the world `kind` (as in `environment.kind`) does not keep to its contract.

    `options` and `screen`: as `environment.options` and `environment.viewport`. `repeatable`: the same task begins with
    the same screenshot, to the pixel, and shows nothing new without an action; False for a world with a clock or a
    blinking caret.
    """
    _expect(bool(tasks), "name at least one task that the world has")
    case = _Case(kind, tasks, options or {}, screen, repeatable, seed)
    asyncio.run(_alone(case))
    asyncio.run(_hosted(case))


def begin(kind: str, task: str, options: Mapping[str, object], screen: tuple[int, int], seed: int) -> None:
    """Make one environment of the world, show the beginning of the task, and take a step. Raises AssertionError with
    the verb that failed, or UserError."""
    asyncio.run(_begin(_Case(kind, (task,), options, screen, repeatable=False, seed=seed)))


async def _begin(case: _Case) -> None:
    plug = check(case.kind, case.options, case.tasks)
    world = make(plug)
    try:
        await world.start(read_options(plug, case.options), case.screen)
        env = _Watched(await world.lease())
        task = Task(case.kind, case.tasks[0], case.seed)
        _seen(await env.reset(task), f"reset({task.id})")
        action = next((action for action in ACTIONS if kind_of(action) in plug.actions), Observe())
        _seen(await env.act(action), f"act({action})")
    finally:
        await world.close()


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


# ---- verb by verb ----


class _Watched(Env):
    """An environment that reports which verb raised, and what."""

    def __init__(self, env: Env) -> None:
        self._env = env

    async def _named(self, what: str, verb: Awaitable[T]) -> T:
        try:
            return await verb
        except Exception as error:
            raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error

    async def reset(self, task: Task) -> Observation:
        return await self._named(f"reset({task.id})", self._env.reset(task))

    async def act(self, action: Action) -> Observation:
        return await self._named(f"act({action})", self._env.act(action))

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        return await self._named(f"judge({last}, at_limit={at_limit})", self._env.judge(last, at_limit))

    async def conclude(self, action: Action) -> Image:
        return await self._named(f"conclude({action})", self._env.conclude(action))

    async def probe(self) -> bool:
        return await self._named("probe()", self._env.probe())

    async def renew(self) -> bool:
        return await self._named("renew()", self._env.renew())

    async def suggest(self) -> Action | None:
        return await self._named("suggest()", self._env.suggest())


async def _alone(case: _Case) -> None:
    plug = check(case.kind, case.options, case.tasks)
    world = make(plug)
    before = _threads()
    try:
        await world.start(read_options(plug, case.options), case.screen)
        leased = await world.lease(), await world.lease()
        _expect(leased[0] is not leased[1], "two leases gave the same environment")
        one, other = (_Watched(env) for env in leased)
        for env in (one, other):
            _expect(await env.probe() is True, "probe() of a new environment is not True")
        for name in case.tasks:
            await _begins(case, one, other, Task(case.kind, name, case.seed))
        await _acts(case, one, other, sorted(plug.actions))
        await _judges(case, one)
        await _renews(case, one)
        for name in set(case.tasks) & set(plug.oracle_tasks()):
            await _suggests(case, one, name)
        await world.dispose(leased[0])
        _expect(await other.probe() is True, "disposing of one environment broke another")
    finally:
        await world.close()
    await _threads_end(before)


async def _begins(case: _Case, one: Env, other: Env, task: Task) -> None:
    first = _seen(await one.reset(task), f"reset({task.id})")
    _expect(bool(first.instruction or first.goal_images), f"reset({task.id}) has no instruction")
    length = len(first.instruction)
    _expect(length <= INSTRUCTION_CHARACTERS, f"reset({task.id})'s instruction has {length:,} characters: at most "
            f"{INSTRUCTION_CHARACTERS:,} are sent")  # fmt: skip
    goals = len(first.goal_images)
    _expect(goals <= MOST_GOAL_IMAGES, f"reset({task.id}) has {goals} goal_images: at most {MOST_GOAL_IMAGES} are sent")
    _expect(not first.done, f"reset({task.id}) is done before anything was done")
    for again in (await one.reset(task), await other.reset(task)):
        what = f"the same task {task.id} began"
        _expect(again.instruction == first.instruction, f"{what} with another instruction: {again.instruction!r}")
        same = again.image.sha256 == first.image.sha256
        _expect(same or not case.repeatable, f"{what} with another screenshot: if that is meant, repeatable=False")


async def _acts(case: _Case, one: Env, other: Env, offered: Sequence[str]) -> None:
    """Every action that the world lists can be carried out, and changes nothing elsewhere."""
    task = Task(case.kind, case.tasks[0], case.seed)
    start = await other.reset(task)
    for action in ACTIONS:
        if kind_of(action) in offered:
            await one.reset(task)
            seen = _seen(await one.act(action), f"act({action})")
            if case.repeatable and not seen.done and "observe" in offered:
                await _stays(one, seen, f"act({action})")
    after = _seen(await other.act(Observe()), "act(Observe())")
    same = after.image.sha256 == start.image.sha256
    _expect(same or not case.repeatable, "acting on one environment changed another's screenshot")


async def _stays(env: Env, seen: Observation, what: str) -> None:
    """What an action began is over when it returns. A caret that blinks is soon back as it was."""
    for pause in STILL_SECONDS:
        await asyncio.sleep(pause)
        again = _seen(await env.act(Observe()), "act(Observe())")
        if again.done or again.image.sha256 == seen.image.sha256:
            return
    raise AssertionError(f"the screenshot changed by itself after {what}: wait for what it began, or repeatable=False")


async def _judges(case: _Case, env: Env) -> None:
    task = Task(case.kind, case.tasks[0], case.seed)
    for last in FINISHES:
        await env.reset(task)
        _judged(await env.judge(last, False), f"judge({last}, at_limit=False)")
    await env.reset(task)
    shown: object = await env.conclude(Observe())
    _expect(shown is None or isinstance(shown, Image), f"conclude(Observe()) gave {shown!r}, not an Image")
    _judged(await env.judge(Observe(), True), "judge(Observe(), at_limit=True)")


async def _renews(case: _Case, env: Env) -> None:
    task = Task(case.kind, case.tasks[0], case.seed)
    start = await env.reset(task)
    renewed = await env.renew()
    _expect(renewed is True, f"renew() of an environment that works gave {renewed!r}, not True")
    again = await env.reset(task)
    same = (again.instruction, again.image.sha256) == (start.instruction, start.image.sha256)
    _expect(same or not case.repeatable, "after renew() the same task began with another screenshot")


async def _suggests(case: _Case, env: Env, name: str) -> None:
    """The oracle does the task, or gets stuck, within a hundred actions."""
    seen = await env.reset(Task(case.kind, name, case.seed))
    for _ in range(100):
        if seen.done or (action := await env.suggest()) is None:
            break
        if isinstance(action, Finish):
            break
        seen = await env.act(action)
    else:
        raise AssertionError(f"the oracle of {name} does not end: 100 actions were not enough")


def _threads() -> set[threading.Thread]:
    """The live threads, without the loop's own executor, which keeps its threads until the loop is closed."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


async def _threads_end(before: set[threading.Thread]) -> None:
    for _ in range(100):
        if _threads() <= before:
            return
        await asyncio.sleep(0.05)
    left = ", ".join(sorted(thread.name for thread in _threads() - before))
    raise AssertionError(f"threads are left after the world was closed: {left}")


def _seen(observation: Observation, what: str) -> Observation:
    _expect(isinstance(observation, Observation), f"{what} gave {observation!r}, not an Observation")
    image = observation.image
    if not observation.done:
        _expect(bool(image.data), f"{what} shows no screenshot")
        _expect(image.width > 0 and image.height > 0, f"{what} shows a picture of {image.width} x {image.height}")
        _expect(image.media_type.startswith("image/"), f"{what} shows {image.media_type!r}, which is not an image")
    for name in ("accessibility_tree", "last_action_error"):
        text = getattr(observation, name)
        _expect(isinstance(text, str), f"{what}: {name} is {text!r}, not a text")
    for goal in observation.goal_images:
        _expect(isinstance(goal, Image) and bool(goal.data), f"{what}: goal_images has {goal!r}, not a whole picture")
    return observation


def _judged(verdict: Verdict, what: str) -> None:
    _expect(isinstance(verdict, Verdict), f"{what} gave {verdict!r}, not a Verdict")
    _expect(math.isfinite(verdict.reward), f"{what}: the reward is {verdict.reward}, not a number in [0, 1]")
    evidence = verdict.evidence_json()
    _expect(
        len(evidence) <= MOST_EVIDENCE_BYTES, f"{what}: {len(evidence)} bytes of evidence, above {MOST_EVIDENCE_BYTES}"
    )
    if evidence:
        _expect(isinstance(json.loads(evidence), dict), f"{what}: the evidence is not a JSON object")


# ---- in the env worker ----


async def _hosted(case: _Case) -> None:
    """Four episodes on two environments, command by command, as a coordinator would send them."""
    role, said = EnvRole(), asyncio.Queue[pb.Slots]()
    environment = Environment.model_validate(
        {
            "kind": case.kind, "options": case.options, "viewport": case.screen, "slots": 2,
            "tasks": {"names": list(case.tasks)},
        }
    )  # fmt: skip
    try:
        await role.prepare(EnvWorkerConfig(environment=environment).model_dump_json())
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(role.run(said.put_nowait))
            while (slots := await said.get()).count < 2:
                _expect(not slots.reason, f"an environment did not boot: {slots.reason}")
            for turn in range(2):
                names = [f"{turn}-{place}" for place in range(2)]
                await asyncio.gather(*(_episode(role, case, name) for name in names))
            running.cancel()
    finally:
        await role.close()


async def _episode(role: EnvRole, case: _Case, name: str) -> None:
    def assignment() -> pb.Assignment:
        return pb.Assignment(assignment_id=name, attempt=1)

    task = Task(case.kind, case.tasks[0], case.seed)
    seen = await role.handle(pb.Reset(assignment=assignment(), task=task_to_proto(task)))
    _expect(isinstance(seen, pb.Observed) and bool(seen.image.data), "Reset was not answered with a screenshot")
    last = await role.handle(pb.Act(assignment=assignment(), action=action_to_proto(Finish()), last=True))
    _expect(isinstance(last, pb.Observed) and last.done, "the last action was not answered with a verdict")
    await role.handle(pb.Release(assignment=assignment()))
