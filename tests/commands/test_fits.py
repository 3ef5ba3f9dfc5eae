"""`dart doctor` and `dart train`: what fits the cards of a machine."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from capacity_samples import QWEN3_VL_8B, UI_TARS_7B

from dart.config import Config, Lora, load, parse
from dart.core.capacity import devices, machine, memory
from dart.core.capacity.memory import Needs, Prompts, TrainerSetUp
from dart.core.capacity.shape import read_shape
from dart.core.capacity.verdict import LORA_RANK, LORA_TARGETS, clearly_too_much, tight, trainer_remedies
from dart.errors import UserError
from dart.job import Collect, Evaluate, Train
from dart.processes import fits, gpus
from dart.processes.gpus import Card, cards_of

H100 = Card("NVIDIA H100 80GB HBM3", 81559 << 20)
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def eight_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 16, H100)


def _cards(monkeypatch: pytest.MonkeyPatch, number: int, card: Card) -> None:
    names = [str(index) for index in range(number)]
    monkeypatch.setattr(fits, "gpus_here", lambda: names)
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    monkeypatch.setattr(fits, "cards_of", lambda gpus: dict.fromkeys(gpus, card))


def _config(tmp_path: Path, document: dict[str, Any] = UI_TARS_7B, **sections: Any) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(document))
    fields: dict[str, Any] = {
        "model": {"path": str(tmp_path)},
        "environment": {"tasks": {"names": ["click-button"]}, "viewport": [1920, 1080]},
        "rollout": {"replicas": 4, "tensor_parallel": 2},
        "trainer": {"ranks": 8},
        "stop": {"updates": 1},
        "evaluation": {"episodes": 0},
    }
    return parse(fields | sections)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_config_that_ships_is_refused_on_a_machine_without_gpus(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 0, H100)
    config = load(path, ("sync.transport=gloo",))
    for job in (Train(), Evaluate(), Collect("oracle", (0, 1), 1, 1, 1, 1.0)):
        assert fits.too_much(config, job) is None


@pytest.mark.parametrize("name", ["ladder_demo", "miniwob_cpu", "desktop_cpu"])
def test_the_small_models_fit_any_card_and_any_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(next(path for path in CONFIGS if path.stem == name))
    _cards(monkeypatch, 0, H100)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 16 << 30)
    assert fits.warnings(config, Train()) == []
    _cards(monkeypatch, 8, Card("a small one", 8 << 30))
    assert fits.too_much(config, Train()) is None


@pytest.mark.usefixtures("eight_cards")
def test_seven_billion_weights_on_every_rank_are_refused_with_what_helps(tmp_path: Path) -> None:
    told = fits.too_much(_config(tmp_path), Train())
    assert told is not None
    assert told.startswith("each trainer rank needs about ")
    assert "GPU 0 (NVIDIA H100 80GB HBM3) has 85.5 GB" in told
    assert "trainer.gradient_checkpointing: true (" in told
    assert "trainer.loss.kl_coefficient: 0" in told
    assert "replica" not in told


@pytest.mark.usefixtures("eight_cards")
def test_without_a_trainer_the_same_machine_serves_the_model(tmp_path: Path) -> None:
    for document in (UI_TARS_7B, QWEN3_VL_8B):
        assert fits.too_much(_config(tmp_path, document), Evaluate()) is None


def test_a_replica_that_does_not_fit_is_told_to_use_more_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 16, Card("a small card", 12 << 30))
    config = _config(tmp_path, rollout={"replicas": 1}, trainer={"ranks": 1})
    told = fits.too_much(config, Evaluate())
    assert told is not None
    assert "each GPU of a replica (1 each) needs about" in told
    assert "rollout.tensor_parallel: 2 (" in told


def test_heads_are_shared_evenly_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses anything else, after it has loaded the model."""
    _cards(monkeypatch, 16, H100)
    told = fits.too_much(_config(tmp_path, rollout={"replicas": 1, "tensor_parallel": 8}), Evaluate())
    assert told == "rollout.tensor_parallel: 8 ways cannot share this model's 28 attention heads: use 1, 2, 4"
    _cards(monkeypatch, 16, Card("a small card", 6 << 30))
    advised = fits.too_much(_config(tmp_path, rollout={"replicas": 1}), Evaluate())
    assert advised is not None and "rollout.tensor_parallel: 4 (" in advised and "tensor_parallel: 8" not in advised


def test_what_an_environment_shows_is_a_part_of_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 16, H100)
    plain = fits.expected_prompts(_config(tmp_path, rollout={"max_model_len": 65_536})).tokens
    agent = {"show": ["accessibility_tree"], "shown_characters": 8_000, "history_screenshots": 5}
    shown = fits.expected_prompts(_config(tmp_path, rollout={"max_model_len": 65_536}, agent=agent)).tokens
    assert shown == plain + 5 * 2_000


def test_what_replicas_receive_over_gloo_is_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most `max_unavailable` replicas at once, and as many whose last transfer broke; buffers for every one."""
    _cards(monkeypatch, 8, H100)
    whole, buffers, snapshots = 16_584_333_312, 4 * 152_064 * 3584, "snapshots"
    merged: dict[str, Any] = {"ranks": 1, "lora": {}}
    for trainer, replicas, more, expected in (
        (merged, 1, {}, whole + buffers),
        (merged, 3, {}, 2 * 2 * whole + 3 * buffers),
        (merged, 3, {"schedule": {"sync": "all"}}, 3 * 2 * whole + 3 * buffers),
        ({"ranks": 1, "lora": {"sync": "adapter"}}, 3, {}, 0),
    ):
        rollout = {"replicas": replicas, "tensor_parallel": min(2, replicas)}
        config = _config(tmp_path, rollout=rollout, sync={"transport": "gloo"}, trainer=trainer, **more)
        found = fits.fit(config, Train())
        assert found is not None and found.trainer_host.parts["weight transfers"] == expected
        assert found.trainer_host.parts[snapshots] == pytest.approx((3.3 if expected else 1.1) * whole)
        told = any("with what the replicas receive" in note for note in fits.notes(config, Train()))
        assert told == (expected > 0)


def test_nothing_is_refused_where_cards_or_model_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 16, H100)
    monkeypatch.setattr(fits, "cards_of", lambda gpus: {})
    assert fits.too_much(_config(tmp_path), Train()) is None
    _cards(monkeypatch, 16, H100)
    assert fits.too_much(_config(tmp_path, {"model_type": "another"}), Train()) is None
    assert fits.notes(_config(tmp_path, {"model_type": "another"}), Train()) == []


def test_workers_that_share_a_card_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 1, Card("a card", 40 << 30))
    config = _config(tmp_path, rollout={"replicas": 3}, trainer={"ranks": 1}, sync={"transport": "gloo"})
    assert "is shared by 3 workers that need about" in (fits.too_much(config, Evaluate()) or "")


def test_vllm_is_to_leave_room_for_others_on_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a share of the card, however little it needs, and does not start if that is not free."""
    _cards(monkeypatch, 1, H100)
    sections: dict[str, Any] = {"sync": {"transport": "gloo"},
                                "trainer": {"ranks": 1, "lora": {}, "gradient_checkpointing": True}}  # fmt: skip
    told = fits.too_much(_config(tmp_path, **sections, rollout={"replicas": 1}), Train()) or ""
    share = 0.95 - fits.fit(_config(tmp_path, **sections), Train()).rank_needs.total / H100.bytes  # type: ignore[union-attr]
    assert "is shared by 2 workers, and vLLM takes 92% of it for each replica" in told
    most = float(told.rpartition("gpu_memory_utilization to 0.27 or more and ")[2].removesuffix(" or less"))
    assert 0.5 < most <= share < most + 0.01
    for value, refused in ((most, False), (most + 0.01, True)):
        rollout = {"replicas": 1, "engine_args": {"gpu_memory_utilization": value}}
        assert (fits.too_much(_config(tmp_path, **sections, rollout=rollout), Train()) is not None) == refused
    two = fits.too_much(_config(tmp_path, rollout={"replicas": 2}, sync={"transport": "gloo"}), Evaluate()) or ""
    assert "gpu_memory_utilization to 0.27 or more and 0.47 or less" in two
    four = fits.too_much(_config(tmp_path, rollout={"replicas": 4}, sync={"transport": "gloo"}), Evaluate()) or ""
    assert "is shared by 4 workers" in four and "of which each needs 27%: lower rollout.replicas" in four
    assert fits.too_much(_config(tmp_path, rollout={"replicas": 1}, sync={"transport": "gloo"}), Evaluate()) is None


def test_vllms_share_of_its_card_holds_the_weights_and_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cards(monkeypatch, 1, H100)

    def told(share: float, **rollout: Any) -> str:
        rollout = {"replicas": 1, "engine_args": {"gpu_memory_utilization": share}, **rollout}
        return fits.too_much(_config(tmp_path, rollout=rollout), Evaluate()) or ""

    assert "GPU 0 (NVIDIA H100 80GB HBM3) has 85.5 GB, and vLLM takes 20% of it for each replica, which" in told(0.2)
    assert told(0.2).endswith("): set rollout.engine_args.gpu_memory_utilization to 0.27 or more")
    assert not told(0.27)
    assert not told(0.2, kv_cache_bytes=4 << 30), "then vLLM takes what it needs"
    _cards(monkeypatch, 2, Card("a small card", 20 << 30))
    assert "rollout.tensor_parallel: 2 (" in told(0.5) and "gpu_memory_utilization to" not in told(0.5)


def test_a_kv_cache_holds_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses a smaller one on any machine."""
    _cards(monkeypatch, 0, H100)
    one = 32_768 * 57_344
    for size, refused in ((one - 1, True), (one, False)):
        config = _config(tmp_path, rollout={"replicas": 1, "kv_cache_bytes": size}, sync={"transport": "gloo"})
        told = fits.too_much(config, Evaluate())
        expected = "rollout.kv_cache_bytes: one request of max_model_len needs 1.9 GB: raise it, or lower max_model_len"
        assert told == (expected if refused else None)


@pytest.mark.usefixtures("eight_cards")
def test_only_training_transfers_weights(tmp_path: Path) -> None:
    for job, transfers in ((Train(), True), (Evaluate(), False), (Collect("oracle", (0, 1), 1, 1, 1, 1.0), False)):
        found = fits.fit(_config(tmp_path), job)
        assert found is not None and ("weight transfers" in found.replica_needs.parts) == transfers


def test_workers_that_use_no_gpu_share_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU builds of torch and vLLM on a machine that has a card."""
    _cards(monkeypatch, 1, H100)
    monkeypatch.setattr(devices, "on_cpu", lambda: True)
    config = load(next(path for path in CONFIGS if path.stem == "ladder_demo"))
    assert fits.too_much(config, Train()) is None
    assert fits.warnings(config, Train()) == []
    assert not any("it gets" in note for note in fits.notes(config, Train()))


def test_the_machines_own_memory_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 16, H100)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 128 << 30)
    (told,) = fits.warnings(_config(tmp_path), Train())
    assert "replicas 55.5 GB" in told and "checkpoint 99.5 GB" in told
    assert "of this machine's own memory, which is 137.4 GB: lower rollout.processor_cache_bytes, lower tr" in told
    adapted = {"ranks": 1, "lora": {}, "gradient_checkpointing": True}
    assert fits.warnings(_config(tmp_path, trainer=adapted), Train()) == []
    needs = fits.fit(_config(tmp_path, trainer=adapted), Train())
    assert needs is not None and needs.trainer_host.parts["caches of screenshots"] == (4 << 30) + (512 << 20)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 50 << 30)
    (told,) = fits.warnings(_config(tmp_path), Evaluate())
    assert "which is 53.7 GB: lower rollout.processor_cache_bytes, or spread" in told
    _cards(monkeypatch, 4, H100)
    (told,) = fits.warnings(_config(tmp_path, trainer={"ranks": 4}), Train())
    assert "replicas" not in told, "they are on other machines"


def test_the_encodings_that_an_engine_keeps_are_counted(tmp_path: Path) -> None:
    kept = fits.replica_set_up(_config(tmp_path), Evaluate(), gpus=True).encoder_tokens
    assert kept == 4 * 5 * 2691
    more = _config(tmp_path, QWEN3_VL_8B, rollout={"encoder_cache_tokens": 1_000_000})
    shape = read_shape(QWEN3_VL_8B)
    needs = memory.of_replica_gpu(shape, fits.replica_set_up(more, Evaluate(), gpus=True), 32_768)
    assert needs.parts["encoder cache"] == 2 * 1_000_000 * 4096 * 4, "with three levels of deepstack"


@pytest.mark.usefixtures("eight_cards")
def test_doctor_says_what_each_role_needs(tmp_path: Path) -> None:
    text = "\n".join(fits.notes(_config(tmp_path), Train()))
    assert "model: 8,292,166,656 weights, by its config.json" in text
    assert "trainer: each of 8 ranks needs about" in text
    assert "it gets NVIDIA H100 80GB HBM3 with 85.5 GB" in text
    assert "optimiser state 8.3 GB" in text, "each rank holds an eighth"
    assert "replicas: each GPU (or CPU) of 4 needs about" in text
    assert "with a KV cache of 32,768 tokens, the least; it gets" in text
    assert "40% of the cards' peak" in text


def test_what_is_needed_is_told_where_there_are_too_few_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 2, H100)
    told = fits.notes(_config(tmp_path), Train())
    assert any("trainer: each of 8 ranks needs about" in note for note in told)
    assert fits.too_much(_config(tmp_path), Train()) is None, "what is wrong is the number of GPUs"


def test_without_gpus_the_machines_memory_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 0, H100)
    config = _config(tmp_path, sync={"transport": "gloo"})
    monkeypatch.setattr(machine, "memory_bytes", lambda: 16 << 30)
    assert any("this machine has 17.2 GB" in told for told in fits.warnings(config, Train()))
    found = fits.fit(config, Evaluate())
    assert found is not None
    # Each of the four replicas has two parts, of 14 GB and more, and four processes, two of them with such a part.
    every = 4 * (2 * found.replica_needs.total + found.replica_host.total - 2 * memory.RUNTIME_CPU)
    for here, warned in ((every - 1, True), (every, False)):
        monkeypatch.setattr(machine, "memory_bytes", lambda here=here: here)
        assert bool(fits.warnings(config, Evaluate())) == warned
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**15)
    assert fits.warnings(config, Train()) == []
    assert fits.too_much(config, Train()) is None


def test_set_ups_follow_the_config(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        trainer={
            "ranks": 8, "freeze_vision": True, "gradient_checkpointing": True, "microbatch_tokens": 1000,
            "loss": {"kl_coefficient": 0.0},
        },
        rollout={
            "tensor_parallel": 2, "pipeline_parallel": 2, "slots": 4, "max_model_len": 30_000,
            "engine_args": {"max_num_batched_tokens": 16_384},
        },
    )  # fmt: skip
    trainer, replica = fits.trainer_set_up(config, gpus=True), fits.replica_set_up(config, Train(), gpus=True)
    expected = TrainerSetUp(8, True, True, True, False, True, 1000, fused=True, transfers=1)
    assert trainer == expected, "several ranks are sharded by default"
    assert (replica.pipeline_parallel, replica.batched_tokens) == (2, 16_384)
    coupled = config.model_copy(
        update={
            "schedule": config.schedule.model_copy(update={"sync": "all"}),
            "rollout": config.rollout.model_copy(update={"replicas": 5}),
        }
    )
    assert fits.trainer_set_up(coupled, gpus=True).transfers == 5, "all at once"
    adapted = fits.trainer_set_up(_config(tmp_path, trainer={"lora": {"target_modules": ["q_proj"]}}), gpus=True)
    assert (adapted.lora_rank, adapted.lora_targets) == (16, ("q_proj",))


def test_imitation_needs_no_reference_and_no_score(tmp_path: Path) -> None:
    imitation = _config(tmp_path, algorithm="sft", sft={"sources": ["x"]})
    set_up = fits.trainer_set_up(imitation, gpus=True)
    assert not set_up.reference and fits.trainer_set_up(_config(tmp_path), gpus=True).reference
    usual = _config(tmp_path).effective_trainer.passes
    assert imitation.effective_trainer.passes == replace(usual, score=False, reference=False, trained_share=1)


def test_the_weights_in_the_files_are_counted(tmp_path: Path) -> None:
    assert fits.stored_weights(tmp_path) is None
    header = json.dumps(
        {"__metadata__": {}, "a": {"dtype": "BF16", "shape": [3, 4]}, "b": {"dtype": "F32", "shape": []}}
    ).encode()
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"weights")
    assert fits.stored_weights(tmp_path) == 26
    (tmp_path / "two.safetensors").write_bytes(b"\x00" * 12)
    assert fits.stored_weights(tmp_path) is None


def test_the_builtin_model_counts_the_same_both_ways() -> None:
    config = load(next(path for path in CONFIGS if path.stem == "miniwob_cpu"))
    stored = fits.stored_weights(config.model.folder)
    document = json.loads((config.model.folder / "config.json").read_text())
    assert stored == read_shape(document).computed


def test_cards_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "nvidia-smi"
    lines = r"0, GPU-aa11, 81559, NVIDIA H100 80GB HBM3\n1, GPU-bb22, [N/A], NVIDIA GB\n2, GPU-cc33, 23034, NVIDIA L4\n"
    listing.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cards_of(["0", "1", "GPU-cc", "MIG-1"]) == {"0": H100, "GPU-cc": Card("NVIDIA L4", 23034 << 20)}
    assert cards_of([]) == {}
    listing.write_text("#!/bin/sh\nexit 9\n")
    assert cards_of(["0"]) == {}
    assert gpus.DESCRIBE[0] == "nvidia-smi"


def test_the_margin_between_what_is_refused_and_what_is_tight() -> None:
    assert clearly_too_much(Needs({"weights": 116}), 100)
    assert not clearly_too_much(Needs({"weights": 114}), 100)
    assert tight(Needs({"weights": 114}), 100)
    assert not tight(Needs({"weights": 92}), 100)


def test_remedies_say_what_each_change_brings() -> None:
    shape, prompts = read_shape(UI_TARS_7B), Prompts.expected(5, 2691, 30, 32768)
    new = trainer_remedies(shape, TrainerSetUp(), prompts)
    assert any("trainer.sharding: full with trainer.ranks: 8" in told for told in new)
    assert any("trainer.freeze_vision: true" in told for told in new)
    assert any("trainer.lora: {}, which trains an adapter" in told for told in new)
    assert Lora() == Lora(rank=LORA_RANK, target_modules=LORA_TARGETS), "it is said of the defaults"
    assert not any("trainer.lora" in told for told in trainer_remedies(shape, TrainerSetUp(lora_rank=8), prompts))
    assert new[-1].startswith("all of these (")
    assert any("trainer.ranks: 16" in told for told in trainer_remedies(shape, TrainerSetUp(8, True), prompts))


@pytest.mark.usefixtures("eight_cards")
def test_the_figures_in_the_documentation_are_those_of_the_formulas(tmp_path: Path) -> None:
    documentation = (Path(__file__).parents[2] / "docs" / "machines.md").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(UI_TARS_7B))
    config = load(next(one for one in CONFIGS if one.stem == "osworld_uitars15_7b"), (f"model.path={tmp_path}",))
    notes = fits.notes(config, Train())[1:]  # without the model, whose files are not there
    assert [note.partition(":")[0] for note in notes] == [
        "trainer", "trainer's host memory", "an update", "replicas", "replicas", "replicas' host memory",
    ]  # fmt: skip
    for note in notes:
        assert note.partition(" GB" if " GB" in note else " (")[0] in documentation, note
    prompts = {"ui": Prompts.expected(5, 2691, 30, 32768), "qwen": Prompts.expected(5, 2040, 30, 32768)}
    shapes = {"ui": read_shape(UI_TARS_7B), "qwen": read_shape(QWEN3_VL_8B)}
    fused: dict[str, Any] = {"checkpointing": True, "fused": True}
    adapter = {"lora_rank": 16, "lora_targets": LORA_TARGETS}
    rows: dict[str, TrainerSetUp] = {
        "every rank holds everything (`sharding: none`)": TrainerSetUp(fused=True),
        "the same with `gradient_checkpointing: true`": TrainerSetUp(**fused),
        "sharded over 8 ranks, with checkpointing": TrainerSetUp(8, sharded=True, **fused),
        "sharded over 4 ranks, with checkpointing": TrainerSetUp(4, sharded=True, **fused),
        "sharded over 8 ranks, with checkpointing and `freeze_vision: true`": TrainerSetUp(
            8, sharded=True, vision_frozen=True, **fused
        ),
        "one rank, `trainer.lora: {}` with checkpointing": TrainerSetUp(**fused, **adapter),
        "sharded over 8 ranks, `trainer.lora: {}` with checkpointing": TrainerSetUp(
            8, sharded=True, **fused, **adapter
        ),
    }
    for row, set_up in rows.items():
        sizes = [f"{memory.of_rank(shapes[one], set_up, prompts[one]).total / 1e9:.0f} GB" for one in shapes]
        assert f"| {row} | {' | '.join(sizes)} |" in documentation


@pytest.mark.usefixtures("eight_cards")
def test_train_refuses_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dart.commands import doctor, running

    names = {"memory of the gpus"}
    found = doctor.checks(_config(tmp_path), Train())
    assert names <= {name for name, _ in found}
    monkeypatch.setattr(doctor, "checks", lambda config, job: [one for one in found if one[0] in names])
    with pytest.raises(UserError, match="each trainer rank needs about"):
        running.check_before(_config(tmp_path), Train())
