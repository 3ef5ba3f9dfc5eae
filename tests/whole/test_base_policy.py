"""The base policy's script: its tokenizer, its rows, and that the quick forward pass is the real one."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image as Picture

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("miniwob")

import torch

from dart.config.loading import load
from dart.core.action import Click, Point, TypeText, Wait
from dart.workers.env import ladder_layout
from dart.workers.env.oracle import Target
from examples.base_policy import demos, make
from examples.base_policy import model as base
from examples.base_policy.chat import Chat
from examples.base_policy.data import Row, collate, jitter, rows
from examples.base_policy.demos import Demonstration, Move
from examples.base_policy.fast import speed_up
from examples.base_policy.recipes import DEMONSTRATED, RECIPES, Recipe

pytestmark = pytest.mark.torch

CONFIGS = Path(__file__).parents[2] / "configs"

TEXTS = [
    'Enter "Truman" into the text field and press Submit.',
    'Enter "Alan" into the text field and press Submit.',
    "Action: click(start_box='(080,112)')",
    "Action: type(content='a')",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("tiny")
    base.build(made, TEXTS)
    return made


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return Chat(base.load(folder)[1])


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Picture.effect_noise((160, 224), shade).convert("RGB").save(file, "png")
    return file.getvalue()


def enter_text() -> Demonstration:
    moves = (
        Move(x=70, y=64, box=(6, 54, 134, 75)),
        Move(text="Truman"),
        Move(x=53, y=99, box=(6, 84, 101, 115)),
    )
    return Demonstration("enter-text", TEXTS[0], moves, (png(10), png(20), png(30)))


def test_names_are_spelled_and_phrases_are_not(chat: Chat) -> None:
    tokens = chat.tokenizer.tokenize
    assert tokens("Action: click(start_box='(080,112)')") == [
        "Action: click(start_box='(", "0", "8", "0", ",", "1", "1", "2", ")')",
    ]  # fmt: skip
    assert tokens("Action: type(content='Truman')")[1:-1] == list("Truman")
    assert [t for t in tokens(TEXTS[0]) if t in set("Truman")] == list("Truman")
    assert " text" in tokens(TEXTS[0])


def test_any_text_comes_back(chat: Chat) -> None:
    text = 'Enter "Ünal\'s 7\\n" 漢字\n and press <|im_end|> Submit.'
    ids = chat.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert chat.end not in ids
    assert chat.tokenizer.decode(ids) == text


def test_an_episode_is_as_few_rows_as_its_window_allows(chat: Chat) -> None:
    demonstration = enter_text()
    first, second = rows(chat, demonstration, demonstration.moves, range(3))
    assert [len(first.images), len(second.images)] == [2, 2]  # the third turn's prompt has lost the first screenshot
    said = "".join(chat.tokenizer.decode([i for i, on in zip(first.ids, first.trained, strict=True) if on]))
    assert said == "Action: click(start_box='(070,064)')<|im_end|>Action: type(content='Truman')<|im_end|>"
    assert sum(second.trained) == second.last_action == 10
    assert first.targets == [64 // 32 * 5 + 70 // 32, -1]
    assert second.targets == [-1, 99 // 32 * 5 + 53 // 32]


def test_steps_that_are_not_wanted_are_only_seen(chat: Chat) -> None:
    demonstration = enter_text()
    (whole,) = [row for row in rows(chat, demonstration, demonstration.moves, range(3)) if row.step == 2]
    (last,) = rows(chat, demonstration, demonstration.moves, [2])
    assert last == whole
    (second,) = rows(chat, demonstration, demonstration.moves, [1])
    assert len(second.images) == 2
    assert sum(second.trained) == second.last_action
    assert second.targets == [-1, -1]  # the click on the first screenshot is not asked for, and typing has no target


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_decisions_alone_need_an_instruction(recipe: Recipe) -> None:
    assert bool(recipe.alone) == (recipe.one_decision is not None)


def test_an_instruction_with_one_decision() -> None:
    name = "ladder-medium-02"
    made = ladder_layout.layout(name, 7)
    recipe = RECIPES["ladder"]
    assert recipe.one_decision is not None
    only = recipe.one_decision(made.instruction, 1)
    assert only == f"Click Next until symbols appear, then {made.wanted[1].name}."
    assert recipe.first_decision(name, 5) == 2
    assert RECIPES["miniwob"].first_decision("click-test", 3) == 0


def test_jitter_stays_on_the_screen() -> None:
    move = Move(x=159, y=223, box=(140, 210, 180, 230))
    moved = [jitter(move, random.Random(seed), 0.5, (160, 224)) for seed in range(50)]
    assert all(0 <= m.x < 160 and 0 <= m.y < 224 for m in moved)
    assert len({(m.x, m.y) for m in moved}) > 5


def test_the_quick_forward_pass_is_the_real_one(folder: Path, chat: Chat) -> None:
    model, _ = base.load(folder)
    demonstration = enter_text()
    made: list[Row] = rows(chat, demonstration, demonstration.moves, range(3))
    inputs = collate(chat, made).inputs
    quick = dict(inputs)
    patches = inputs["pixel_values"].reshape(-1, 3, 1, 256)
    inputs["pixel_values"] = patches.expand(-1, -1, 2, -1).reshape(len(patches), -1)
    with torch.no_grad():
        plain = model(**inputs).logits
        speed_up(model)
        fast = model(**quick).logits
    real = inputs["attention_mask"].bool()
    assert torch.allclose(plain[real], fast[real], atol=2e-5)


class _Steps:
    """A trainer whose model's weights are the number of its steps. `ends`: where it is killed."""

    def __init__(self, model: list[int], ends: int | None) -> None:
        self.model, self.ends, self.step = model, ends, 0

    def run(self, every: int) -> Iterator[int]:
        while self.step < 5:
            self.step += 1
            self.model[0] = self.step
            if self.step % every == 0:
                yield self.step

    def save(self, path: Path) -> None:
        path.write_text(str(self.step))
        if self.step == self.ends:
            raise KeyboardInterrupt

    def load(self, path: Path) -> None:
        self.step = self.model[0] = int(path.read_text())


@pytest.mark.parametrize(("every", "ends"), [(1, 5), (2, None), (2, 4), (9, None)])
def test_a_policy_that_was_stopped_while_it_was_made_is_made(
    every: int, ends: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPES["ladder"], ancestor="tiny-qwen3vl")
    trainers: list[_Steps] = []

    def build(folder: Path, texts: object) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text("random")

    def inherit(folder: Path, ancestor: Path) -> None:
        if not trainers and ends == 4:  # the first time
            trainers.append(_Steps([0], None))
            raise KeyboardInterrupt
        (folder / "weights").write_text("inherited")

    def trainer(model: list[int], *_: object) -> _Steps:
        trainers.append(_Steps(model, ends if len(trainers) < 2 else None))
        return trainers[-1]

    def load(folder: Path) -> tuple[list[int], None]:
        assert (folder / "weights").read_text() == "inherited"
        return [0], None

    def save(model: list[int], folder: Path) -> None:
        (folder / "weights").write_text(str(model[0]))

    monkeypatch.setattr(demos, "record", lambda *_: None)
    monkeypatch.setattr(demos, "instructions", lambda _: [])
    monkeypatch.setattr(make, "Chat", lambda *_: None)
    for name, stub in (("build", build), ("inherit", inherit), ("load", load), ("save", save), ("Trainer", trainer)):
        monkeypatch.setattr(make, name, stub)
    for _ in range(3):
        with contextlib.suppress(KeyboardInterrupt):
            make.make(recipe, tmp_path / "work", tmp_path / "out", every)
    assert (tmp_path / "out" / "weights").read_text() == "5"
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_click_is_recorded_in_pixels_with_its_target() -> None:
    target = Target(0.0375, 54 / 224, 0.8375, 75 / 224, (Point(0.4375, 64.5 / 224),))
    move = Move.of(Click(target.points[0]), target, 160, 224)
    assert move == Move(x=70, y=64, box=(6, 54, 134, 75))
    assert move.action(160, 224) == Click(Point(70 / 160, 64 / 224))
    assert Move.of(TypeText("Truman"), None, 160, 224).action(160, 224) == TypeText("Truman")
    with pytest.raises(ValueError, match="neither a click nor typing"):
        Move.of(Wait(5.0), None, 160, 224)


def runs_here(recipe: Recipe) -> None:
    """Skip the test where desktops are wanted and cannot run."""
    for check in recipe.world.checks(recipe.world.Options()).values():
        if recipe.kind == "desktop" and (missing := check()):
            pytest.skip(missing)
    if recipe.kind == "desktop" and shutil.which("yad") is None:
        pytest.skip("yad is not installed: make desktop")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_teaches_what_the_oracle_knows(name: str) -> None:
    recipe = RECIPES[name]
    runs_here(recipe)
    assert set(recipe.taught) <= set(recipe.tasks)
    assert set(recipe.taught) <= set(recipe.world.oracle_tasks())
    for task in recipe.tasks:
        recipe.world.check_task(task)


def test_the_ladders_policy_is_never_shown_what_the_size_decides() -> None:
    recipe = RECIPES["ladder"]
    assert {task for task in recipe.tasks if task not in recipe.taught} == {
        name
        for name in ladder_layout.task_names()
        if (level := ladder_layout.level_of(name)).twins and not level.either
    }


def test_the_desktops_policy_is_shown_three_of_its_seven_tasks() -> None:
    recipe = RECIPES["desktop"]
    assert set(recipe.taught) == {"colour-grid", "colour-next", "colour-type"}
    config = load(CONFIGS / "desktop_cpu.yaml")
    assert config.environment.tasks.names == recipe.tasks
    assert config.environment.viewport == recipe.viewport
    assert config.agent.history_screenshots == recipe.history_screenshots
    assert max(config.environment.tasks.train_seeds + config.environment.tasks.eval_seeds) < DEMONSTRATED


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.desktop if name == "desktop" else pytest.mark.browser) for name in RECIPES],
)
def test_demonstrations_are_recorded_and_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_here(RECIPES[name])
    monkeypatch.setattr(demos, "SHARD", 6)
    taught = dict(list(RECIPES[name].taught.items())[:1])
    (task,) = taught
    recipe = replace(RECIPES[name], taught=taught, tasks=(task,), demonstrations=12, texts=3)
    demos.record(tmp_path, recipe)
    read = [shown for path in demos.shards(tmp_path, task) for shown in demos.read(path)]
    assert len(read) == 12 and {shown.task for shown in read} == {task}
    assert {demos.pixels(image).shape for shown in read for image in shown.images} == {(*recipe.viewport[::-1], 3)}
    assert len({image for shown in read for image in shown.images}) > 6, "episodes differ"
    assert len(demos.instructions(recipe)) == 3
