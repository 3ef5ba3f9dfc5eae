"""The operations that the trainer counts in its updates, against the matrix products of a tiny model on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dart.core.capacity import work
from dart.core.capacity.shape import Shape, read_shape

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.torch

import tiny_model  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from train_samples import PAD, episodes, mixed, read, sample, screenshot, settings, totals  # noqa: E402

from dart.workers.train import batch as batches  # noqa: E402
from dart.workers.train.kernels import linear  # noqa: E402
from dart.workers.train.trainer import Trainer  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    tiny_model.build(path, text={"num_hidden_layers": 2}, vision={"depth": 2})
    return path


@pytest.fixture(scope="module")
def shape(folder: Path) -> Shape:
    return read_shape(json.loads((folder / "config.json").read_text()))


def _by_sample(samples: list[Any]) -> work.Load:
    """As if every sample were a row of its own, with screenshots of its own."""
    load = work.Load(0, 0, 0, 0, 0)
    for one in samples:
        tokens, images = len(one.prompt_token_ids) + len(one.token_ids), len(one.images)
        load += work.Load(tokens, work.causal_pairs(tokens), len(one.token_ids), images, patches=24)
    return load


def test_a_rows_pairs_are_those_that_its_mask_allows() -> None:
    layout = batches.Layout(vocab_size=264, image_token_id=PAD, merge_size=2, banned=(), pairs_per_token=1e3)
    rows = batches.make_rows([read(one, layout) for one in (*episodes(), *mixed())], 4096, layout)
    assert {row.straight for row in rows} == {True, False}
    for row in rows:
        assert row.pairs == int(batches._mask([row], row.length).sum())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_in_which_nothing_is_shared_takes_what_its_samples_take(
    folder: Path, shape: Shape, checkpointing: bool
) -> None:
    trainer = Trainer(settings(folder, loss={"kl_coefficient": 0.1}, gradient_checkpointing=checkpointing))
    samples = [sample(f"{k}", f"{k} words", "done", 1.0, [screenshot(k)] * (k % 2)) for k in range(4)]
    metrics = trainer.update(samples, *totals(samples))
    assert metrics["computed_tokens"] == _by_sample(samples).tokens
    expected = work.update(shape, _by_sample(samples), trainer.config.trainer.passes)
    assert metrics["model_operations"] == pytest.approx(expected.model)
    assert metrics["recomputed_operations"] == pytest.approx(expected.recomputed)
    assert (expected.recomputed > 0) is checkpointing


@pytest.mark.parametrize(
    "trainer",
    [
        {"loss": {"kl_coefficient": 0.1}},
        {"loss": {"kl_coefficient": 0.1, "entropy_quantile": 0.5}},
        {"minibatches": 2},
        {"freeze_vision": True, "loss": {"kl_coefficient": 0.1}},
        {"lora": {"rank": 1}, "loss": {"kl_coefficient": 0.1, "entropy_quantile": 0.5}},
        {"lora": {"rank": 1, "tower": True}, "loss": {"kl_coefficient": 0.1}},
    ],
    ids=str,
)
def test_an_updates_operations_are_those_of_its_matrix_products(
    folder: Path, shape: Shape, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any]
) -> None:
    """Of updates that encode screenshots, and of updates that find them encoded where the tower does not train."""
    if "lora" in trainer:
        pytest.importorskip("peft")
    # Products that torch's counter knows.
    monkeypatch.setattr(linear, "speed_up", lambda model: None)
    made = Trainer(settings(folder, **trainer))
    for samples in (episodes(rollouts=2, steps=4), mixed(groups=1)) * 2:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as products:
            metrics = made.update(samples, *totals(samples))
        # The counter has each token see all of its row; and there is no gradient of pixels.
        assert 0.92 < metrics["model_operations"] / products.get_total_flops() < 1.05
        everything = work.update(shape, _by_sample(samples), made.config.trainer.passes).model
        assert metrics["model_operations"] < 0.95 * everything, "its samples begin alike"
