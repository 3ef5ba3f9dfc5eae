"""Whether needs fit a card, and what would help where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dart.core.capacity.memory import Needs, Prompts, ReplicaSetUp, TrainerSetUp, gigabytes, of_rank, of_replica_gpu
from dart.core.capacity.shape import Shape, Text

REFUSED = 1.15
"""A run is refused only if it needs more than this many times what the card has: the estimate may be too high by that
much."""
TIGHT = 0.92
"""Above this share of the card, a warning says that it may not fit."""

LORA_RANK = 16
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What `trainer.lora: {}` stands for."""


def clearly_too_much(needs: Needs, memory: float) -> bool:
    return needs.total > REFUSED * memory


def tight(needs: Needs, memory: int) -> bool:
    return TIGHT * memory < needs.total <= REFUSED * memory


def trainer_remedies(shape: Shape, set_up: TrainerSetUp, prompts: Prompts) -> list[str]:
    """What each change would bring, in the order in which to try them, and what all of them would bring together."""
    together, told = set_up, []
    for advice, change in _trainer_changes(set_up, prompts):
        if (less := of_rank(shape, change(set_up), prompts).total) < of_rank(shape, set_up, prompts).total:
            told.append(f"{advice} ({gigabytes(less)})")
            together = change(together)
    if len(told) > 1:
        told.append(f"all of these ({gigabytes(of_rank(shape, together, prompts).total)})")
    return told


def _trainer_changes(set_up: TrainerSetUp, prompts: Prompts) -> Iterator[tuple[str, _Change]]:
    if not set_up.checkpointing:
        yield "trainer.gradient_checkpointing: true", _Change(checkpointing=True)
    if not set_up.sharded:
        ranks = max(8, set_up.ranks)
        yield f"trainer.sharding: full with trainer.ranks: {ranks}", _Change(sharded=True, ranks=ranks)
    else:
        more = 2 * set_up.ranks
        yield f"trainer.ranks: {more}", _Change(ranks=more)
    if set_up.microbatch_tokens > prompts.tokens:
        yield f"trainer.microbatch_tokens: {prompts.tokens}", _Change(microbatch_tokens=prompts.tokens)
    if not set_up.vision_frozen and not set_up.lora_rank:
        yield "trainer.freeze_vision: true", _Change(vision_frozen=True)
    if set_up.reference and not set_up.lora_rank:
        yield "trainer.loss.kl_coefficient: 0, which needs no reference model", _Change(reference=False)
    if not set_up.lora_rank:
        adapter = _Change(lora_rank=LORA_RANK, lora_targets=LORA_TARGETS)
        yield "trainer.lora: {}, which trains an adapter instead of the weights", adapter


class _Change:
    """Other values for some fields of a set-up."""

    def __init__(self, **values: int | bool | tuple[str, ...]) -> None:
        self._values = values

    def __call__(self, set_up: TrainerSetUp) -> TrainerSetUp:
        return replace(set_up, **self._values)  # type: ignore[arg-type]  # the callers above name its fields


def shares_heads(text: Text, ways: int) -> bool:
    """Whether vLLM can split attention so: whole heads on each GPU, and whole key-value heads or copies of one."""
    return not text.heads % ways and (not text.kv_heads % ways or not ways % text.kv_heads)


def replica_remedies(shape: Shape, set_up: ReplicaSetUp, tokens: int) -> list[str]:
    """Twice the tensor parallelism as often as helps and vLLM can, and a shorter context."""
    told, size = [], set_up.tensor_parallel
    while size < 8 and shares_heads(shape.text, 2 * size):
        size *= 2
        less = of_replica_gpu(shape, replace(set_up, tensor_parallel=size), tokens).total
        told.append(f"rollout.tensor_parallel: {size} ({gigabytes(less)})")
    half = of_replica_gpu(shape, set_up, tokens // 2).total
    if half < 0.9 * of_replica_gpu(shape, set_up, tokens).total:
        told.append(f"half of rollout.max_model_len ({gigabytes(half)})")
    return told
