"""Success in the real browser, sampled at temperature 1 with transformers' own generation, in lockstep over pages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dart.agent.parsing import ParseError
from dart.agent.prompt import Turn
from dart.config import BUILTIN_SUITE, Environment
from dart.core.types import Image, Observation, Task
from dart.workers.env.browser import Browser
from dart.workers.env.miniwob import MiniWobEnv, MiniWobOptions
from examples.base_policy.chat import Chat
from examples.base_policy.data import Row, collate
from examples.base_policy.demos import Move

MAX_TOKENS = 24


@dataclass(slots=True)
class Episode:
    task: Task
    observation: Observation
    turns: list[Turn] = field(default_factory=list)
    failure: str = ""


def success(model: Any, chat: Chat, config: Environment, seeds: range, step_limit: int) -> dict[str, float]:
    """The success rate of each task over `seeds`."""
    return asyncio.run(_success(model, chat, config, seeds, step_limit))


async def _success(model: Any, chat: Chat, config: Environment, seeds: range, step_limit: int) -> dict[str, float]:
    tasks = iter([Task(BUILTIN_SUITE, name, seed) for seed in seeds for name in config.tasks.names])
    rewards: dict[str, list[float]] = {name: [] for name in config.tasks.names}
    options = MiniWobOptions()
    async with Browser.launch(options.browser) as browser:
        environments = [await MiniWobEnv.open(browser, options, config.viewport) for _ in range(config.slots)]
        active: dict[int, Episode] = {}
        while True:
            idle = [number for number in range(len(environments)) if number not in active]
            await asyncio.gather(*(_start(environments[number], number, active, tasks) for number in idle))
            if not active:
                break
            numbers = list(active)
            sampled = await asyncio.to_thread(sample, model, chat, [active[number] for number in numbers])
            await asyncio.gather(
                *(_act(environments[n], chat, active[n], ids) for n, ids in zip(numbers, sampled, strict=True))
            )
            for number in numbers:
                episode = active[number]
                if episode.observation.done or episode.failure or len(episode.turns) >= step_limit:
                    rewards[episode.task.name].append(float(episode.observation.reward >= 1.0))
                    del active[number]
    return {name: sum(got) / len(got) for name, got in rewards.items()}


async def _start(environment: MiniWobEnv, number: int, active: dict[int, Episode], tasks: Iterator[Task]) -> None:
    task = next(tasks, None)
    if task is not None:
        active[number] = Episode(task, await look(environment, task))


async def look(environment: MiniWobEnv, task: Task) -> Observation:
    observation = await environment.reset(task)
    if await environment.page.evaluate("scrollX || scrollY"):
        await environment.page.evaluate("scrollTo(0, 0)")
        png = await environment.page.screenshot()
        image = Image.of(png, "image/png", observation.image.width, observation.image.height)
        return Observation(image, observation.instruction)
    return observation


async def _act(environment: MiniWobEnv, chat: Chat, episode: Episode, ids: list[int]) -> None:
    image = episode.observation.image
    episode.turns.append(Turn(image, tuple(ids), ids[-1] != chat.end))
    try:
        action = chat.grammar.parse(chat.tokenizer.decode(ids, skip_special_tokens=True), image.width, image.height)
    except ParseError as error:
        episode.failure = str(error)
        return
    instruction = episode.observation.instruction
    seen = await environment.act(action)
    episode.observation = Observation(seen.image, instruction, seen.done, seen.reward)


@torch.no_grad()
def sample(model: Any, chat: Chat, episodes: list[Episode]) -> list[list[int]]:
    """Sample one turn of every episode; returns the tokens, including the stop token."""
    made = []
    for episode in episodes:
        ids, images = chat.prompt(episode.observation.instruction, episode.turns, episode.observation.image)
        made.append(Row(ids, [False] * len(ids), images, Move(), 0, []))
    inputs = collate(chat, made, left=True).inputs
    training = model.training
    model.eval()
    out = model.generate(
        **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_TOKENS,
        suppress_tokens=chat.banned, eos_token_id=chat.end, pad_token_id=chat.pad,
    )  # fmt: skip
    model.train(training)
    new = out[:, inputs["input_ids"].shape[1] :].tolist()
    return [ids[: ids.index(chat.end) + 1] if chat.end in ids else ids for ids in new]
