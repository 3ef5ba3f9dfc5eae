"""Screenshots are kept as bytes and prepared ahead, and are what the checkpoint's processor makes of them."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from PIL import Image as Picture

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

import tiny_model  # noqa: E402
from train_samples import PAD, alone, sample, screenshot  # noqa: E402

from dart.core.types import Image  # noqa: E402
from dart.screenshots.lookup import BadScreenshot  # noqa: E402
from dart.v1 import image_pb2 as ipb  # noqa: E402
from dart.wire.convert import image_from_proto  # noqa: E402
from dart.workers.train import screenshots as module  # noqa: E402
from dart.workers.train.batch import Layout, collate  # noqa: E402
from dart.workers.train.screenshots import ProcessedScreenshots  # noqa: E402

LAYOUT = Layout(vocab_size=264, image_token_id=PAD, merge_size=2, banned=(3, 4, 5, 6, 7), pairs_per_token=1000.0)
SIZES = ((64, 96), (96, 64), (97, 45), (330, 170))
"""Of which the last two are resized."""


def processors() -> list[Any]:
    """One with the means of Qwen3-VL, and one with those of Qwen2.5-VL and its patches."""
    from transformers import Qwen2VLImageProcessor

    half = tiny_model.build_processor(tiny_model.build_tokenizer()).image_processor
    return [half, Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})]


@pytest.fixture(scope="module")
def processor() -> Any:
    return processors()[0]


def shots(count: int) -> list[Image]:
    return [image_from_proto(screenshot(seed, *SIZES[seed % len(SIZES)])) for seed in range(count)]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("which", [0, 1])
def test_values_are_the_processors_own_to_the_bit(which: int, threads: int) -> None:
    processor = processors()[which]
    images = shots(6)
    held = ProcessedScreenshots(processor, threads=threads)
    held.ahead(images)
    found = held.get(images)
    for image in images:
        picture = Picture.open(io.BytesIO(image.data)).convert("RGB")
        expected = processor(images=[picture], return_tensors="pt")
        one = found[image.sha256]
        assert torch.equal(one.pixel_values, expected["pixel_values"])
        assert one.grid == tuple(expected["image_grid_thw"][0].tolist())
        assert one.patches.dtype == torch.uint8
        assert one.patches.nbytes * 8 == one.pixel_values.nbytes == one.patches.untyped_storage().nbytes() * 8
    held.close()


def test_a_micro_batch_gets_its_values_where_it_goes(processor: Any) -> None:
    protos: list[ipb.Image] = [screenshot(0), screenshot(1, 96, 64)]
    row = alone(sample("a", "go", "1", 1.0, protos), LAYOUT)
    images = ProcessedScreenshots(processor).get(row.images)
    batch = collate([row], images, LAYOUT)
    there = batch.to(torch.device("cpu"))
    assert there.pixel_form is None
    assert batch.pixel_values is not None and batch.pixel_values.dtype == torch.uint8
    assert torch.equal(there.pixel_values, torch.cat([images[image.sha256].pixel_values for image in row.images]))
    assert torch.equal(there.to(torch.device("cpu")).pixel_values, there.pixel_values)


def test_a_processor_that_normalises_in_another_way_keeps_its_own_values() -> None:
    from transformers import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(do_normalize=False)
    (image,) = shots(1)
    one = ProcessedScreenshots(processor).get([image])[image.sha256]
    expected = processor(images=[Picture.open(io.BytesIO(image.data))], return_tensors="pt")["pixel_values"]
    assert one.form is None and torch.equal(one.pixel_values, expected)


class Watched:
    """A processor that notes the threads which use it, and waits for permission."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.threads: list[str] = []
        self.may = threading.Event()
        self.may.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, **options: Any) -> Any:
        assert self.may.wait(60.0)
        self.threads.append(threading.current_thread().name)
        return self._processor(**options)


def test_screenshots_are_prepared_ahead_and_each_once(processor: Any) -> None:
    watched = Watched(processor)
    held = ProcessedScreenshots(watched, threads=2)
    images = shots(module.AHEAD + 9)
    held.ahead([*images, *images])
    for start in range(0, len(images), 3):
        assert len(held.get(images[start : start + 3])) == min(3, len(images) - start)
        assert len(held._begun) <= module.AHEAD
    assert len(watched.threads) == len(images) and not held._begun
    assert all(name.startswith("screenshots") for name in watched.threads)
    held.get(images)
    assert len(watched.threads) == len(images), "they are kept"
    held.close()


def test_what_is_not_wanted_any_more_is_not_prepared(processor: Any) -> None:
    watched = Watched(processor)
    held = ProcessedScreenshots(watched, threads=1)
    images = shots(12)
    watched.may.clear()
    held.ahead(images[:10])
    held.ahead(images[10:])
    watched.may.set()
    held.get(images[10:])
    assert len(watched.threads) <= 1 + 2, "one may have begun before"
    held.close()


def test_without_threads_the_caller_does_it(processor: Any) -> None:
    watched = Watched(processor)
    held = ProcessedScreenshots(watched)
    held.ahead(shots(3))
    assert watched.threads == []
    held.get(shots(3))
    assert set(watched.threads) == {threading.current_thread().name}


def test_a_bad_screenshot_is_said_when_it_is_wanted(processor: Any) -> None:
    good = shots(2)
    bad = Image(good[0].sha256, "image/png", 64, 96, good[1].data)
    held = ProcessedScreenshots(processor, threads=2)
    held.ahead([bad, good[1]])
    assert good[1].sha256 in held.get([good[1]])
    for _ in range(2):
        with pytest.raises(BadScreenshot, match="digest"):
            held.get([bad])
    assert good[0].sha256 in held.get([good[0]])
    held.close()
