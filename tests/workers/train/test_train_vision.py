"""A frozen vision tower: its parameters stay out of training, and each screenshot goes through it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from train_samples import PAD, alone, mixed, sample, screenshot  # noqa: E402

from dart.errors import UserError  # noqa: E402
from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.workers.train import vision  # noqa: E402
from dart.workers.train.batch import Layout, MicroBatch, collate  # noqa: E402
from dart.workers.train.model import load_image_processor, load_model  # noqa: E402
from dart.workers.train.screenshots import ProcessedScreenshots  # noqa: E402

LAYOUT = Layout(vocab_size=264, image_token_id=PAD, merge_size=2, banned=(3, 4, 5, 6, 7), pairs_per_token=1000.0)


@pytest.fixture(scope="module")
def folder(each_family: Path) -> Path:
    return each_family


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def screenshots(folder: Path) -> ProcessedScreenshots:
    return ProcessedScreenshots(load_image_processor(folder))


def batch_of(screenshots: ProcessedScreenshots, samples: list[pb.Sample]) -> MicroBatch:
    rows = [alone(one, LAYOUT) for one in samples]
    images = screenshots.get(image for row in rows for image in row.images)
    return collate(rows, images, LAYOUT).to(torch.device("cpu"))


def everything(made: vision.Encoded | None) -> list[Any]:
    assert made is not None
    return [*made.pooler_output, *(part for level in made.deepstack_features or () for part in level)]


def test_the_tower_runs_once_for_each_distinct_screenshot(model: Any, screenshots: ProcessedScreenshots) -> None:
    batch = batch_of(screenshots, mixed(groups=2, rollouts=2))
    assert len(batch.image_digests) == 4 and len(batch.image_index) == 8
    ran: list[int] = []
    model.model.visual.register_forward_pre_hook(lambda *_: ran.append(1))
    made = vision.features(model, batch)
    assert made is not None and len(made.pooler_output) == 8 and len(ran) == 1
    for index, output in zip(batch.image_index, made.pooler_output, strict=True):
        assert torch.equal(output, made.pooler_output[batch.image_index.index(index)])
    assert made.pooler_output[0].requires_grad
    assert vision.features(model, batch_of(screenshots, [sample("a", "go", "1", 1.0, [])])) is None


def test_the_tower_gives_what_transformers_gives(
    folder: Path, model: Any, screenshots: ProcessedScreenshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Screenshots of several sizes, most of which no window divides: there are whole windows, halves and quarters."""
    from transformers import AutoModelForImageTextToText

    sizes = ((64, 96), (96, 64), (32, 32), (160, 224), (128, 128))
    images = [screenshot(seed, *size) for seed, size in enumerate(sizes)]
    batch = batch_of(screenshots, [sample("a", "go", "1", 1.0, images)])
    lengths: set[int] = set()

    def told(boundaries: Any) -> Any:
        lengths.update(boundaries.diff().tolist())
        return by_length(boundaries)

    by_length = vision._by_length
    monkeypatch.setattr(vision, "_by_length", told)
    found = vision.features(model, batch)
    of_images = {width * height // 256 for width, height in sizes}
    windowed = model.config.model_type == "qwen2_5_vl"
    assert lengths == of_images | ({4, 8, 16} if windowed else set())
    plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    expected = plain.model.get_image_features(batch.pixel_values, batch.image_grid_thw, return_dict=True)
    deep = getattr(expected, "deepstack_features", None)
    assert (deep is None) == windowed
    for one, other in zip(everything(found), everything(vision.Encoded(expected.pooler_output, deep)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


def test_what_is_kept_is_what_the_tower_gives(model: Any, screenshots: ProcessedScreenshots) -> None:
    """Screenshots of several sizes, some of them seen before."""
    vision.freeze(model)
    kept = vision.EncodedScreenshots(1 << 30)
    first, both = (batch_of(screenshots, mixed(groups=groups, rollouts=2)) for groups in (1, 3))
    for batch in (first, both, both, first):
        found, plain = vision.features(model, batch, kept), vision.features(model, batch)
        for one, other in zip(everything(found), everything(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
            assert not one.requires_grad
    assert kept.encoded == len(both.image_digests), "each once"


def test_the_least_recently_used_are_encoded_again(model: Any, screenshots: ProcessedScreenshots) -> None:
    one, two, three = (batch_of(screenshots, [sample("a", "go", "1", 1.0, [screenshot(seed)])]) for seed in range(3))
    vision.freeze(model)
    size = sum(part.nbytes for part in everything(vision.features(model, one)))
    kept = vision.EncodedScreenshots(2 * size)
    for batch, encoded in ((one, 1), (two, 2), (one, 2), (three, 3), (one, 3), (two, 4)):
        assert vision.features(model, batch, kept) is not None
        assert kept.encoded == encoded
    nothing = vision.EncodedScreenshots(0)
    assert everything(vision.features(model, two, nothing))
    assert everything(vision.features(model, two, nothing)) and nothing.encoded == 2


def test_a_frozen_tower_gets_no_gradient_and_the_text_model_does(model: Any, screenshots: ProcessedScreenshots) -> None:
    def gradients(kept: vision.EncodedScreenshots | None) -> dict[str, Any]:
        model.zero_grad()
        batch = batch_of(screenshots, mixed(groups=1, rollouts=2))
        images = vision.features(model, batch, kept)
        hidden = model.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, mm_encoder_outputs={"image": images}
        ).last_hidden_state
        hidden.square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    trained = gradients(None)
    vision.freeze(model)
    frozen = gradients(vision.EncodedScreenshots(1 << 30))
    assert any("visual" in name for name in trained) and not any("visual" in name for name in frozen)
    assert {name for name in trained if "visual" not in name} == set(frozen)
    for name, value in frozen.items():
        torch.testing.assert_close(value, trained[name], rtol=1e-4, atol=1e-6)


def test_a_model_with_another_tower_is_refused() -> None:
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    with pytest.raises(UserError, match=r"trainer\.freeze_vision: .* leave it out"):
        vision.freeze(model)


def test_a_transformers_that_would_ignore_the_screenshots_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart.workers.train.model.ENCODED", "argument_of_another_version")
    with pytest.raises(UserError, match=r"install transformers 5\.19 or newer"):
        load_model(folder, torch.device("cpu"))
