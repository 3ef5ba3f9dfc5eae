"""Supervised pre-training on the demonstrations: AdamW, warm-up, linear decay, float32, one core.

`Trainer.run` yields wherever the caller may want to evaluate, save or stop. Its whole state can be saved and loaded, so
that a stopped run can continue.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.base_policy.chat import Chat
from examples.base_policy.data import Batch, Pool, Row, batches, jitter, rows, spelling
from examples.base_policy.demos import Demonstration, Move
from examples.base_policy.fast import speed_up
from examples.base_policy.recipes import Recipe

POINTING = 0.5
"""The weight of the auxiliary loss (see Pointer)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate rises for `warm_up` steps, stays, and falls to a share of `final` in the last `cool_down`."""

    steps: int
    learning_rate: float
    cool_down: int
    warm_up: int
    final: float = 0.05

    def rate(self, step: int) -> float:
        left = (self.steps - step) / self.cool_down
        return self.learning_rate * min((step + 1) / self.warm_up, 1.0) * max(self.final, min(left, 1.0))


class Trainer:
    def __init__(self, model: Any, chat: Chat, pool: Pool, recipe: Recipe) -> None:
        self.model, self.chat, self.pool, self.recipe = model, chat, pool, recipe
        self.schedule = Schedule(recipe.steps, recipe.learning_rate, recipe.cool_down or recipe.steps, recipe.warm_up)
        speed_up(model)
        model.train()
        model.set_attn_implementation("eager")
        self.pointer = Pointer(model)
        parameters = [*model.parameters(), *self.pointer.parameters()]
        self.optimiser = torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)
        self.chance = random.Random(0)
        self.step = 0

    def run(self, every: int) -> Iterator[int]:
        """Train; yields the step number every `every` steps."""
        seconds, losses, hits = 0.0, [], Hits()
        while self.step < self.schedule.steps:
            started = time.monotonic()
            losses.append(self._update(hits))
            seconds += time.monotonic() - started
            self.step += 1
            if self.step % 50 == 0:
                loss, pace = sum(losses) / len(losses), seconds / len(losses)
                print(f"step {self.step} loss {loss:.3f} {pace:.2f} s/step; clicks that land: {hits}", flush=True)
                seconds, losses, hits = 0.0, [], Hits()
            if self.step % every == 0:
                yield self.step

    def _update(self, hits: Hits) -> float:
        if self.step % 200 == 0:
            self.pool.refresh()
        made: list[Row] = []
        tasks: list[str] = []
        for demonstration in self.pool.draw(self.recipe.taught, self.chance):
            task, moves = demonstration.task, self._jittered(demonstration)
            first = self.recipe.first_decision(task, len(moves))
            wanted = [step for step in range(len(moves)) if step >= first or self.chance.random() < self.recipe.others]
            new = rows(self.chat, demonstration, moves, wanted)
            made += new
            tasks += [task if row.step >= first else "other steps" for row in new]
        if shorten := self.recipe.one_decision:
            made += [self._alone(shorten) for _ in range(self.recipe.alone)]
            tasks += ["alone"] * self.recipe.alone
        made += [spelling(self.chat, self.chance) for _ in range(self.recipe.spellings)]
        tasks += ["spelling"] * self.recipe.spellings
        order = sorted(range(len(made)), key=lambda number: len(made[number].images))
        made, tasks = [made[number] for number in order], [tasks[number] for number in order]
        for group in self.optimiser.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        self.optimiser.zero_grad()
        total = sum(sum(row.trained) for row in made)
        images = sum(target >= 0 for row in made for target in row.targets)
        loss, at = 0.0, 0
        for batch in batches(self.chat, made):
            logits = self._logits(batch)
            part = torch.nn.functional.cross_entropy(logits, batch.labels[batch.labels >= 0], reduction="sum") / total
            pointing, found, asked = self.pointer.loss(batch, self.chat.image_pad)
            (part + POINTING * pointing / images).backward()
            loss += part.item()
            hits.found, hits.asked = hits.found + found, hits.asked + asked
            size = len(batch.labels)
            hits.add(self.chat, tasks[at : at + size], made[at : at + size], batch.labels, logits)
            at += size
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        return loss

    def _alone(self, shorten: Callable[[str, int], str]) -> Row:
        """A decision of a random episode as if it were an episode's only step: to find on a picture what an instruction
        names is learned from it at a fifth of the price of the same step with its history."""
        (whole,) = self.pool.draw({self.chance.choice(list(self.recipe.taught)): 1}, self.chance)
        first = self.recipe.first_decision(whole.task, len(whole.moves))
        step = self.chance.randrange(first, len(whole.moves))
        said = shorten(whole.instruction, step - first)
        only = Demonstration(whole.task, said, whole.moves[step : step + 1], whole.images[step : step + 1])
        (row,) = rows(self.chat, only, self._jittered(only), [0])
        return row

    def _jittered(self, demonstration: Demonstration) -> list[Move]:
        return [jitter(move, self.chance, self.recipe.jitter, self.recipe.viewport) for move in demonstration.moves]

    def _logits(self, batch: Batch) -> Tensor:
        """float32[labels, V]: only for tokens with a label, and without the tokens that are never sampled."""
        hidden = self.model.model(**batch.inputs).last_hidden_state
        logits = self.model.lm_head(hidden[batch.labels >= 0])
        return logits.index_fill(1, torch.tensor(self.chat.banned), float("-inf"))

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "pointer": self.pointer.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "chance": self.chance.getstate(),
        }
        unfinished = path.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.rename(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.pointer.load_state_dict(state["pointer"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        self.chance.setstate(state["chance"])


class Pointer(torch.nn.Module):  # type: ignore[misc]
    """An auxiliary head, discarded after training: predicts from the image tokens of a middle layer which merged patch
    to click.

    Image tokens come after the instruction, so they can depend on it. The action tokens alone tell the vision tower
    very little about where it was wrong; this head tells it for every patch, and grounding is learned several times
    sooner.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        text = model.config.text_config
        self.norm = torch.nn.RMSNorm(text.hidden_size)
        self.score = torch.nn.Linear(text.hidden_size, 1)
        self._hidden: Tensor | None = None
        model.model.language_model.layers[text.num_hidden_layers // 2 - 1].register_forward_hook(self._keep)

    def _keep(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._hidden = output[0] if isinstance(output, tuple) else output

    def loss(self, batch: Batch, image_pad: int) -> tuple[Tensor, int, int]:
        """(summed cross-entropy over the patches of every screenshot with a target, number correct, number in all)."""
        assert self._hidden is not None
        if not len(batch.targets):
            return torch.zeros(()), 0, 0
        cells = self._hidden[batch.inputs["input_ids"] == image_pad].float()
        scores = self.score(self.norm(cells)).reshape(len(batch.targets), -1)
        known = batch.targets >= 0
        found = int((scores.argmax(-1) == batch.targets).sum())
        total = torch.nn.functional.cross_entropy(scores, batch.targets, ignore_index=-1, reduction="sum")
        return total, found, int(known.sum())


class Hits:
    """How often the likeliest digits (each given the correct ones before it) make a click inside the target."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}
        self.found = self.asked = 0

    def add(self, chat: Chat, tasks: list[str], made: list[Row], labels: Tensor, logits: Tensor) -> None:
        likeliest = torch.full_like(labels, chat.pad)
        likeliest[labels >= 0] = logits.argmax(-1)
        for number, (task, row) in enumerate(zip(tasks, made, strict=True)):
            said = likeliest[number, labels[number] >= 0].tolist()
            if not row.images:
                self._count(task, said == labels[number, labels[number] >= 0].tolist())
            if not row.move.box:
                continue
            start = len(said) - row.last_action
            digits = "".join(c for c in chat.tokenizer.decode(said[start:]) if c.isdigit())
            left, top, right, bottom = row.move.box
            hit = len(digits) == 6 and left <= int(digits[:3]) <= right and top <= int(digits[3:]) <= bottom
            self._count(task, hit)

    def _count(self, task: str, hit: bool) -> None:
        count = self.counts.setdefault(task, [0, 0])
        count[0] += hit
        count[1] += 1

    def __str__(self) -> str:
        shares = [f"{task} {hit / count:.2f}" for task, (hit, count) in sorted(self.counts.items())]
        return ", ".join([*shares, f"pointed right {self.found / max(self.asked, 1):.2f}"])
