"""The base policy's script: its tokenizer, its rows, and that the quick forward pass is the real one."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from PIL import Image as Picture

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("miniwob")

import torch

from dart.core.action import Click, Point, TypeText, Wait
from dart.workers.env import miniwob_oracle
from dart.workers.env.oracle import Target
from examples.base_policy import model as base
from examples.base_policy.chat import Chat
from examples.base_policy.data import Attempt, Row, attempts, collate, jitter, rows
from examples.base_policy.demos import Demonstration, Move
from examples.base_policy.fast import speed_up
from examples.base_policy.make import TASKS

pytestmark = pytest.mark.torch

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


def played(demonstration: Demonstration) -> list[Attempt]:
    return [Attempt(*one) for one in zip(demonstration.moves, demonstration.images, strict=True)]


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
    first, second = rows(chat, demonstration, played(demonstration))
    assert [len(first.images), len(second.images)] == [2, 2]  # the third turn's prompt has lost the first screenshot
    said = "".join(chat.tokenizer.decode([i for i, on in zip(first.ids, first.trained, strict=True) if on]))
    assert said == "Action: click(start_box='(070,064)')<|im_end|>Action: type(content='Truman')<|im_end|>"
    assert sum(second.trained) == second.last_action == 10
    assert first.targets == [64 // 32 * 5 + 70 // 32, -1]
    assert second.targets == [-1, 99 // 32 * 5 + 53 // 32]


def test_jitter_stays_on_the_screen() -> None:
    move = Move(x=159, y=223, box=(140, 210, 180, 230))
    moved = [jitter(move, random.Random(seed), 0.5, (160, 224)) for seed in range(50)]
    assert all(0 <= m.x < 160 and 0 <= m.y < 224 for m in moved)
    assert len({(m.x, m.y) for m in moved}) > 5


def test_a_missed_click_is_tried_again_and_a_wrong_letter_is_not_noticed() -> None:
    demonstration = enter_text()
    assert [a.image for a in attempts(demonstration, random.Random(0), 0.0, (160, 224))] == list(demonstration.images)
    for seed in range(30):
        made = attempts(demonstration, random.Random(seed), 0.5, (160, 224))
        wanted = iter(zip(demonstration.moves, demonstration.images, strict=True))
        move, image = next(wanted)
        for attempt in made:
            assert attempt.image == image
            left, top, right, bottom = move.box or (0, 0, 0, 0)
            if move.box and not (left <= attempt.move.x <= right and top <= attempt.move.y <= bottom):
                continue
            assert len(attempt.move.text) == len(move.text)
            assert sum(a != b for a, b in zip(attempt.move.text, move.text, strict=True)) <= 1
            move, image = next(wanted, (move, image))
        assert next(wanted, None) is None


def test_the_quick_forward_pass_is_the_real_one(folder: Path, chat: Chat) -> None:
    model, _ = base.load(folder)
    demonstration = enter_text()
    made: list[Row] = rows(chat, demonstration, played(demonstration))
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


def test_a_click_is_recorded_in_pixels_with_its_target() -> None:
    target = Target(0.0375, 54 / 224, 0.8375, 75 / 224, (Point(0.4375, 64.5 / 224),))
    move = Move.of(Click(target.points[0]), target, 160, 224)
    assert move == Move(x=70, y=64, box=(6, 54, 134, 75))
    assert move.action(160, 224) == Click(Point(70 / 160, 64 / 224))
    assert Move.of(TypeText("Truman"), None, 160, 224).action(160, 224) == TypeText("Truman")
    with pytest.raises(ValueError, match="neither a click nor typing"):
        Move.of(Wait(5.0), None, 160, 224)


def test_the_oracle_knows_every_demo_task() -> None:
    assert set(TASKS) <= set(miniwob_oracle.TASKS)
