"""From samples to model inputs: rows, micro-batches, tensors.

A *row* is one prompt followed by every response in the batch that was sampled from exactly that prompt: the first
steps of a group share theirs, and it is computed once. In a row, responses do not see each other, and each continues
the prompt's positions, so a response's log-probabilities and gradients are those it would have alone. Rows are sorted
by length and cut into *micro-batches* by padded tokens. Padding is on the right, where causal attention never looks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from dart.algo.importance import ROUNDING
from dart.algo.steps import Steps
from dart.core.types import Image, Sample
from dart.workers.train.errors import SampleError
from dart.workers.train.screenshots import Processed

MAX_PADDING = 0.05
"""The largest share of a micro-batch's padded tokens that may be padding."""
MOST_VERSIONS = 1 << 62
SMALL = 1 / 32
"""A micro-batch with at most this share of the token limit may be padded more."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The properties of the checkpoint that determine the shape of its inputs."""

    vocab_size: int
    image_token_id: int
    merge_size: int
    banned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and the samples (at least one) whose responses followed from it."""

    samples: tuple[Sample, ...]

    @property
    def prompt(self) -> Sequence[int]:
        return self.samples[0].generation.prompt_token_ids

    @property
    def images(self) -> tuple[Image, ...]:
        return self.samples[0].images

    @property
    def responses(self) -> list[Sequence[int]]:
        return [sample.generation.token_ids for sample in self.samples]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(map(len, self.responses))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one forward pass over B rows of L tokens, and T response tokens of S steps, flat.

    input_ids int64 [B, L]; position_ids int64 [3, B, L] (time, height, width); attention_mask bool [B, 1, L, L], or
    None where causal attention is right; pixel_values float32 [patches, …] and image_grid_thw int64 [U, 3] of the U
    distinct images; image_index: for each image of the prompts, in reading order, which of the U it is. predict_index
    int64 [T]: the position in [B·L] whose hidden state predicts the token; token_ids int64 [T]; behaviour, advantages
    float32 [T]; rescored bool [T]: the behaviour policy is π_old; versions int64 [T]; steps: which of the S steps each
    token belongs to, in the order of the rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    pixel_values: torch.Tensor | None
    image_grid_thw: torch.Tensor | None
    image_index: tuple[int, ...]
    predict_index: torch.Tensor
    token_ids: torch.Tensor
    behaviour: torch.Tensor
    rescored: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor
    steps: Steps
    real_tokens: int

    @property
    def padded_tokens(self) -> int:
        rows, length = self.input_ids.shape
        return int(rows * length)

    def to(self, device: torch.device) -> MicroBatch:
        if self.input_ids.device == device:
            return self
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        steps = Steps(self.steps.index.to(device), self.steps.lengths.to(device))
        return replace(self, steps=steps, **moved)


def check(sample: Sample, layout: Layout) -> None:
    """Raises SampleError naming the sample if it is wrong; nothing is filled in, clipped or left out."""
    prompt, response = sample.generation.prompt_token_ids, sample.generation.token_ids
    if not prompt or not response:
        raise _wrong(sample, f"has {len(prompt)} prompt and {len(response)} response tokens: both are needed")
    if not math.isfinite(sample.advantage):
        raise _wrong(sample, f"has advantage {sample.advantage}: it must be finite")
    _check_logprobs(sample)
    if (largest := max(*prompt, *response)) >= layout.vocab_size:
        raise _wrong(sample, f"has token {largest}, but the vocabulary ends at {layout.vocab_size - 1}: another model?")
    if banned := set(response) & set(layout.banned):
        raise _wrong(sample, f"has vision tokens {sorted(banned)} in its response: the engine must ban them")
    covered = 0
    for span in sample.generation.versions:
        if span.start != covered or not covered < span.end <= len(response):
            raise _wrong(
                sample, f"has version span [{span.start}, {span.end}) after {covered} of {len(response)} tokens"
            )
        if span.version >= MOST_VERSIONS:
            raise _wrong(sample, f"has version {span.version}, which no run reaches")
        covered = span.end
    if covered != len(response):
        raise _wrong(sample, f"has versions for {covered} of {len(response)} tokens")


def _check_logprobs(sample: Sample) -> None:
    behaviour, tokens = sample.generation.logprobs, len(sample.generation.token_ids)
    if sample.rescore:
        if behaviour:
            raise _wrong(sample, f"has {len(behaviour)} log-probs and asks to be re-scored: only one is allowed")
        return
    if len(behaviour) != tokens:
        raise _wrong(sample, f"has {len(behaviour)} log-probs for {tokens} tokens: one each is needed")
    if not all(math.isfinite(value) for value in behaviour):
        raise _wrong(sample, "has a log-prob that is not finite")
    if max(behaviour) > ROUNDING:
        raise _wrong(sample, f"has a log-prob of {max(behaviour)}: none is above 0")


def _wrong(sample: Sample, why: str) -> SampleError:
    return SampleError(f"{sample.name} {why}", [sample.trajectory_id])


def make_rows(samples: Iterable[Sample], token_limit: int) -> list[Row]:
    """Put samples with the same prompt and screenshots into one row, of at most `token_limit` tokens if shared."""
    open_rows: dict[tuple[tuple[int, ...], tuple[bytes, ...]], list[Sample]] = {}
    rows: list[Row] = []
    for sample in samples:
        key = (tuple(sample.generation.prompt_token_ids), tuple(image.sha256 for image in sample.images))
        mates = open_rows.setdefault(key, [])
        if mates and Row((*mates, sample)).length > token_limit:
            rows.append(Row(tuple(mates)))
            mates.clear()
        mates.append(sample)
    return rows + [Row(tuple(mates)) for mates in open_rows.values()]


def samples_of(rows: Iterable[Row]) -> list[Sample]:
    """The rows' samples, in the order in which `MicroBatch.steps` counts them."""
    return [sample for row in rows for sample in row.samples]


def without(rows: Iterable[Row], left_out: Container[int]) -> list[Row]:
    """The rows without those samples (by `id`), and without rows that have no others."""
    kept = (tuple(sample for sample in row.samples if id(sample) not in left_out) for row in rows)
    return [Row(samples) for samples in kept if samples]


def cut(rows: Iterable[Row], token_limit: int) -> list[list[Row]]:
    """Micro-batches of rows of similar length, each of at most `token_limit` padded tokens (one row may be longer).

    A micro-batch ends before its padding exceeds MAX_PADDING, unless it is still small: small ones cost more than
    padding does.
    """
    parts: list[list[Row]] = []
    real = 0
    # Sorted by images, too, so that rows which share screenshots end up in one micro-batch.
    for row in sorted(rows, key=lambda row: (row.length, [image.sha256 for image in row.images])):
        padded = (len(parts[-1]) + 1) * row.length if parts else 0
        small = padded <= token_limit * SMALL
        if parts and padded <= token_limit and (small or real + row.length >= padded * (1 - MAX_PADDING)):
            parts[-1].append(row)
            real += row.length
        else:
            parts.append([row])
            real = row.length
    return parts


def collate(rows: Sequence[Row], images: dict[bytes, Processed], layout: Layout) -> MicroBatch:
    """Tensors of one micro-batch. Raises SampleError if a prompt's placeholders do not match its images."""
    length = max(row.length for row in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    position_ids = torch.zeros(3, len(rows), length, dtype=torch.int64)
    segments = torch.full((len(rows), length), -1, dtype=torch.int64)
    predict: list[int] = []
    order = list(dict.fromkeys(image.sha256 for row in rows for image in row.images))
    for index, row in enumerate(rows):
        prompt_positions, following = _prompt_positions(row, images, layout)
        end = len(row.prompt)
        input_ids[index, : row.length] = torch.tensor([*row.prompt, *itertools.chain(*row.responses)])
        position_ids[:, index, :end] = prompt_positions
        segments[index, :end] = 0
        base = index * length
        for number, response in enumerate(row.responses, start=1):
            start, end = end, end + len(response)
            position_ids[:, index, start:end] = torch.arange(following, following + len(response))
            segments[index, start:end] = number
            predict.append(base + len(row.prompt) - 1)
            predict.extend(range(base + start, base + end - 1))
    samples = samples_of(rows)
    lengths = torch.tensor([len(sample.generation.token_ids) for sample in samples])
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    step_index = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=_mask(segments) if any(len(row.samples) > 1 for row in rows) else None,
        pixel_values=torch.cat([images[digest].pixel_values for digest in order]) if order else None,
        image_grid_thw=torch.tensor([images[digest].grid for digest in order]) if order else None,
        image_index=tuple(order.index(image.sha256) for row in rows for image in row.images),
        predict_index=torch.tensor(predict),
        token_ids=torch.tensor([token for row in rows for response in row.responses for token in response]),
        behaviour=torch.tensor([value for sample in samples for value in _behaviour(sample)], dtype=torch.float32),
        rescored=torch.tensor([sample.rescore for sample in samples])[step_index],
        advantages=advantages[step_index],
        versions=torch.tensor([version for sample in samples for version in _versions(sample)]),
        steps=Steps(step_index, lengths),
        real_tokens=sum(row.length for row in rows),
    )


def _behaviour(sample: Sample) -> Sequence[float]:
    """The behaviour policy's log-probs; for a re-scored sample zeros, which π_old replaces."""
    return (0.0,) * len(sample.generation.token_ids) if sample.rescore else sample.generation.logprobs


def _versions(sample: Sample) -> Iterator[int]:
    """The weight version of each token."""
    for span in sample.generation.versions:
        yield from itertools.repeat(span.version, span.end - span.start)


def _mask(segments: torch.Tensor) -> torch.Tensor:
    """Causal; a response (segment ≥ 1) sees the prompt (0) and itself. Padding (−1) sees the prompt, unread."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    key, query = segments[:, None, :], segments[:, :, None]
    return (causal & ((key == 0) | (key == query))).unsqueeze(1)


def _prompt_positions(row: Row, images: dict[bytes, Processed], layout: Layout) -> tuple[torch.Tensor, int]:
    """Multimodal rotary positions int64 [3, P] of the prompt, and the position that follows it.

    Text counts up in all three rows; an image's tokens have one time and their own height and width, and the next
    text starts one after the largest.
    """
    pieces: list[torch.Tensor] = []
    position, at = 0, 0
    wanted = iter(row.images)
    prompt, pad = row.prompt, layout.image_token_id
    while at < len(prompt):
        end = at
        while end < len(prompt) and (prompt[end] == pad) == (prompt[at] == pad):
            end += 1
        if prompt[at] != pad:
            pieces.append(torch.arange(position, position + end - at).expand(3, -1))
            position += end - at
        else:
            image = next(wanted, None)
            tokens = 0 if image is None else images[image.sha256].tokens
            if image is None or tokens != end - at:
                what = "no image" if image is None else f"an image of {tokens} tokens"
                raise _no_match(row, f"has {end - at} image placeholders at {at} for {what}")
            _, height, width = images[image.sha256].grid
            height, width = height // layout.merge_size, width // layout.merge_size
            down, across = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
            pieces.append(torch.stack([torch.zeros_like(down), down, across]) + position)
            position += max(height, width)
        at = end
    if (left := sum(1 for _ in wanted)) > 0:
        raise _no_match(row, f"has {left} images without placeholders in its prompt")
    return torch.cat(pieces, dim=1), position


def _no_match(row: Row, why: str) -> SampleError:
    return SampleError(f"{row.samples[0].name} {why}", [sample.trajectory_id for sample in row.samples])
