"""One trajectory: reset, then observe → generate → parse → act until done.

Called by the coordinator, one coroutine per trajectory. It owns nothing that outlives it and waits only on `env` and
`policy`. Their exceptions are infrastructure failures and pass through: no trajectory, no reward. A mistake of the
policy gives a trajectory with reward 0, and so does a history that outgrows the model's context. The verdict on the
state that these leave behind is kept beside that reward.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from dart import config
from dart.agent.grammar import Grammar, ParseError
from dart.agent.prompt import Conversation, Turn, shown
from dart.core.action import Action, Finish
from dart.core.types import (
    Generation,
    Image,
    Observation,
    Prompt,
    Step,
    Task,
    Termination,
    Trajectory,
    plain_fields,
)

VERDICT = tuple(
    name for name in plain_fields(Trajectory) if name in plain_fields(Observation) and name != "instruction"
)
"""What a trajectory takes from its last observation if that is a verdict: the reward and its evidence."""


class Env(Protocol):
    async def reset(self, task: Task) -> Observation:
        """Start an episode of the task. The observation has the instruction."""

    async def act(self, action: Action, last: bool) -> Observation:
        """Carry the action out. If it is the `last`, only the verdict is needed; a screenshot that comes is kept."""

    async def judge(self) -> Observation | None:
        """The verdict on the state as it is: the policy's text was not an action. None if that fails."""


class ContextFull(Exception):
    """The prompt does not fit into the model's context. At the first step, that is a configuration error."""


class WrongTask(Exception):
    """The task cannot be run with this config; another attempt would fail as well."""


class Policy(Protocol):
    async def generate(self, prompt: Prompt) -> Generation:
        """Sample one turn. Raises ContextFull."""


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    trajectory_id: str
    group_id: str
    task: Task
    step_limit: int
    success_threshold: float
    agent: config.Agent
    max_tokens: int = 0
    """The most tokens that the policy may sample in a turn; 0: not known."""


async def run_episode(env: Env, policy: Policy, spec: EpisodeSpec, grammar: Grammar) -> Trajectory:
    """Run the episode that `spec` describes to its end.

    It began at `Trajectory.started` by the wall clock. `finished` is later by the time that it took, even if the wall
    clock was set meanwhile: the watchdog's bounds and the evaluation's figures are made from the difference.
    """
    started, began = time.time(), time.monotonic()
    observation = await env.reset(spec.task)
    instruction, goals = observation.instruction, _goals(observation, spec)
    conversation = Conversation(spec.agent, instruction, goals)
    steps: list[Step] = []
    termination: Termination | None = None
    while termination is None:
        image, notes = observation.image, shown(spec.agent, observation)
        prompt = conversation.prompt(image, notes)
        try:
            generation = await _turn(policy, prompt, spec, first=not steps)
        except ContextFull:
            if not steps:
                raise
            # Not an infrastructure failure: a new attempt would end here again, and long trajectories would be missing.
            termination = Termination.CONTEXT_FULL
            continue
        action, parse_error, rules = _read(generation, grammar, image)
        tree, error = observation.accessibility_tree, observation.last_action_error
        steps.append(Step(len(steps), prompt.images, generation, action, parse_error, rules, tree, error))
        conversation.add(Turn(image, generation.token_ids, generation.truncated, notes))
        if action is None:
            termination = Termination.UNPARSABLE
            continue
        at_limit = len(steps) >= spec.step_limit
        observation = await env.act(action, at_limit or isinstance(action, Finish))
        termination = _termination(action, observation, at_limit)

    # Only the environment gives a verdict. Text that is not an action gets none that is trained on, whatever the state
    # that it left behind; what that state is worth is kept beside it.
    cut_off = termination in (Termination.UNPARSABLE, Termination.CONTEXT_FULL)
    judged = observation.done and not cut_off
    state = await env.judge() if cut_off else None
    verdict = (
        observation if judged else Observation(observation.image, evidence_json=state.evidence_json if state else "")
    )
    return Trajectory(
        id=spec.trajectory_id,
        group_id=spec.group_id,
        task=spec.task,
        instruction=instruction,
        steps=tuple(steps),
        termination=termination,
        success=judged and verdict.reward >= spec.success_threshold,
        step_limit=spec.step_limit,
        started=started,
        finished=started + time.monotonic() - began,
        goal_images=len(goals),
        state_judged=state is not None,
        state_reward=state.reward if state else 0.0,
        state_success=state is not None and state.reward >= spec.success_threshold,
        last_image=_last_image(observation, termination),
        **{name: getattr(verdict, name) for name in VERDICT},
    )


async def _turn(policy: Policy, prompt: Prompt, spec: EpisodeSpec, first: bool) -> Generation:
    """The policy's turn. Raises ContextFull if the end of the context cut it, and not its own length."""
    generation = await policy.generate(prompt)
    if not first and generation.truncated and len(generation.token_ids) < spec.max_tokens:
        raise ContextFull("the answer reached the end of the context")
    return generation


def _goals(observation: Observation, spec: EpisodeSpec) -> tuple[Image, ...]:
    """The pictures that belong to the instruction. Raises WrongTask if there are more than may be shown."""
    goals, most = observation.goal_images, spec.agent.goal_images
    if len(goals) > most:
        raise WrongTask(
            f"task {spec.task.id}: its instruction has {len(goals)} pictures, and agent.goal_images is {most}: raise "
            "it, or leave the task out"
        )
    return goals


def _read(generation: Generation, grammar: Grammar, image: Image) -> tuple[Action | None, str, str]:
    """(action, "", the rules that it took) or (None, why not, "")."""
    if generation.truncated:
        return None, f"truncated: the token limit ended the turn after {len(generation.token_ids)} tokens", ""
    try:
        action, rules = grammar.read(generation.text, image.width, image.height)
    except ParseError as error:
        return None, str(error), ""
    return action, "", " ".join(rules)


def _last_image(observation: Observation, termination: Termination) -> Image | None:
    """The screen after the last action, which no step shows; after text that is no action, the last step shows it."""
    there = observation.image.sha256 and termination is not Termination.UNPARSABLE
    return observation.image if there else None


def _termination(action: Action, observation: Observation, at_limit: bool) -> Termination | None:
    """Why the episode is over after `action`; None if it continues."""
    if isinstance(action, Finish):
        return Termination.FINISHED
    if at_limit:
        return Termination.STEP_LIMIT
    return Termination.ENVIRONMENT if observation.done else None
