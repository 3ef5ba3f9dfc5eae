"""Demonstrations → token rows → batches. dart.agent makes prompts and actions, so they are the same as in RL.

A row holds one or more turns of an episode: if a turn's prompt begins with the previous turn's prompt and action, both
are trained in one row, for the price of one. Rows with the same number of screenshots go through the model together.
The loss is on the action tokens only.
"""

from __future__ import annotations

import random
import string
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dart.agent.prompt import Turn
from dart.core.action import Click, Point, TypeText
from dart.core.types import Image
from examples.base_policy import demos
from examples.base_policy.chat import SIDE, Chat, image_of
from examples.base_policy.demos import Demonstration, Move
from examples.base_policy.model import MERGE, PATCH


@dataclass(slots=True)
class Row:
    """`ids` has every placeholder expanded; `trained[i]`: token i belongs to an action, so it has a loss."""

    ids: list[int]
    trained: list[bool]
    images: list[bytes]
    step: int
    """The last turn's, from 0."""
    move: Move
    """The last turn's; its action is the last `last_action` tokens."""
    last_action: int
    targets: list[int]
    """For each screenshot the merged patch that its turn's click is in; -1: none, or trained in another row."""


class Pool:
    """All demonstrations recorded so far, by task; `refresh` finds the new ones. PNG bytes stay in memory."""

    def __init__(self, folder: Path, tasks: Iterable[str]) -> None:
        self.folder = folder
        self.by_task: dict[str, list[Demonstration]] = {task: [] for task in tasks}
        self._seen: set[Path] = set()

    def refresh(self) -> None:
        for task, known in self.by_task.items():
            for path in demos.shards(self.folder, task):
                if path not in self._seen:
                    known.extend(demos.read(path))
                    self._seen.add(path)

    def draw(self, counts: Mapping[str, int], chance: random.Random) -> list[Demonstration]:
        return [d for task, count in counts.items() for d in chance.choices(self.by_task[task], k=count)]


def jitter(move: Move, chance: random.Random, share: float, viewport: tuple[int, int]) -> Move:
    """The click, moved by up to `share` of its target's width and height, but still on the screen."""
    width, height = viewport
    if not move.box:
        return move
    left, top, right, bottom = move.box
    dx, dy = (chance.uniform(-share, share) * side for side in (right - left, bottom - top))
    x, y = round(move.x + dx), round(move.y + dy)
    return replace(move, x=max(0, min(x, width - 1)), y=max(0, min(y, height - 1)))


def rows(chat: Chat, demonstration: Demonstration, moves: Sequence[Move], wanted: Container[int]) -> list[Row]:
    """The `wanted` steps of the episode with these moves, one per screenshot, in as few rows as its prompts allow."""
    made: list[Row] = []
    turns: list[Turn] = []
    for step, (move, png) in enumerate(zip(moves, demonstration.images, strict=True)):
        observation = image_of(png)
        action = chat.action_tokens(move.action(observation.width, observation.height), observation)
        if step not in wanted:
            turns.append(Turn(observation, action))
            continue
        prompt, images = chat.prompt(demonstration.instruction, turns, observation)
        last = made[-1] if made else None
        if last is not None and prompt[: len(last.ids)] == last.ids and images[: len(last.images)] == last.images:
            known, trained, targets = len(last.ids), last.trained, last.targets
            made.pop()
        else:
            known, trained, targets = 0, [], []
        targets = targets + [-1] * (len(images) - 1 - len(targets))
        trained = trained + [False] * (len(prompt) - known) + [True] * len(action)
        target = _patch(move, observation.width, observation.height) if move.box else -1
        made.append(Row([*prompt, *action], trained, images, step, move, len(action), [*targets, target]))
        turns.append(Turn(observation, action))
    return made


def _patch(move: Move, width: int, height: int) -> int:
    """The merged patch that contains the middle of the target, wherever the click went."""
    left, top, right, bottom = move.box
    x, y = (left + right) / 2, (top + bottom) / 2
    return min(int(y), height - 1) // SIDE * (width // SIDE) + min(int(x), width - 1) // SIDE


def spelling(chat: Chat, chance: random.Random) -> Row:
    """A row without a picture: the instruction asks for a made-up name, which is typed.

    The tasks' fifty names could be memorised; these have to be copied, and cost almost nothing.
    """
    name = "".join(chance.choices(string.ascii_lowercase, k=chance.randint(3, 10))).capitalize()
    field, blank = Click(Point(0.5, 0.5)), Image(b"", "", 0, 0)
    click = chat.action_tokens(field, Image(b"", "", SIDE, SIDE))
    turns = [Turn(blank, click)]
    prompt, _ = chat.prompt(f'Enter "{name}" into the text field and press Submit.', turns, blank)
    action = chat.action_tokens(TypeText(name), blank)
    trained = [False] * len(prompt) + [True] * len(action)
    return Row([*prompt, *action], trained, [], 1, Move(text=name), len(action), [])


@dataclass(slots=True)
class Batch:
    inputs: dict[str, Tensor]
    labels: Tensor
    """int64[B, T], -100 where there is no loss; already shifted: labels[:, i] is what position i predicts."""
    targets: Tensor
    """int64[images]"""


def batches(chat: Chat, made: Sequence[Row]) -> list[Batch]:
    """One batch per number of screenshots."""
    sizes = sorted({len(row.images) for row in made})
    return [collate(chat, [row for row in made if len(row.images) == size]) for size in sizes]


def collate(chat: Chat, made: Sequence[Row], left: bool = False) -> Batch:
    """Padded on the right, or on the `left` for generation."""
    length = max(len(row.ids) for row in made)
    ids = torch.full((len(made), length), chat.pad)
    mask = torch.zeros(len(made), length, dtype=torch.long)
    labels = torch.full((len(made), length), -100)
    for number, row in enumerate(made):
        at = slice(length - len(row.ids), length) if left else slice(0, len(row.ids))
        ids[number, at] = torch.tensor(row.ids)
        mask[number, at] = 1
        trained = torch.tensor([*row.trained[1:], False], dtype=torch.bool)
        labels[number, at] = torch.where(trained, torch.tensor([*row.ids[1:], 0]), -100)
    inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == chat.image_pad).int()}
    pictures = [demos.pixels(png) for row in made for png in row.images]
    if pictures:
        inputs["pixel_values"], inputs["image_grid_thw"] = patches(torch.from_numpy(np.stack(pictures)))
    return Batch(inputs, labels, torch.tensor([target for row in made for target in row.targets]))


def patches(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """uint8[N, H, W, 3] → the image processor's (pixel_values, image_grid_thw), without the repeated second frame."""
    count, height, width, _ = pictures.shape
    values = pictures.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
    rows_, columns = height // PATCH, width // PATCH
    values = values.reshape(count, 3, rows_ // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    values = values.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(count * rows_ * columns, 3 * PATCH * PATCH)
    return values, torch.tensor([[1, rows_, columns]] * count)
