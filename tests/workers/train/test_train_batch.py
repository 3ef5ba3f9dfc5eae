"""Samples → rows → micro-batches → tensors, and everything that is refused on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

import tiny_model  # noqa: E402
from train_samples import PAD, following, mixed, read, sample, screenshot  # noqa: E402

from dart.screenshots.lookup import BadScreenshot, UnknownScreenshot  # noqa: E402
from dart.v1 import image_pb2 as ipb  # noqa: E402
from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.wire.convert import image_from_proto  # noqa: E402
from dart.workers.train.batch import Layout, collate, cut, make_rows, without  # noqa: E402
from dart.workers.train.errors import SampleError  # noqa: E402
from dart.workers.train.screenshots import Processed, ProcessedScreenshots  # noqa: E402

LAYOUT = Layout(vocab_size=264, image_token_id=PAD, merge_size=2, banned=(3, 4, 5, 6, 7), pairs_per_token=1000.0)


@pytest.fixture(scope="module")
def processor() -> Any:
    return tiny_model.build_processor(tiny_model.build_tokenizer()).image_processor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from dart.workers.train.model import load_model

    folder = tmp_path_factory.mktemp("model")
    tiny_model.build(folder)
    return load_model(folder, torch.device("cpu"))


def rows_of(samples: list[pb.Sample], limit: int = 10_000) -> list[Any]:
    return make_rows([read(one, LAYOUT) for one in samples], limit, LAYOUT)


def test_steps_with_the_same_prompt_make_one_row() -> None:
    rows = rows_of(mixed(groups=3, rollouts=4))
    assert sorted(len(row.samples) for row in rows) == [1, 1, 1, 4, 4, 4]


def test_a_step_continues_the_one_before_it_in_its_row() -> None:
    """Three roll-outs of two steps; two of them begin with the same action, and so see the same screenshot."""
    first, second, other = screenshot(0), screenshot(1), screenshot(2)
    starts = [sample(f"{n}/0", "go", answer, 1.0, [first]) for n, answer in enumerate(["12", "12", "13"])]
    ends = [
        following(before, sample(f"{n}/1", "then", "9", 1.0, [seen]))
        for n, (before, seen) in enumerate(zip(starts, [second, second, other], strict=True))
    ]
    (row,) = rows_of([*ends, *starts])
    assert sorted(one.name for one in row.samples) == sorted(f"sample {n}/{s}/0" for n in range(3) for s in range(2))
    prompt, answer = len(starts[0].prompt_token_ids), len(starts[0].token_ids)
    rest = len(ends[0].prompt_token_ids) + len(ends[0].token_ids) - prompt - answer
    assert row.length == prompt + answer + rest + (answer - 1) + rest, "12 and 13 share their first token"
    assert [image.sha256 for image in row.images] == [first.sha256, second.sha256, other.sha256]
    assert not row.straight
    (alone,) = rows_of([starts[2], ends[2]])
    assert alone.straight and alone.length == len(ends[2].prompt_token_ids) + len(ends[2].token_ids)


def test_rows_without_some_samples_have_only_what_the_others_need() -> None:
    start = sample("0", "go", "12345", 1.0, [screenshot(0)])
    end = following(start, sample("1", "then", "9", 1.0, [screenshot(1)]))
    (row,) = rows_of([start, end])
    first, last = row.samples
    (left,) = without([row], {id(last)})
    assert left.samples == [first] and left.length == len(start.prompt_token_ids) + 6 and len(left.images) == 1
    (left,) = without([row], {id(first)})
    assert left.length == row.length, "the first step's response is part of the last one's prompt"
    assert without([row], {id(first), id(last)}) == []
    assert without([row], set())[0] is row


def test_episodes_share_a_row_where_that_is_cheaper() -> None:
    """Two episodes of two steps begin alike. In one row the beginning is computed once, but every token pays for a pair
    with every other."""
    first, second, third = screenshot(0), screenshot(1), screenshot(2)
    starts = [sample(f"{n}/0", "go", answer, 1.0, [first]) for n, answer in enumerate(["12", "34"])]
    ends = [
        following(before, sample(f"{n}/1", "then", "9", 1.0, [seen]))
        for n, (before, seen) in enumerate(zip(starts, [second, third], strict=True))
    ]
    shared = len(starts[0].prompt_token_ids)
    whole = len(ends[0].prompt_token_ids) + len(ends[0].token_ids)
    more_pairs = (2 * whole - shared) ** 2 - 2 * whole**2
    samples = [read(one, LAYOUT) for one in (*starts, *ends)]
    for pairs_per_token, rows in ((more_pairs / shared + 0.1, 1), (more_pairs / shared - 0.1, 2)):
        layout = replace(LAYOUT, pairs_per_token=pairs_per_token)
        made = make_rows(samples, 10_000, layout)
        assert len(made) == rows
        assert sum(row.length for row in made) == 2 * whole - shared * (rows == 1)
        assert all(row.straight for row in made) == (rows == 2), "a step stays with the one that it continues"


def test_same_text_over_another_screenshot_is_another_row() -> None:
    samples = [sample(str(seed), "go", "1", 1.0, [screenshot(seed)]) for seed in range(2)]
    assert len(rows_of(samples)) == 2


def test_rows_are_split_at_the_token_limit() -> None:
    samples = [sample(str(n), "go", f"{n}2345", 1.0, [screenshot(0)]) for n in range(6)]
    prompt = len(samples[0].prompt_token_ids)
    rows = rows_of(samples, prompt + 13)
    assert [len(row.samples) for row in rows] == [2, 2, 2]
    assert all(row.length <= prompt + 13 for row in rows)


def test_microbatches_hold_every_row_once_within_the_limit() -> None:
    rows = rows_of(mixed(groups=6))
    parts = cut(rows, 150)
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in rows)
    assert all(len(part) * max(row.length for row in part) <= 150 or len(part) == 1 for part in parts)
    longest = [max(row.length for row in part) for part in parts]
    assert longest == sorted(longest, reverse=True), "what does not fit into memory comes first"
    assert {part[0].straight for part in parts} == {True, False}


def test_padding_stays_small_when_lengths_differ() -> None:
    samples = [sample(str(n), "x" * (n * 7 % 120), "1" * (1 + n % 9), 1.0, []) for n in range(800)]
    rows = rows_of(samples)
    parts = cut(rows, 16384)
    padded = sum(len(part) * max(row.length for row in part) for part in parts)
    assert 1 - sum(row.length for row in rows) / padded <= 0.05
    assert len(parts) <= 32


def processed(processor: Any, *screenshots: ipb.Image) -> dict[bytes, Processed]:
    return ProcessedScreenshots(processor).get(map(image_from_proto, screenshots))


def test_positions_are_those_of_the_model(model: Any, processor: Any) -> None:
    samples = [one for one in mixed(groups=3, rollouts=1)]
    batch = collate(rows_of(samples), processed(processor, *(i for s in samples for i in s.images)), LAYOUT)
    for number, row in enumerate(rows_of(samples)):
        ids = batch.input_ids[number : number + 1, : row.length]
        grids = ProcessedScreenshots(processor).get(row.images)
        expected, _ = model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == PAD).int(),
            image_grid_thw=torch.tensor([grids[image.sha256].grid for image in row.images]),
        )
        assert torch.equal(batch.position_ids[:, number, : row.length], expected[:, 0])


def test_a_prompt_without_images(processor: Any) -> None:
    batch = collate(rows_of([sample("a", "go", "12", 1.0, [])]), {}, LAYOUT)
    assert batch.pixel_values is None
    assert batch.position_ids[:, 0].tolist() == [list(range(8))] * 3


def test_images_shared_by_rows_are_there_once(processor: Any) -> None:
    samples = mixed(groups=1, rollouts=2)
    batch = collate(rows_of(samples), processed(processor, *(i for s in samples for i in s.images)), LAYOUT)
    assert batch.image_grid_thw.shape[0] == 2
    assert sorted(batch.image_index) == [0, 0, 1]


def test_cache_drops_the_least_recently_used(processor: Any) -> None:
    one, two, three = (image_from_proto(screenshot(seed)) for seed in range(3))
    bytes_each = ProcessedScreenshots(processor).get([one])[one.sha256].patches.nbytes
    images = ProcessedScreenshots(processor, cache_bytes=2 * bytes_each)
    images.get([one])
    images.get([two])
    images.get([one])
    images.get([three])
    images.check_there([replace(image, data=b"") for image in (one, three)])
    with pytest.raises(UnknownScreenshot):
        images.check_there([replace(two, data=b"")])


def changed(**fields: Any) -> pb.Sample:
    one = sample("t", "go", "123", 1.0, [screenshot(0)])
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(one, name)[:]
            getattr(one, name).extend(value)
        else:
            setattr(one, name, value)
    return one


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": [-1.0] * 3}, "3 log-probs for 4 tokens"),
        ({"logprobs": []}, "0 log-probs for 4 tokens"),
        ({"logprobs": [-1.0, float("nan"), -1.0, -1.0]}, "not finite"),
        ({"token_ids": [], "logprobs": []}, "0 response tokens"),
        ({"prompt_token_ids": []}, "0 prompt"),
        ({"advantage": float("inf")}, "advantage"),
        ({"token_ids": [10, 11, 999, 2]}, "vocabulary"),
        ({"token_ids": [10, 11, PAD, 2]}, "vision tokens"),
        ({"versions": []}, "versions for 0 of 4"),
    ],
)
def test_a_wrong_sample_is_refused_and_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SampleError, match=message) as caught:
        read(changed(**fields), LAYOUT)
    assert "sample t/0" in str(caught.value)


def test_placeholders_must_match_images(processor: Any) -> None:
    image = screenshot(0)
    good = sample("t", "go", "1", 1.0, [image])
    images = processed(processor, image)
    few, many, none = pb.Sample(), pb.Sample(), pb.Sample()
    for one in (few, many, none):
        one.CopyFrom(good)
    few.prompt_token_ids.remove(PAD)
    many.images.append(image)
    del none.images[:]
    for one, message in ((few, "5 image placeholders"), (many, "1 images without"), (none, "for no image")):
        with pytest.raises(SampleError, match=message):
            collate(rows_of([one]), images, LAYOUT)


def test_images_must_be_what_their_digest_says(processor: Any) -> None:
    wrong = screenshot(0)
    wrong.sha256 = screenshot(1).sha256
    with pytest.raises(BadScreenshot, match="digest"):
        processed(processor, wrong)
    missing = screenshot(0)
    missing.ClearField("data")
    with pytest.raises(UnknownScreenshot, match="without data"):
        processed(processor, missing)
