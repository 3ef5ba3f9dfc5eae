"""The arithmetic of what fits, against published sizes and against hand-made sums."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from capacity_samples import QWEN3_VL_8B, UI_TARS_7B

from dart.config import BUILTIN_MODELS
from dart.core.capacity import memory, work
from dart.core.capacity.memory import Prompts, ReplicaSetUp, TrainerSetUp
from dart.core.capacity.shape import UnknownShape, read_shape

UI_TARS, QWEN3 = read_shape(UI_TARS_7B), read_shape(QWEN3_VL_8B)
FULL_HD = 2691
"""Tokens of a screenshot of 1920×1080, resized to 1932×1092: 69 · 39."""


def test_weights_are_those_of_the_published_checkpoints() -> None:
    # metadata.total_size of the published safetensors indexes is 16,584,333,312 and 17,534,247,392 bytes of bfloat16.
    assert 2 * UI_TARS.weights == 16_584_333_312
    assert 2 * QWEN3.weights == 17_534_247_392


def test_what_the_files_hold_counts_more_than_the_config() -> None:
    assert read_shape(UI_TARS_7B, stored=5).weights == 5


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"model_type": "llama"}, "model_type is llama"),
        ({}, "model_type is missing"),
        ({"model_type": "qwen3_vl"}, "no vision_config"),
        ({**UI_TARS_7B, "hidden_size": "wide"}, "is not a number"),
        ({name: value for name, value in UI_TARS_7B.items() if name != "vocab_size"}, "vocab_size is missing"),
    ],
)
def test_an_unknown_shape_says_what_is_wrong(document: dict[str, object], told: str) -> None:
    with pytest.raises(UnknownShape, match=told):
        read_shape(document)  # type: ignore[arg-type]


def test_a_rank_of_today_needs_what_nobody_has() -> None:
    prompts = Prompts.expected(5, FULL_HD, 30, most=32768)
    needs = memory.of_rank(UI_TARS, TrainerSetUp(checkpointing=True), prompts).parts
    assert needs["weights"] == needs["gradients"] == needs["reference"] == 4 * UI_TARS.weights
    assert needs["optimiser state"] == 8 * UI_TARS.weights
    assert sum(needs[name] for name in ("weights", "gradients", "reference", "optimiser state")) == pytest.approx(
        166e9, rel=0.01
    )


def test_eight_ranks_that_share_fit_a_card_of_eighty_gigabytes() -> None:
    prompts = Prompts.expected(5, FULL_HD, 30, most=32768)
    shared = TrainerSetUp(ranks=8, sharded=True, checkpointing=True)
    assert memory.of_rank(UI_TARS, shared, prompts).total < 70e9
    unchecked = TrainerSetUp(ranks=8, sharded=True)
    assert memory.of_rank(UI_TARS, unchecked, prompts).total > 100e9


def test_both_ends_hold_packs_of_weights_on_two_streams() -> None:
    prompts = Prompts.expected(5, FULL_HD, 30, most=32768)
    with_packs = memory.of_rank(UI_TARS, TrainerSetUp(transfers=1), prompts).parts
    assert "weight transfers" not in memory.of_rank(UI_TARS, TrainerSetUp(), prompts).parts
    # With the order of the model's weights the two largest packs in a row are 1.35 and 0.33 GB, there twice in rank 0.
    assert with_packs["weight transfers"] == pytest.approx(2 * (1.346e9 + 0.330e9), rel=0.06)
    replica = memory.of_replica_gpu(UI_TARS, ReplicaSetUp(nccl=True), 16_000).parts
    assert 2 * replica["weight transfers"] == with_packs["weight transfers"]
    assert "weight transfers" not in memory.of_replica_gpu(UI_TARS, ReplicaSetUp(), 16_000).parts
    three = memory.of_rank(UI_TARS, TrainerSetUp(transfers=3), prompts).parts
    assert three["weight transfers"] == 3 * with_packs["weight transfers"]
    small = replace(UI_TARS, stored=1_000_000)
    assert memory.of_rank(small, TrainerSetUp(transfers=1), prompts).parts["weight transfers"] == 4_000_000


def test_a_frozen_tower_has_no_gradient_no_moments_and_keeps_nothing() -> None:
    prompts = Prompts.expected(5, FULL_HD, 30, most=32768)
    free = memory.of_rank(UI_TARS, TrainerSetUp(), prompts).parts
    frozen = memory.of_rank(UI_TARS, TrainerSetUp(vision_frozen=True), prompts).parts
    assert free["gradients"] - frozen["gradients"] == 4 * UI_TARS.vision.weights
    assert free["optimiser state"] - frozen["optimiser state"] == 8 * UI_TARS.vision.weights
    assert free["activations"] > frozen["activations"]


def test_the_longest_prompt_makes_the_largest_micro_batch() -> None:
    prompts = Prompts(tokens=20_000, screenshots=5, screenshot_tokens=FULL_HD)
    small = memory.of_rank(UI_TARS, TrainerSetUp(microbatch_tokens=1000), prompts).parts["activations"]
    assert small == memory.of_rank(UI_TARS, TrainerSetUp(microbatch_tokens=20_000), prompts).parts["activations"]
    assert Prompts.expected(5, FULL_HD, 30, most=10_000).tokens == 10_000
    plain = Prompts.expected(5, FULL_HD, 30, most=32768).tokens
    assert Prompts.expected(5, FULL_HD, 30, most=32768, shown=9_000).tokens == plain + 9_000


def test_a_layer_that_is_computed_again_takes_the_room_of_the_logits() -> None:
    set_up = TrainerSetUp(checkpointing=True, microbatch_tokens=1)
    for tokens, fits in ((500, True), (20_000, False)):
        found = memory.of_rank(UI_TARS, set_up, Prompts(tokens, 0, 0)).parts["activations"]
        assert (found == memory.activations(UI_TARS, set_up, tokens, 0)) is fits


def test_the_kv_cache_is_divided_by_heads_and_by_stages() -> None:
    # 2 · 28 layers · 4 heads · 128 channels · 2 bytes = 57,344 bytes a token.
    assert memory.kv_bytes_per_token(UI_TARS.text, ReplicaSetUp()) == 57_344
    assert memory.kv_bytes_per_token(UI_TARS.text, ReplicaSetUp(tensor_parallel=2, pipeline_parallel=2)) == 57_344 / 4
    # Eight GPUs share four heads, so each head is kept twice.
    assert memory.kv_bytes_per_token(UI_TARS.text, ReplicaSetUp(tensor_parallel=8)) == 57_344 / 4


def test_a_replica_of_seven_billion_fits_one_card() -> None:
    one = memory.of_replica_gpu(UI_TARS, ReplicaSetUp(), tokens=32 * 16_000)
    assert one.parts["weights"] == 16_584_333_312
    assert 45e9 < one.total < 60e9
    assert memory.of_replica_gpu(UI_TARS, ReplicaSetUp(tensor_parallel=2), 32 * 16_000).total < one.total
    # 28 layers · (2 · 3584 · 128 · (28 + 4) + 3 · 3584 · 18,944) weights of one byte instead of two.
    quantised = memory.of_replica_gpu(UI_TARS, ReplicaSetUp(quantised=True), tokens=32 * 16_000)
    assert one.parts["weights"] - quantised.parts["weights"] == 6_525_288_448


def test_the_engines_process_has_the_prepared_screenshots_and_each_gpus_those_of_its_requests() -> None:
    prompts = Prompts.expected(5, FULL_HD, 30, most=32768)
    prepared = 4 * FULL_HD * 1176  # patches of 3 channels · 2 frames · 14 · 14 bytes
    for ways, workers in ((1, 0), (2, 2)):
        needs = memory.of_replica_host(UI_TARS, ReplicaSetUp(tensor_parallel=ways), prompts, processed=7, kept=5).parts
        assert (needs["prepared screenshots"], needs["screenshots as sent"]) == (7, 5)
        assert needs["screenshots of requests"] == workers * 32 * 5 * prepared
        assert needs["processes"] == (2 + workers) * memory.RUNTIME_CPU
    four = memory.of_replica_host(UI_TARS, ReplicaSetUp(pipeline_parallel=4), prompts, processed=0, kept=0).parts
    assert four["screenshots of requests"] == 4 * 32 * 5 * prepared


def test_the_host_keeps_snapshots_and_what_loading_takes_beyond_them() -> None:
    every = memory.of_trainer_host(UI_TARS, TrainerSetUp(on_gpus=False), ranks_here=8)
    assert every.total == 8 * 4 * UI_TARS.weights
    eight = TrainerSetUp(ranks=8, sharded=True)
    shared = memory.of_trainer_host(UI_TARS, replace(eight, on_gpus=False), ranks_here=8, snapshots=2)
    assert shared.total == (2 * 2 + 12) * UI_TARS.weights
    on_gpus = memory.of_trainer_host(UI_TARS, eight, ranks_here=8, snapshots=1)
    assert on_gpus.parts["snapshots"] == pytest.approx(18.2e9, rel=0.01), "of pinned memory, as one GPU counted"
    assert on_gpus.parts["processes"] == 8 << 30
    half = memory.of_trainer_host(UI_TARS, eight, ranks_here=4)
    assert half.parts["checkpoint"] == 6 * UI_TARS.weights
    frozen = memory.of_trainer_host(UI_TARS, replace(eight, vision_frozen=True), ranks_here=8)
    assert frozen.parts["checkpoint"] == 12 * UI_TARS.weights - 8 * UI_TARS.vision.weights, "masters of all weights"
    over_gloo = memory.of_trainer_host(UI_TARS, eight, ranks_here=8, receiving=2, senders=3)
    assert over_gloo.parts["weight transfers"] == 2 * (2 * UI_TARS.weights + 3 * 2 * UI_TARS.text.embedding)
    adapter = memory.of_trainer_host(UI_TARS, TrainerSetUp(lora_rank=16, lora_targets=("q_proj",)), ranks_here=1)
    assert adapter.parts["checkpoint"] == 12 * UI_TARS.text.adapter(16, ("q_proj",))


def test_operations_of_a_small_decoder_by_hand() -> None:
    load = work.Load(tokens=3, pairs=work.causal_pairs(3), responses=1, screenshots=0, patches=0)
    text = UI_TARS.text
    by_hand = 28 * (3 * 2 * text.layer_matrices + 6 * 4 * 3584) + 2 * 152064 * 3584
    assert work.forward(UI_TARS, load) == by_hand
    # Matrices are all of a layer but norms and biases.
    assert text.layer - text.layer_matrices == 2 * 3584 + 128 * (28 + 8)


def test_windows_make_attention_over_a_screenshot_cheaper() -> None:
    load = work.Load(0, 0, 0, screenshots=1, patches=4 * FULL_HD)
    vision = UI_TARS.vision
    per_patch = 2 * (1176 * 1280 + 32 * vision.block_matrices) + 2 * vision.merger_matrices / 4
    assert work.of_vision(vision, load) == pytest.approx(
        4 * FULL_HD * (per_patch + 4 * 1280 * (4 * 4 * FULL_HD + 28 * 64))
    )


def test_an_update_scores_refers_and_trains() -> None:
    load = work.Load(1000, work.causal_pairs(1000), 100, screenshots=1, patches=1000)
    forward = work.forward(UI_TARS, load)
    everything = work.update(UI_TARS, load, work.Passes(score=True, reference=True, trained_share=0.8))
    assert everything.model == pytest.approx(forward * (1 + 0.8 + 0.8 * 3))
    assert everything.recomputed == 0
    again = work.update(UI_TARS, load, work.Passes(score=True, reference=True, trained_share=0.8, recompute=True))
    assert again.model == everything.model
    assert again.recomputed == pytest.approx(0.8 * (forward - 2 * UI_TARS.text.embedding * 100))
    frozen = work.update(UI_TARS, load, work.Passes(score=False, reference=False, vision_trains=False))
    assert frozen.model == pytest.approx(3 * forward - 2 * work.of_vision(UI_TARS.vision, load))


def test_an_adapter_needs_no_gradient_of_the_weights_and_no_second_model() -> None:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    # Per layer: q and o 3584 + 3584, k and v 3584 + 512, and three of 3584 + 18944.
    adapter = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert UI_TARS.text.adapter(16, targets) == adapter
    with_adapter = TrainerSetUp(checkpointing=True, lora_rank=16, lora_targets=targets)
    needs = memory.of_rank(UI_TARS, with_adapter, Prompts.expected(5, FULL_HD, 30, most=32768)).parts
    assert needs["weights"] == 2 * UI_TARS.weights + 4 * adapter, "held in bfloat16, because they never change"
    assert needs["bfloat16 copies"] == 2 * adapter
    assert needs["gradients"] == 4 * adapter
    assert needs["optimiser state"] == 8 * adapter
    assert needs["reference"] == 0
    load = work.Load(1000, work.causal_pairs(1000), 100, screenshots=1, patches=1000)
    passes = work.Passes(score=False, reference=True, vision_trains=False, weights_train=False)
    text, vision = work.of_text(UI_TARS.text, load), work.of_vision(UI_TARS.vision, load)
    pairs = 4 * 28 * 28 * 128 * load.pairs
    assert work.update(UI_TARS, load, passes).model == pytest.approx(2 * (text + vision) + (text - pairs) + 2 * pairs)
    tower = work.Passes(score=False, reference=True, vision_trains=True, weights_train=False)
    vision_pairs = 1000 * 4 * 1280 * (4 * 1000 + 28 * 64)
    assert work.update(UI_TARS, load, tower).model == pytest.approx(
        2 * (text + vision) + (text - pairs) + 2 * pairs + (vision - vision_pairs) + 2 * vision_pairs
    )


def test_seconds_of_an_update() -> None:
    assert work.seconds(8e15, gpus=8, peak=1e15, utilisation=0.5) == 2.0


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H800 PCIe", 756e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("A800-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("Tesla K80", None),
    ],
)
def test_the_peak_of_a_card(card: str, peak: float | None) -> None:
    assert work.peak_of(card) == peak


def test_needs_are_told_largest_first() -> None:
    needs = memory.Needs({"small": 1, "weights": 2 * 10**9, "optimiser state": 4 * 10**9})
    assert needs.told() == "optimiser state 4.0 GB, weights 2.0 GB"


def test_the_models_that_ship_are_read() -> None:
    folders = sorted(BUILTIN_MODELS.glob("*/config.json"))
    assert len(folders) >= 3
    for path in folders:
        assert read_shape(json.loads(path.read_text())).weights > 1_000_000
