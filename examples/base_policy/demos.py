"""Oracle demonstrations from the real browser or desktop, in a few big files.

`record` fills `folder/TASK/FIRST_SEED.npz` with SHARD episodes each, and leaves existing files alone, so it can be
stopped and started again. A shard holds the screenshots as PNG, one after the other, and the episodes as JSON. Only
episodes that the task's own verdict called a success are kept. The oracle reads the page, or the accessibility tree;
the policy will see only pixels.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image as Picture

from dart.core.action import Action, Click, Point, TypeText
from dart.core.types import Task
from dart.workers.env import oracle
from dart.workers.env.browser import Page
from dart.workers.env.desktop import tasks
from dart.workers.env.desktop.world import SUITE
from dart.workers.env.miniwob import MiniWob, MiniWobEnv
from dart.workers.env.oracle import Target
from dart.workers.env.web import WebEnv
from dart.worlds import Env, World
from examples.base_policy.recipes import DEMONSTRATED, Recipe

SHARD = 250

_AGAIN = """(async () => {
  if (document.activeElement) document.activeElement.blur();
  Math.seedrandom(%s);
  core.startEpisodeReal();
  while (!WOB_TASK_READY) await new Promise(resolve => setTimeout(resolve, 1));
  scrollTo(0, 0);
  const said = core.getUtterance();
  return typeof said === 'string' ? said : said.utterance;
})()"""


@dataclass(frozen=True, slots=True)
class Move:
    """A click at pixel (x, y) on the target in `box` (left, top, right, bottom); or, without a box, typing `text`."""

    text: str = ""
    x: int = 0
    y: int = 0
    box: tuple[float, ...] = ()

    @classmethod
    def of(cls, action: Action, target: Target | None, width: int, height: int) -> Move:
        match action, target:
            case Click(Point(x, y)), Target(left, top, right, bottom):
                box = (left * width, top * height, right * width, bottom * height)
                return cls(x=int(x * width), y=int(y * height), box=tuple(round(edge, 6) for edge in box))
            case TypeText(text), None:
                return cls(text)
        raise ValueError(f"{action} is neither a click nor typing: do not teach its task")

    def action(self, width: int, height: int) -> Action:
        return Click(Point(self.x / width, self.y / height)) if self.box else TypeText(self.text)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode. `images[i]` (PNG) is what was seen before `moves[i]`."""

    task: str
    instruction: str
    moves: tuple[Move, ...]
    images: tuple[bytes, ...]

    @classmethod
    def of(cls, shown: oracle.Demonstration) -> Demonstration:
        images = [step.observation.image for step in shown.steps]
        moves = (
            Move.of(step.action, step.target, image.width, image.height)
            for step, image in zip(shown.steps, images, strict=True)
        )
        return cls(shown.task.name, shown.instruction, tuple(moves), tuple(image.data for image in images))


def shards(folder: Path, task: str) -> list[Path]:
    return sorted((folder / task).glob("*.npz"))


def read(path: Path) -> Iterator[Demonstration]:
    with np.load(path) as data:
        pixels, ends = data["png"].tobytes(), data["ends"].tolist()
        episodes = json.loads(data["episodes"].tobytes())
    pictures = [pixels[start:end] for start, end in itertools.pairwise([0, *ends])]
    at = 0
    for episode in episodes:
        moves = tuple(Move(move["text"], move["x"], move["y"], tuple(move["box"])) for move in episode["moves"])
        yield Demonstration(episode["task"], episode["instruction"], moves, tuple(pictures[at : at + len(moves)]))
        at += len(moves)


def pixels(png: bytes) -> np.ndarray:
    """uint8[H, W, 3]."""
    return np.asarray(Picture.open(io.BytesIO(png)).convert("RGB"))


@contextlib.asynccontextmanager
async def environments(recipe: Recipe, count: int, world_of: type[World] | None = None) -> AsyncIterator[list[Env]]:
    """Environments of the recipe's world, or of another one like it."""
    world = (world_of or recipe.world)()
    try:
        await world.start(world.Options(), recipe.viewport)
        yield [await world.lease() for _ in range(count)]
    finally:
        await world.close()


class _Again(MiniWobEnv):
    """Starts the next episode of the same task on the page that is there: ten times quicker than loading the page, with
    the same pixels, but clicks may leave something behind: the oracle's do not."""

    _shown: tuple[str, Page] | None = None

    async def begin(self, task: Task) -> str:
        if self._shown == (task.name, self.page):
            return str(await self.page.evaluate(_AGAIN % task.seed, wait=True))
        self._shown = (task.name, self.page)
        return await super().begin(task)


class _QuickMiniWob(MiniWob):
    environment = _Again


_QUICK: dict[str, type[World]] = {"miniwob": _QuickMiniWob}


def instructions(recipe: Recipe) -> list[str]:
    """The instructions of `recipe.texts` episodes of each of its tasks."""
    if recipe.kind == SUITE:
        episodes = range(DEMONSTRATED, DEMONSTRATED + recipe.texts)
        return [tasks.load(name).instance(seed).instruction for name in recipe.tasks for seed in episodes]
    return asyncio.run(_instructions(recipe))


async def _instructions(recipe: Recipe) -> list[str]:
    said = []
    async with environments(recipe, 1, _QUICK.get(recipe.kind)) as (env,):
        for name in recipe.tasks:
            for seed in range(DEMONSTRATED, DEMONSTRATED + recipe.texts):
                said.append((await env.reset(Task(recipe.kind, name, seed))).instruction)
    return said


def record(folder: Path, recipe: Recipe) -> None:
    """Record until every taught task has its demonstrations (in whole shards)."""
    missing = [
        (name, first)
        for first in range(DEMONSTRATED, DEMONSTRATED + recipe.demonstrations, SHARD)
        for name in recipe.taught
        if not (folder / name / f"{first}.npz").exists()
    ]
    if missing:
        asyncio.run(_record(folder, recipe, missing))


async def _record(folder: Path, recipe: Recipe, missing: Sequence[tuple[str, int]]) -> None:
    async with environments(recipe, recipe.at_once, _QUICK.get(recipe.kind)) as leased:
        for name, first in missing:
            seeds = iter(range(first, first + SHARD))
            kept: list[Demonstration] = []
            async with asyncio.TaskGroup() as group:
                for env in leased:
                    group.create_task(_worker(env, Task(recipe.kind, name, 0), seeds, kept))
            await asyncio.to_thread(_write, folder / name / f"{first}.npz", kept)
            print(f"recorded {name} from seed {first}: {len(kept)} of {SHARD} episodes", flush=True)


async def _worker(env: Env, task: Task, seeds: Iterator[int], kept: list[Demonstration]) -> None:
    for seed in seeds:
        shown = await demonstrate(env, replace(task, seed=seed))
        if shown.reward >= 1.0:
            kept.append(Demonstration.of(shown))


async def demonstrate(env: Env, task: Task) -> oracle.Demonstration:
    """The oracle's episode. Raises EnvironmentFailure if the environment fails."""
    if isinstance(env, WebEnv):
        return await oracle.demonstrate(env, task)
    from examples.base_policy import desktops  # needs the desktop's packages

    return await desktops.demonstrate(env, task)


def _write(path: Path, demonstrations: Sequence[Demonstration]) -> None:
    pictures = [image for demonstration in demonstrations for image in demonstration.images]
    episodes = [
        {"task": d.task, "instruction": d.instruction, "moves": [asdict(move) for move in d.moves]}
        for d in demonstrations
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.savez(
            file,
            png=np.frombuffer(b"".join(pictures), np.uint8),
            ends=np.cumsum([len(picture) for picture in pictures], dtype=np.int64),
            episodes=np.frombuffer(json.dumps(episodes).encode(), np.uint8),
        )
    unfinished.rename(path)
