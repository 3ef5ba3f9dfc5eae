"""What happens at the step limit: the last action counts, the verdict is asked for once, and it counts too.

The episode of `dart.agent` on an environment of the real env worker's role, without a browser and without processes.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from dart.agent.episode import ContextFull, EpisodeSpec, run_episode
from dart.agent.grammar import make_grammar
from dart.config import Agent, Environment, EnvWorkerConfig
from dart.core import action as a
from dart.core.evaluation.outcomes import Failure, failure
from dart.core.types import Generation, Prompt, Termination, Trajectory, VersionSpan
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, observation_from_proto, task_to_proto
from dart.workers.env.role import EnvRole
from dart.workers.env.web import WebEnv, WebOptions
from dart.worlds import NO_IMAGE, Action, Observation, SyncEnv, Task, Verdict, WorldOptions, from_pixels

AGENT = Agent(prompt="minimal", resize_multiple=1, min_pixels=1)
PICTURES = [from_pixels(bytes((clicks, 0, 0)), 1, 1) for clicks in range(4)]
"""What is seen after so many clicks."""
PICTURE = PICTURES[0]
CLICK, FINISH, NONSENSE = "Action: click(start_box='(000,000)')", "Action: finished(content='')", "Action: fly()"
FULL = "no more room in the context"
ASSIGNMENT = pb.Assignment(assignment_id="e", attempt=1)


class Clicks(SyncEnv):
    """Asks for three clicks. The task says whether the world ends the episode when they are done."""

    class Options(WorldOptions):
        pass

    judged: ClassVar[int] = 0

    def reset(self, task: Task) -> Observation:
        type(self).judged = 0
        self.task, self.clicks = task.name, 0
        return Observation(PICTURES[0], "click three times")

    def act(self, action: Action) -> Observation:
        self.clicks += isinstance(action, a.Click)
        return Observation(PICTURES[self.clicks], done=self.task == "ends" and self.clicks == 3)

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        type(self).judged += 1
        return Verdict(self.clicks / 3, {"at_limit": at_limit})


class Mute(Clicks):
    """A world whose `conclude` returns nothing."""

    def conclude(self, action: Action) -> None:  # type: ignore[override]
        self.act(action)


@dataclass
class Hosted:
    """The environment that an episode sees, as the coordinator would pass it on."""

    role: EnvRole

    async def reset(self, task: Task) -> Observation:
        return await self._ask(pb.Reset(assignment=ASSIGNMENT, task=task_to_proto(task)))

    async def act(self, action: Action, last: bool) -> Observation:
        return await self._ask(pb.Act(assignment=ASSIGNMENT, action=action_to_proto(action), last=last))

    async def judge(self) -> Observation:
        return await self.act(a.Observe(), True)

    async def _ask(self, command: pb.Reset | pb.Act) -> Observation:
        reply = await self.role.handle(command)
        assert isinstance(reply, pb.Observed)
        return observation_from_proto(reply)


class Lines:
    def __init__(self, lines: list[str]) -> None:
        self.lines = iter(lines)

    async def generate(self, prompt: Prompt) -> Generation:
        line = next(self.lines)
        if line == FULL:
            raise ContextFull("no room")
        return Generation((1,), (2,), (-0.5,), (VersionSpan(0, 0, 1),), line)


async def episode(task: str, limit: int, *lines: str, world: type[Clicks] = Clicks) -> Trajectory:
    environment = {"kind": f"{__name__}:{world.__name__}", "tasks": {"names": ["ends", "never-ends"]}, "slots": 1}
    section = EnvWorkerConfig(environment=Environment.model_validate(environment))
    role = EnvRole()
    await role.prepare(section.model_dump_json())
    running = asyncio.create_task(role.run(lambda slots: None))
    try:
        spec = EpisodeSpec("t", "g", Task(section.environment.kind, task, 1), limit, 1.0, AGENT)
        return await run_episode(Hosted(role), Lines(list(lines)), spec, make_grammar(AGENT))
    finally:
        running.cancel()
        await asyncio.wait({running})
        await role.close()


@pytest.mark.parametrize(
    ("task", "limit", "lines", "termination", "reward", "at_limit"),
    [
        ("ends", 4, [CLICK] * 3, Termination.ENVIRONMENT, 1.0, False),
        ("ends", 3, [CLICK] * 3, Termination.STEP_LIMIT, 1.0, True),
        ("ends", 2, [CLICK] * 2, Termination.STEP_LIMIT, 2 / 3, True),
        ("never-ends", 3, [CLICK] * 3, Termination.STEP_LIMIT, 1.0, True),
        ("never-ends", 2, [CLICK] * 2, Termination.STEP_LIMIT, 2 / 3, True),
        ("never-ends", 3, [CLICK, CLICK, FINISH], Termination.FINISHED, 2 / 3, False),
        ("never-ends", 3, [CLICK, CLICK, NONSENSE], Termination.UNPARSABLE, 0.0, True),
    ],
)
async def test_the_last_step_counts_and_is_judged_once(
    task: str, limit: int, lines: list[str], termination: Termination, reward: float, at_limit: bool
) -> None:
    done = await episode(task, limit, *lines)
    assert (done.termination, done.success, len(done.steps)) == (termination, reward == 1.0, len(lines))
    assert done.reward == pytest.approx(reward)
    assert Clicks.judged == 1
    assert json.loads(done.evidence_json) == {"at_limit": at_limit}
    nonsense = termination is Termination.UNPARSABLE
    assert (done.state_judged, done.state_reward) == (nonsense, pytest.approx(2 / 3 if nonsense else 0.0))
    if done.success:
        assert failure(done) is None, "a success in the last step is no failure of the limit"
    elif termination is Termination.STEP_LIMIT:
        assert failure(done) is Failure.STEP_LIMIT


@pytest.mark.parametrize(
    ("lines", "limit", "clicks"),
    [
        ([CLICK] * 3, 4, 3),
        ([CLICK] * 2, 2, 2),
        ([CLICK, FULL], 4, 1),
        ([CLICK, FINISH], 4, None),
        ([CLICK, NONSENSE], 4, None),
    ],
    ids=["the world ends it", "the limit ends it", "the context is full", "it says that it is done", "nonsense"],
)
async def test_the_screen_after_the_last_action_is_kept(lines: list[str], limit: int, clicks: int | None) -> None:
    """None where no action followed the last step's own screenshot."""
    done = await episode("ends", limit, *lines)
    assert done.last_image == (None if clicks is None else PICTURES[clicks])
    assert all(done.last_image not in step.images for step in done.steps)


async def test_a_world_may_show_nothing_after_the_last_action() -> None:
    done = await episode("never-ends", 3, *[CLICK] * 3, world=Mute)
    assert (done.termination, done.reward, done.last_image) == (Termination.STEP_LIMIT, 1.0, None)


class Blank:
    """A page that shows one picture and counts the inputs."""

    broken, inputs, shots = False, 0, 0

    async def clear_clipboard(self) -> None:
        pass

    async def input(self, calls: object) -> None:
        self.inputs += 1

    async def pass_time(self, seconds: float) -> None:
        pass

    async def screenshot(self) -> bytes:
        self.shots += 1
        return PICTURES[self.inputs].data


class Page(WebEnv):
    async def begin(self, task: Task) -> str:
        self.page.inputs = 0  # type: ignore[attr-defined]
        return "click three times"

    async def grade(self) -> tuple[bool, Verdict]:
        clicks = self.page.inputs  # type: ignore[attr-defined]
        return clicks == 3, Verdict(float(clicks == 3))

    @classmethod
    def plan(cls, name: str) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(("before", "reward"), [(1, 0.0), (2, 1.0)])
async def test_a_web_page_is_graded_after_the_last_action(before: int, reward: float) -> None:
    """MiniWoB and the ladder: what the page says after the action that reaches the limit."""
    env = Page(None, WebOptions(), (1, 1), Blank())  # type: ignore[arg-type]
    await env.reset(Task("blank", "any", 1))
    for _ in range(before):
        assert not (await env.act(a.Click(a.Point(0.5, 0.5)))).done
    assert await env.conclude(a.Click(a.Point(0.5, 0.5))) == (PICTURES[2] if before == 1 else NO_IMAGE)
    assert (await env.judge(a.Click(a.Point(0.5, 0.5)), at_limit=True)).reward == reward


class Counted(Page):
    """As worlds were written whose `conclude` returned nothing: every action of an episode comes through it."""

    taken = 0

    async def conclude(self, action: Action) -> None:  # type: ignore[override]
        self.taken += 1
        await super().conclude(action)


@pytest.mark.parametrize(("kind", "shots"), [(Page, 2), (Counted, 3)])
async def test_an_action_on_a_web_page_takes_one_screenshot(kind: type[Page], shots: int) -> None:
    page = Blank()
    env = kind(None, WebOptions(), (1, 1), page)  # type: ignore[arg-type]
    await env.reset(Task("blank", "any", 1))
    assert (await env.act(a.Click(a.Point(0.5, 0.5)))).image == PICTURES[1]
    assert page.shots == shots
    assert getattr(env, "taken", 1) == 1
