"""Success in the real world, greedy or at temperature 1, with transformers' generation, in lockstep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dart.agent.parsing import ParseError
from dart.agent.prompt import Turn
from dart.core.action import Finish
from dart.core.types import Observation, Task
from dart.worlds import Env
from examples.base_policy.chat import Chat
from examples.base_policy.data import Row, collate
from examples.base_policy.demos import Move, environments
from examples.base_policy.recipes import VALIDATED, Recipe

MAX_TOKENS = 24
SLOTS = 24
Rates = dict[str, float]
"""Task → success rate."""


@dataclass(slots=True)
class Episode:
    task: Task
    observation: Observation
    turns: list[Turn] = field(default_factory=list)
    failure: str = ""


def success(model: Any, chat: Chat, recipe: Recipe, names: Sequence[str], episodes: int, greedy: bool) -> Rates:
    """The success rate of each task over this many validation episodes."""
    return asyncio.run(_success(model, chat, recipe, names, episodes, greedy))


async def _success(model: Any, chat: Chat, recipe: Recipe, names: Sequence[str], episodes: int, greedy: bool) -> Rates:
    seeds = range(VALIDATED, VALIDATED + episodes)
    tasks = iter([Task(recipe.kind, name, seed) for seed in seeds for name in names])
    rewards: dict[str, list[float]] = {name: [] for name in names}
    async with environments(recipe, SLOTS) as leased:
        active: dict[int, Episode] = {}
        while True:
            idle = [number for number in range(len(leased)) if number not in active]
            await asyncio.gather(*(_start(leased[number], number, active, tasks) for number in idle))
            if not active:
                break
            numbers = list(active)
            sampled = await asyncio.to_thread(sample, model, chat, [active[number] for number in numbers], greedy)
            await asyncio.gather(
                *(
                    _act(leased[n], chat, active[n], ids, recipe.step_limit)
                    for n, ids in zip(numbers, sampled, strict=True)
                )
            )
            for number in numbers:
                episode = active[number]
                if episode.observation.done or episode.failure:
                    rewards[episode.task.name].append(float(episode.observation.reward >= 1.0))
                    del active[number]
    return {name: sum(got) / len(got) for name, got in rewards.items()}


async def _start(env: Env, number: int, active: dict[int, Episode], tasks: Iterator[Task]) -> None:
    task = next(tasks, None)
    if task is not None:
        active[number] = Episode(task, await env.reset(task))


async def _act(env: Env, chat: Chat, episode: Episode, ids: list[int], step_limit: int) -> None:
    image = episode.observation.image
    episode.turns.append(Turn(image, tuple(ids), ids[-1] != chat.end))
    try:
        action, _ = chat.grammar.read(chat.tokenizer.decode(ids, skip_special_tokens=True), image.width, image.height)
    except ParseError as error:
        episode.failure = str(error)
        return
    instruction, at_limit = episode.observation.instruction, len(episode.turns) >= step_limit
    if isinstance(action, Finish) or at_limit:
        if not isinstance(action, Finish):
            await env.conclude(action)
        verdict = await env.judge(action, at_limit)
        episode.observation = Observation(image, instruction, True, verdict.reward)
        return
    seen = await env.act(action)
    episode.observation = Observation(seen.image, instruction, seen.done, seen.reward)


@torch.no_grad()
def sample(model: Any, chat: Chat, episodes: list[Episode], greedy: bool = False) -> list[list[int]]:
    """Write one turn of every episode; returns the tokens, including the stop token."""
    made = []
    for episode in episodes:
        ids, images = chat.prompt(episode.observation.instruction, episode.turns, episode.observation.image)
        made.append(Row(ids, [False] * len(ids), images, 0, Move(), 0, []))
    inputs = collate(chat, made, left=True).inputs
    training = model.training
    model.eval()
    out = model.generate(
        **inputs,
        **({"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        max_new_tokens=MAX_TOKENS,
        suppress_tokens=chat.banned,
        eos_token_id=chat.end,
        pad_token_id=chat.pad,
    )
    model.train(training)
    new = out[:, inputs["input_ids"].shape[1] :].tolist()
    return [ids[: ids.index(chat.end) + 1] if chat.end in ids else ids for ids in new]
