"""Steps that continue one another go to the model as plain causal rows, so that flash kernels apply, and come out as
if each had been alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

import tiny_model  # noqa: E402
from train_samples import PAD, alone, episodes, mixed, read, sample, settings  # noqa: E402

from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.workers.train import batch as batches  # noqa: E402
from dart.workers.train.passes.faults import Faults  # noqa: E402
from dart.workers.train.passes.rounds import halves  # noqa: E402
from dart.workers.train.policy import Policy  # noqa: E402
from dart.workers.train.trainer import Trainer  # noqa: E402

LAYOUT = batches.Layout(vocab_size=264, image_token_id=PAD, merge_size=2, banned=(3, 4, 5, 6, 7), pairs_per_token=1e3)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model.build(folder)
    return Trainer(settings(folder))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """(has a mask, is causal) of every call of the text model's attention."""
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **options: Any) -> Any:
        calls.append((options.get("attn_mask") is not None, options["is_causal"]))
        return real(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return calls


def chains() -> list[pb.Sample]:
    """Episodes of different lengths that share nothing with each other."""
    samples = []
    for rollout, steps in enumerate((2, 4, 3)):
        made = episodes(rollouts=rollout + 1, steps=steps)[-steps:]
        for one in made:
            one.trajectory_id = f"{rollout}-{one.trajectory_id}"
            one.prompt_token_ids[0] = 200 + rollout
        samples += made
    return samples


def rows_of(samples: list[pb.Sample]) -> list[batches.Row]:
    return batches.make_rows([read(one, LAYOUT) for one in samples], 4096, LAYOUT)


def of(trainer: Trainer, part: list[batches.Row]) -> dict[str, Any]:
    """The log-probs of every sample, by name."""
    inputs = trainer._collate(part)
    logprobs, _ = trainer._forward(trainer.policy, inputs)
    names = [one.name for one in batches.samples_of(part)]
    return dict(zip(names, logprobs.split(inputs.steps.lengths.tolist()), strict=True))


def test_a_chain_has_no_mask_and_computes_what_its_samples_alone_do(
    trainer: Trainer, attended: list[tuple[bool, bool]]
) -> None:
    samples = chains()
    part = rows_of(samples)
    assert sorted(len(row.branches) for row in part) == [2, 3, 4]
    assert trainer._collate(part).attention_mask is None
    found = of(trainer, part)
    assert attended and set(attended) == {(False, True)}, "plain causal attention, for padded rows as well"
    expected = {name: value for one in samples for name, value in of(trainer, [alone(one, LAYOUT)]).items()}
    assert found.keys() == expected.keys()

    def gradients(values: dict[str, Any]) -> dict[str, Any]:
        trainer.model.zero_grad()
        (sum((number + 1) * values[name].mean() for number, name in enumerate(sorted(values))) / 100).backward()
        return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}

    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    ours, theirs = gradients(found), gradients(expected)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_rows_that_branch_do_not_give_chains_a_mask(trainer: Trainer) -> None:
    rows = rows_of([*chains(), *mixed()])
    assert {row.straight for row in rows} == {True, False}
    parts = batches.cut(rows, 4096)
    assert sorted(id(row) for part in parts for row in part) == sorted(map(id, rows))
    for part in parts:
        assert len({row.straight for row in part}) == 1
        assert (trainer._collate(part).attention_mask is None) == part[0].straight


def test_a_chain_that_does_not_fit_has_to_be_shorter_and_for_other_rows_the_limit_is_too_high() -> None:
    chain, *others = rows_of(chains())
    branching = next(row for row in rows_of(mixed()) if not row.straight)
    told = []
    for part in ([chain], [branching], [chain, *others]):
        faults = Faults()
        one, other = halves(part, faults)
        assert batches.samples_of(one + other) == batches.samples_of(part)
        told += faults.remarks
    shorter = "set trainer.gradient_checkpointing: true, or lower agent.history_turns or agent.history_screenshots"
    longest, fewer = max(row.length for row in (chain, *others)), "lower trainer.microbatch_tokens"
    assert told == [
        f"a micro-batch of {what} did not fit the device's memory and was halved: {remedy}"
        for what, remedy in (
            (f"one row of {len(chain.samples)} samples and {chain.length} tokens", shorter),
            (f"one row of {len(branching.samples)} samples and {branching.length} tokens", fewer),
            (f"{1 + len(others)} rows of up to {longest} tokens", fewer),
        )
    ]


def test_a_chain_without_its_first_and_last_steps_is_one_still() -> None:
    (row,) = rows_of(chains()[2:6])
    first, *_, last = row.samples
    (left,) = batches.without([row], {id(first), id(last)})
    assert left.straight and len(left.branches) == 2


def test_qwen2_5_vl_attends_causally_over_chains_too(attended: list[tuple[bool, bool]]) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 264, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 96}
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=PAD, attn_implementation="sdpa")
    ).eval()
    start = sample("0", "go", "12345", 1.0, [])
    longer = sample("1", "then", "9", 1.0, [])
    longer.prompt_token_ids[:0] = [*start.prompt_token_ids, *start.token_ids]
    part = rows_of([start, longer, sample("2", "elsewhere", "3", 1.0, [])])
    assert sorted(len(row.branches) for row in part) == [1, 2]
    Policy(model, 1.0, torch.tensor(LAYOUT.banned))(batches.collate(part, {}, LAYOUT))
    assert attended and set(attended) == {(False, True)}
