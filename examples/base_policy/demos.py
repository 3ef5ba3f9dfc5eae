"""Oracle demonstrations from the real browser, in a few big files.

`record` fills `folder/TASK/FIRST_SEED.npz` with SHARD episodes each, and leaves existing files alone, so it can be
stopped and started again. A shard holds the screenshots as PNG, one after the other, and the episodes as JSON. Only
episodes that the task's own verdict called a success are kept. The oracle (`workers/env/oracle.py`) reads the page; the
policy will see only pixels. Seeds begin at FIRST_SEED, far from those used for RL and evaluation.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image as Picture

from dart.config import BUILTIN_SUITE, Environment
from dart.core.action import Action, Click, Point, TypeText
from dart.core.types import Task
from dart.workers.env.browser import Browser, Page
from dart.workers.env.inputs import InputDevices
from dart.workers.env.miniwob import MiniWobEnv, MiniWobOptions
from dart.workers.env.miniwob_oracle import plan
from dart.workers.env.oracle import Oracle, Target

FIRST_SEED = 2_000_000
SHARD = 500
PAGES = 4

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
        raise ValueError(f"{action} is neither a click nor typing: leave its task out of TASKS")

    def action(self, width: int, height: int) -> Action:
        return Click(Point(self.x / width, self.y / height)) if self.box else TypeText(self.text)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode. `images[i]` (PNG) is what was seen before `moves[i]`."""

    task: str
    instruction: str
    moves: tuple[Move, ...]
    images: tuple[bytes, ...]


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


def record(folder: Path, config: Environment, episodes: int) -> None:
    """Record until every task has `episodes` demonstrations (in whole shards)."""
    missing = [
        (name, first)
        for first in range(FIRST_SEED, FIRST_SEED + episodes, SHARD)
        for name in config.tasks.names
        if not (folder / name / f"{first}.npz").exists()
    ]
    if missing:
        asyncio.run(_record(folder, config, missing))


async def _record(folder: Path, config: Environment, missing: Sequence[tuple[str, int]]) -> None:
    options = MiniWobOptions()
    async with Browser.launch(options.browser) as browser:
        environments = [await MiniWobEnv.open(browser, options, config.viewport) for _ in range(PAGES)]
        for name, first in missing:
            seeds = iter(range(first, first + SHARD))
            kept: list[Demonstration] = []
            async with asyncio.TaskGroup() as group:
                for environment in environments:
                    group.create_task(_worker(environment, name, seeds, kept))
            await asyncio.to_thread(_write, folder / name / f"{first}.npz", kept)
            print(f"recorded {name} from seed {first}: {len(kept)} of {SHARD} episodes", flush=True)


async def _worker(environment: MiniWobEnv, name: str, seeds: Iterator[int], kept: list[Demonstration]) -> None:
    first = next(seeds, None)
    if first is None:
        return
    await environment.reset(Task(BUILTIN_SUITE, name, first))
    for seed in itertools.chain([first], seeds):
        demonstration = await _episode(environment.page, name, seed)
        if demonstration is not None:
            kept.append(demonstration)


async def _episode(page: Page, name: str, seed: int) -> Demonstration | None:
    """One episode on a page that already shows the task: ten times quicker than loading it, with the same pixels."""
    instruction = await page.evaluate(_AGAIN % seed, wait=True)
    oracle = Oracle(plan(name), instruction)
    moves: list[Move] = []
    images: list[bytes] = []
    while suggested := await oracle.next(page):
        png = await page.screenshot()
        width, height = Picture.open(io.BytesIO(png)).size
        move = Move.of(*suggested, width, height)
        moves.append(move)
        images.append(png)
        await page.calls(InputDevices((width, height)).calls(move.action(width, height)))
    if not await page.evaluate("WOB_DONE_GLOBAL && WOB_RAW_REWARD_GLOBAL >= 1"):
        return None
    return Demonstration(name, instruction, tuple(moves), tuple(images))


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
