"""The policy as one module: a micro-batch in, log-probabilities and entropies of its response tokens out.

Everything that a training pass computes with the weights happens inside `Policy.forward`, so that weights which are
sharded over ranks (`dart.workers.train.sharding`) are gathered when a pass begins. The pass runs the vision tower once
per distinct screenshot of a micro-batch, the text model once per row, and the head at response positions only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dart.algo.logprobs import log_distribution, token_entropy, token_logprobs
from dart.workers.train import vision
from dart.workers.train.batch import MicroBatch
from dart.workers.train.passes.operations import Operations

HEAD_ELEMENTS = 1 << 26
"""The most logits (tokens × vocabulary) held at once; above it the head runs in chunks, recomputed for the gradient."""
ENCODED = "mm_encoder_outputs"
"""The argument of transformers' models that takes encoded screenshots, since 5.19."""


@dataclass(frozen=True, slots=True)
class Blank:
    """An image without content. pixel_values: float32 [patches, patch size]; grid: int64 [1, 3]; tokens: merged."""

    pixel_values: torch.Tensor
    grid: torch.Tensor
    tokens: int


class Policy(nn.Module):  # type: ignore[misc]
    """A vision-language model at a sampling temperature, without the tokens that roll-out engines never sample."""

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        banned: torch.Tensor,
        *,
        entropy_gradient: bool = False,
        blank: Blank | None = None,
        kept: vision.EncodedScreenshots | None = None,
        operations: Operations | None = None,
    ) -> None:
        """banned: int64, ids whose probability is 0. `entropy_gradient`: keep another [T, V] for that of the entropies.

        `kept`: what the vision tower made of screenshots, for a frozen tower. `blank`: encoded in passes that have
        nothing else to encode, with no effect on the result; sharded vision towers need it, because each rank must use
        every weight in every pass. `operations`: where each pass is noted.
        """
        super().__init__()
        self.model = model
        self._temperature, self._banned, self._entropy_gradient = temperature, banned, entropy_gradient
        self._blank, self.kept = blank, kept
        self._operations = operations or Operations()

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """log π(a_t) and entropy H_t of every response token, each float32 [T].

        Gradients flow through the first; through the second only if asked for.
        """
        before = self.kept.encoded if self.kept else 0
        images = vision.features(self.model, batch, self.kept)
        encoded = self.kept.encoded - before if self.kept else len(batch.image_digests)
        nothing: torch.Tensor | None = None
        if self._blank is not None and not encoded:
            nothing = self._blank_encoded(self._blank)
        inputs = {"input_ids": batch.input_ids} | ({} if images is None else {ENCODED: {"image": images}})
        if nothing is not None and nothing.requires_grad:
            # As with screenshots, so that sharded layers get their gradients in the same order, whatever else trains.
            inputs = {"inputs_embeds": self.model.get_input_embeddings()(batch.input_ids) + nothing}
        hidden = self.model.model(
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
            **inputs,
        ).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, batch.predict_index)
        logprobs, entropy = head(
            self.model.lm_head, hidden, batch.token_ids, self._temperature, self._banned, self._entropy_gradient
        )
        if self._blank is not None:
            # FSDP warns of results that are views.
            logprobs = logprobs.clone() if nothing is None else logprobs + nothing
        load = replace(batch.load, screenshots=encoded)
        self._operations.forwards.append(load)
        if logprobs.requires_grad:
            logprobs.register_hook(lambda _: self._operations.backwards.append(load))
        return logprobs, entropy

    def _blank_encoded(self, blank: Blank) -> torch.Tensor:
        """0, computed with the whole vision tower; with a gradient of 0 unless it is frozen."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.kept is None):
            images = self.model.model.get_image_features(blank.pixel_values, blank.grid, return_dict=True)
            levels = getattr(images, "deepstack_features", None) or []
            ends = [one[0].flatten()[0].float() for one in (images.pooler_output, *levels)]
            return torch.stack(ends).sum() * 0.0


def head(
    lm_head: nn.Linear,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float,
    banned: torch.Tensor,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the tokens, float32 [T], from the hidden states that predict them, [T, hidden]."""
    narrow = lm_head.weight.dtype != torch.float32
    # Sharded weights come in the model's dtype. Widened once, their gradient is summed over the chunks in float32.
    weight = lm_head.weight.float() if narrow else lm_head.weight
    bias = lm_head.bias.float() if narrow and lm_head.bias is not None else lm_head.bias

    def run(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Bfloat16 logits would put the log-probabilities off by 0.006 on average and 0.034 at most, and so every ratio.
        with torch.autocast(rows.device.type, enabled=False):
            logits = linear(rows.float(), weight, bias) if narrow else lm_head(rows.float())
        distribution = log_distribution(logits, temperature, banned)
        return token_logprobs(distribution, ids), token_entropy(distribution, gradient=entropy_gradient)

    size = max(1, HEAD_ELEMENTS // lm_head.weight.shape[0])
    if hidden.shape[0] <= size:
        return run(hidden, token_ids)
    parts = [
        checkpoint(run, rows, ids, use_reentrant=False)
        for rows, ids in zip(hidden.split(size), token_ids.split(size), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])
