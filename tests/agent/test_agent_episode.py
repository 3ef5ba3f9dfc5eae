"""Episodes in a small world: every way that one can end, and what it leaves behind."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from dart.agent.episode import ContextFull, EpisodeSpec, WrongTask, run_episode
from dart.agent.grammar import make_grammar
from dart.config import Agent
from dart.core.action import Action, Click, Finish, Point, Wait
from dart.core.evaluation.outcomes import Failure, Outcome, failure
from dart.core.types import (
    Generation,
    Image,
    Observation,
    Prompt,
    Task,
    Termination,
    Text,
    Tokens,
    Trajectory,
    VersionSpan,
)
from dart.v1 import trajectory_pb2 as tpb
from dart.wire.convert import trajectory_to_proto

AGENT = Agent(prompt="minimal", resize_multiple=1, min_pixels=1, history_screenshots=2)
SPEC = EpisodeSpec("t1", "g1", Task("world", "count", 3), step_limit=4, success_threshold=0.5, agent=AGENT)
CLICK = "Action: click(start_box='(050,025)')"
WAIT = "Action: wait()"
FINISH = "Action: finished(content='ok')"


@dataclass
class World:
    """100×100 screens that show how many actions there were. The n-th action may bring the verdict."""

    verdicts: dict[int, float] = field(default_factory=dict)
    failure: Exception | None = None
    actions: list[tuple[Action, bool]] = field(default_factory=list)
    state: float | None = None
    """The verdict on the state as it is; None if there is none."""

    async def judge(self) -> Observation | None:
        return None if self.state is None else Observation(self._screen(), "", True, self.state, '{"left": 1}')

    def _screen(self) -> Image:
        return Image.of(bytes([len(self.actions)]), "image/png", 100, 100)

    async def reset(self, task: Task) -> Observation:
        return Observation(self._screen(), f"count to {task.seed}")

    async def act(self, action: Action, last: bool) -> Observation:
        if self.failure:
            raise self.failure
        self.actions.append((action, last))
        reward = self.verdicts.get(len(self.actions))
        return Observation(self._screen(), "", reward is not None, reward or 0.0)


@dataclass
class Script:
    """Says its lines one after another; token ids are 10, 11, … and the stop token 0."""

    lines: list[str]
    truncate: bool = False
    prompts: list[Prompt] = field(default_factory=list)

    async def generate(self, prompt: Prompt) -> Generation:
        number = len(self.prompts)
        self.prompts.append(prompt)
        tokens = (10 + number,) if self.truncate else (10 + number, 0)
        spans = (VersionSpan(number, 0, len(tokens)),)
        return Generation((1, 2), tokens, (-0.5,) * len(tokens), spans, self.lines[number], self.truncate)


async def run(world: World, script: Script, spec: EpisodeSpec = SPEC) -> Trajectory:
    return await run_episode(world, script, spec, make_grammar(AGENT))


@pytest.fixture(autouse=True)
def _clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode takes 7.5 s. The wall clock says 100 s, and goes back by an hour whenever it is read."""
    walls, ticks = itertools.count(100.0, -3600.0), itertools.count(1.0, 7.5)
    clocks = SimpleNamespace(time=lambda: next(walls), monotonic=lambda: next(ticks))
    monkeypatch.setattr("dart.agent.episode.time", clocks)


async def test_the_environment_ends_it() -> None:
    world, script = World({2: 1.0}), Script([CLICK, WAIT])
    trajectory = await run(world, script)
    assert trajectory.termination is Termination.ENVIRONMENT
    assert (trajectory.reward, trajectory.success) == (1.0, True)
    assert (trajectory.id, trajectory.group_id, trajectory.task) == ("t1", "g1", SPEC.task)
    assert (trajectory.started, trajectory.finished, trajectory.step_limit) == (100.0, 107.5, 4)
    assert trajectory.instruction == "count to 3"
    assert [step.index for step in trajectory.steps] == [0, 1]
    assert [step.action for step in trajectory.steps] == [Click(Point(0.5, 0.25)), Wait(5.0)]
    assert world.actions == [(Click(Point(0.5, 0.25)), False), (Wait(5.0), False)]
    assert trajectory.oldest_version == 0
    assert [len(step.generation.token_ids) for step in trajectory.steps] == [2, 2]


async def test_the_policy_sees_its_history() -> None:
    script = Script([WAIT, WAIT, WAIT])
    trajectory = await run(World({3: 1.0}), script)
    last = script.prompts[-1]
    assert Text("count to 3") in last.parts
    assert [part.ids for part in last.parts if isinstance(part, Tokens)] == [(10, 0), (11, 0)]
    assert [image.data for image in last.images] == [b"\x01", b"\x02"]  # two screenshots of history
    assert [step.images for step in trajectory.steps] == [prompt.images for prompt in script.prompts]


@pytest.mark.parametrize(("verdict", "reward", "success"), [(None, 0.0, False), (0.4, 0.4, False), (0.5, 0.5, True)])
async def test_the_policy_finishes_and_the_environment_judges(
    verdict: float | None, reward: float, success: bool
) -> None:
    world = World({} if verdict is None else {2: verdict})
    trajectory = await run(world, Script([CLICK, FINISH]))
    assert trajectory.termination is Termination.FINISHED
    assert (trajectory.reward, trajectory.success) == (reward, success)
    assert world.actions[-1] == (Finish("success", "ok"), True)
    assert trajectory.steps[-1].action == Finish("success", "ok")


@pytest.mark.parametrize(("verdicts", "reward"), [({}, 0.0), ({4: 1.0}, 1.0)])
async def test_the_step_limit(verdicts: dict[int, float], reward: float) -> None:
    world = World(verdicts)
    trajectory = await run(world, Script([WAIT] * 9))
    assert trajectory.termination is Termination.STEP_LIMIT
    assert (trajectory.reward, trajectory.success) == (reward, reward == 1.0)
    assert [last for _, last in world.actions] == [False, False, False, True]
    assert len(trajectory.steps) == 4


@dataclass
class Forgetful(Script):
    """Its context holds so many turns."""

    turns: int = 0

    async def generate(self, prompt: Prompt) -> Generation:
        if len(self.prompts) == self.turns:
            raise ContextFull("the prompt is longer than rollout.max_model_len")
        return await super().generate(prompt)


async def test_a_history_that_outgrows_the_context_is_no_infrastructure_failure() -> None:
    trajectory = await run(World({1: 0.7}), Forgetful([WAIT] * 3, turns=2))
    assert trajectory.termination is Termination.ENVIRONMENT
    trajectory = await run(World(), Forgetful([WAIT] * 3, turns=2))
    assert trajectory.termination is Termination.CONTEXT_FULL
    assert (trajectory.reward, trajectory.success, len(trajectory.steps)) == (0.0, False, 2)
    assert failure(trajectory) is Failure.CONTEXT_FULL
    assert trajectory_to_proto(trajectory, (), "", True).termination == tpb.TERMINATION_CONTEXT_FULL
    with pytest.raises(ContextFull):
        await run(World(), Forgetful([WAIT] * 3))


async def test_text_that_is_no_action() -> None:
    world = World()
    trajectory = await run(world, Script([CLICK, "Action: fly()"]))
    assert trajectory.termination is Termination.UNPARSABLE
    assert (trajectory.reward, trajectory.success) == (0.0, False)
    assert len(world.actions) == 1
    failed = trajectory.steps[-1]
    assert failed.action is None
    assert failed.parse_error.startswith("unknown_action: 'fly'")
    assert failed.generation.text == "Action: fly()"
    assert trajectory.steps[0].parse_error == ""


@pytest.mark.parametrize(("state", "success"), [(None, False), (0.0, False), (0.4, False), (0.5, True), (1.0, True)])
async def test_the_state_that_such_text_leaves_is_judged_beside_it(state: float | None, success: bool) -> None:
    for script in (Script([CLICK, "Action: fly()"]), Forgetful([WAIT] * 3, turns=2)):
        trajectory = await run(World(state=state), script)
        assert (trajectory.reward, trajectory.success) == (0.0, False), "training is not told"
        judged = state is not None
        told = (trajectory.state_judged, trajectory.state_reward, trajectory.state_success, trajectory.evidence_json)
        assert told == (judged, state or 0.0, success, '{"left": 1}' if judged else "")
        outcome = Outcome.of(trajectory, 1)
        assert (outcome.success, outcome.state_success) == (False, success)
        message = trajectory_to_proto(trajectory, (), "", with_images=False)
        assert (message.state_judged, message.state_reward, message.state_success) == told[:3]


async def test_an_episode_with_a_verdict_is_not_judged_twice() -> None:
    trajectory = await run(World({2: 1.0}, state=0.0), Script([CLICK, FINISH]))
    assert trajectory.success and not trajectory.state_judged
    assert Outcome.of(trajectory, 1).state_success


async def test_a_step_names_the_rules_that_reading_it_took() -> None:
    world = World()
    trajectory = await run(world, Script([CLICK, "I wait. Action: wait(", "Action: finished()"]))
    assert trajectory.termination is Termination.FINISHED
    assert [step.reading_rules for step in trajectory.steps] == ["", "one-line no-thought missing-parenthesis", ""]
    assert trajectory.steps[1].action == Wait(5.0) and len(world.actions) == 3


async def test_a_truncated_turn_is_unparsable_whatever_it_says() -> None:
    trajectory = await run(World(), Script([WAIT], truncate=True))
    assert trajectory.termination is Termination.UNPARSABLE
    assert trajectory.steps[0].action is None
    assert trajectory.steps[0].parse_error == "truncated: the token limit ended the turn after 1 tokens"


@pytest.mark.parametrize(
    ("cut_at", "max_tokens", "termination", "steps"),
    [
        (1, 9, Termination.CONTEXT_FULL, 1),
        (1, 1, Termination.UNPARSABLE, 2),
        (0, 9, Termination.UNPARSABLE, 1),
        (1, 0, Termination.UNPARSABLE, 2),
    ],
)
async def test_a_turn_that_the_end_of_the_context_cut_is_no_mistake_in_its_text(
    cut_at: int, max_tokens: int, termination: Termination, steps: int
) -> None:
    """It has one token of `max_tokens`. In the first turn there is no history that could be too long."""

    class Cut(Script):
        async def generate(self, prompt: Prompt) -> Generation:
            self.truncate = len(self.prompts) == cut_at
            return await super().generate(prompt)

    world = World()
    trajectory = await run(world, Cut([CLICK, WAIT]), replace(SPEC, max_tokens=max_tokens))
    assert (trajectory.termination, len(trajectory.steps)) == (termination, steps)
    assert (trajectory.reward, len(world.actions)) == (0.0, cut_at)


async def test_no_verdict_is_no_success_even_with_a_threshold_of_nothing() -> None:
    spec = replace(SPEC, success_threshold=0.0)
    assert not (await run(World(), Script(["?"]), spec)).success
    assert not (await run(World(), Script([FINISH]), spec)).success
    assert (await run(World({1: 0.0}), Script([FINISH]), spec)).success


async def test_infrastructure_failures_pass_through() -> None:
    failure = ConnectionError("environment died")
    with pytest.raises(ConnectionError) as caught:
        await run(World(failure=failure), Script([WAIT]))
    assert caught.value is failure


@dataclass
class Telling(World):
    """Gives all that an observation may have besides its screenshot."""

    goals: int = 2

    async def reset(self, task: Task) -> Observation:
        goals = tuple(Image.of(bytes([200 + number]), "image/png", 50, 50) for number in range(self.goals))
        seen = Observation(self._screen(), f"count to {task.seed}")
        return replace(seen, accessibility_tree="tree 0", goal_images=goals)

    async def act(self, action: Action, last: bool) -> Observation:
        self.actions.append((action, last))
        number = len(self.actions)
        reward = self.verdicts.get(number)
        return Observation(self._screen(), "", reward is not None, reward or 0.0, "", f"tree {number}", "nothing there")


async def test_what_the_environment_tells_is_kept_and_shown() -> None:
    agent = AGENT.model_copy(update={"show": ("accessibility_tree",), "goal_images": 2})
    script = Script([CLICK, WAIT])
    trajectory = await run(Telling({2: 1.0}), script, replace(SPEC, agent=agent))
    assert [(step.accessibility_tree, step.last_action_error) for step in trajectory.steps] == [
        ("tree 0", ""), ("tree 1", "nothing there"),
    ]  # fmt: skip
    assert trajectory.goal_images == 2
    assert [[image.data[0] for image in step.images] for step in trajectory.steps] == [[200, 201, 0], [200, 201, 0, 1]]
    texts = [[part.text for part in prompt.parts if isinstance(part, Text)] for prompt in script.prompts]
    trees = [f"\nAccessibility tree:\ntree {number}" for number in range(2)]
    assert texts == [["count to 3", trees[0]], ["count to 3", *trees]]
    message = trajectory_to_proto(trajectory, (), "pending", with_images=False)
    assert (message.goal_images, message.steps[1].accessibility_tree) == (2, "tree 1")
    assert message.steps[1].last_action_error == "nothing there"


async def test_a_task_with_more_pictures_than_the_config_allows_is_wrong() -> None:
    why = r"task world/count#3: its instruction has 2 pictures, and agent.goal_images is 0"
    with pytest.raises(WrongTask, match=why):
        await run(Telling(), Script([CLICK]))
