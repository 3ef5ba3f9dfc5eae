"""From samples to model inputs: rows, micro-batches, tensors.

A *row* holds samples whose prompts begin alike, as a prefix tree: what they share is computed once. So a step whose
prompt begins with the prompt and response of the step before continues from there, and the episodes of a group share
their first prompt where that saves more than the longer row costs. A token sees the tokens on its way to the root, and
has the position that it would have alone, so log-probabilities and gradients are those of samples computed one by one.
Rows are sorted by length and cut into *micro-batches* by padded tokens. Padding is on the right, where causal attention
never looks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from dart.algo.importance import ROUNDING
from dart.algo.steps import Steps
from dart.core.capacity.work import Load, causal_pairs
from dart.core.types import Image, Sample
from dart.workers.train.errors import SampleError
from dart.workers.train.screenshots import PixelForm, Processed

MAX_PADDING = 0.05
"""The largest share of a micro-batch's padded tokens that may be padding."""
MOST_VERSIONS = 1 << 62
SHARED = 0.5
"""Samples join a row only if they share at least this part of their first prompt with it: less is not worth a mask."""
SMALL = 1 / 32
"""A micro-batch with at most this share of the token limit may be padded more."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The properties of the checkpoint that determine the shape of its inputs."""

    vocab_size: int
    image_token_id: int
    merge_size: int
    banned: tuple[int, ...]
    pairs_per_token: float
    """How many pairs of tokens cost as much in the attention as one token costs in all other layers."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """A sample to be put into rows. tokens: int64 [P + T], of prompt and response; keys: the same, but with a negative
    number of its image's own for each placeholder, so that prompts over different screenshots differ."""

    sample: Sample
    tokens: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, sample: Sample, digests: dict[bytes, int], layout: Layout) -> Keyed:
        """`digests` has the numbers of the images seen so far."""
        generation = sample.generation
        tokens = torch.tensor([*generation.prompt_token_ids, *generation.token_ids], dtype=torch.int64)
        pads = tokens == layout.image_token_id
        runs = (pads & ~torch.cat([_FALSE, pads[:-1]])).cumsum(0)
        numbers = [-1 - digests.setdefault(image.sha256, len(digests)) for image in sample.images]
        # A run of placeholders without an image stays as it is; `collate` refuses it.
        missing = max(0, int(runs.max()) - len(numbers))
        of_run = torch.tensor([0, *numbers, *[layout.image_token_id] * missing])
        return cls(sample, tokens, torch.where(pads, of_run[runs], tokens))

    def shared_with(self, other: Keyed) -> int:
        """The length of their common beginning."""
        size = min(len(self.keys), len(other.keys))
        differ = torch.nonzero(self.keys[:size] != other.keys[:size])
        return int(differ[0]) if len(differ) else size

    def images_from(self, start: int) -> tuple[Image, ...]:
        """The images whose placeholders begin at `start` or later."""
        image = self.keys < 0
        begins = image & (self.keys != torch.cat([torch.zeros(1, dtype=torch.int64), self.keys[:-1]]))
        at = torch.nonzero(begins).flatten().tolist()
        return tuple(one for one, begin in zip(self.sample.images, at, strict=False) if begin >= start)


@dataclass(frozen=True, slots=True)
class Branch:
    """One sample in a row. path: int64 [P + T], where in the row its tokens are; the first `shared` of them it has in
    common with the sample before it, the others are next to each other."""

    keyed: Keyed
    shared: int
    path: torch.Tensor

    @property
    def sample(self) -> Sample:
        return self.keyed.sample

    @property
    def own(self) -> slice:
        """Where in the row its own tokens are."""
        end = int(self.path[-1]) + 1
        return slice(end - len(self.path) + self.shared, end)

    @property
    def predict(self) -> torch.Tensor:
        """int64 [T]: where in the row the token before each response token is."""
        return self.path[len(self.sample.generation.prompt_token_ids) - 1 : -1]


@dataclass(frozen=True, slots=True)
class Row:
    """A prefix tree of samples, at least one. tokens: int64 [L]; images: those of its placeholders, in order."""

    branches: tuple[Branch, ...]
    tokens: torch.Tensor
    images: tuple[Image, ...]

    @classmethod
    def of(cls, samples: Sequence[Keyed]) -> Row:
        """The samples must be in the order of `make_rows`, where neighbours have the longest common beginnings."""
        branches: list[Branch] = []
        tokens: list[torch.Tensor] = []
        images: list[Image] = []
        length = 0
        for one in samples:
            shared = one.shared_with(branches[-1].keyed) if branches else 0
            own = torch.arange(length, length + len(one.keys) - shared)
            path = torch.cat([branches[-1].path[:shared], own]) if branches else own
            branches.append(Branch(one, shared, path))
            tokens.append(one.tokens[shared:])
            images += one.images_from(shared)
            length += len(own)
        return cls(tuple(branches), torch.cat(tokens), tuple(images))

    @property
    def samples(self) -> list[Sample]:
        return [branch.sample for branch in self.branches]

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def straight(self) -> bool:
        """Whether each sample continues the one before it, so that plain causal attention is right."""
        return all(len(branch.path) == int(branch.path[-1]) + 1 for branch in self.branches)

    @property
    def pairs(self) -> int:
        """Of a token with itself and each that it sees."""
        return sum(causal_pairs(len(one.path)) - causal_pairs(one.shared) for one in self.branches)


_FALSE = torch.zeros(1, dtype=torch.bool)
Batches = list[list[Row]]
"""Rows dealt into minibatches, or cut into micro-batches."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one forward pass over B rows of L tokens, and T response tokens of S steps, flat.

    input_ids int64 [B, L]; position_ids int64 [3, B, L] (time, height, width); attention_mask bool [B, 1, L, L], or
    None where causal attention is right; pixel_values float32 [patches, …] (bytes with a `pixel_form` until `to`),
    image_grid_thw int64 [U, 3] and image_digests of the U distinct images; image_index: for each image of the prompts,
    in reading order, which of the U it is. predict_index int64 [T]: the position in [B·L] whose hidden state predicts
    the token; token_ids int64 [T]; behaviour, advantages float32 [T]; rescored bool [T]: the behaviour policy is π_old;
    versions int64 [T]; steps: which of the S steps each token belongs to, in the order of the rows; load: without
    padding, and with the U images.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    pixel_values: torch.Tensor | None
    pixel_form: PixelForm | None
    image_grid_thw: torch.Tensor | None
    image_digests: tuple[bytes, ...]
    image_index: tuple[int, ...]
    predict_index: torch.Tensor
    token_ids: torch.Tensor
    behaviour: torch.Tensor
    rescored: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor
    steps: Steps
    load: Load

    @property
    def padded_tokens(self) -> int:
        rows, length = self.input_ids.shape
        return int(rows * length)

    def to(self, device: torch.device) -> MicroBatch:
        """On this device. Pixels travel as bytes, and become there what the model takes."""
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        if self.pixel_form is not None:
            moved["pixel_values"] = self.pixel_form.values(moved["pixel_values"])
        steps = Steps(self.steps.index.to(device), self.steps.lengths.to(device))
        return replace(self, steps=steps, pixel_form=None, **moved)


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
            raise _wrong(sample, f"has {len(behaviour)} log-probs and asks to be re-scored: send one or the other")
        return
    if len(behaviour) != tokens:
        raise _wrong(sample, f"has {len(behaviour)} log-probs for {tokens} tokens: one each is needed")
    if not all(math.isfinite(value) for value in behaviour):
        raise _wrong(sample, "has a log-prob that is not finite")
    if max(behaviour) > ROUNDING:
        raise _wrong(sample, f"has a log-prob of {max(behaviour)}: none is above 0")


def _wrong(sample: Sample, why: str) -> SampleError:
    return SampleError(f"{sample.name} {why}", [sample.trajectory_id])


def make_rows(samples: Iterable[Sample], token_limit: int, layout: Layout) -> list[Row]:
    """Put samples whose prompts begin alike into one row, of at most `token_limit` tokens, where that is cheaper.

    A chain of steps that continue each other stays whole, however long.
    """
    digests: dict[bytes, int] = {}
    # Any lexicographic order puts every sample next to the one with which it has the longest common beginning.
    keyed = sorted(
        (Keyed.of(sample, digests, layout) for sample in samples), key=lambda one: one.keys.numpy().tobytes()
    )
    groups: list[list[Keyed]] = []
    length = 0
    for chain in _chains(keyed):
        shared = chain[0].shared_with(groups[-1][-1]) if groups else 0
        much = bool(groups) and shared >= SHARED * len(chain[0].sample.generation.prompt_token_ids)
        whole = len(chain[-1].keys)
        joined = length + whole - shared
        # With a mask, every token of a row costs a pair with every other, seen or not.
        more_pairs = joined**2 - length**2 - whole**2
        if much and joined <= token_limit and shared * layout.pairs_per_token >= more_pairs:
            groups[-1] += chain
            length = joined
        else:
            groups.append(chain)
            length = whole
    return [Row.of(group) for group in groups]


def _chains(keyed: Iterable[Keyed]) -> Iterator[list[Keyed]]:
    """Samples each of which continues the one before it, as the steps of an episode do."""
    chain: list[Keyed] = []
    for one in keyed:
        if chain and chain[-1].shared_with(one) < len(chain[-1].keys):
            yield chain
            chain = []
        chain.append(one)
    if chain:
        yield chain


def samples_of(rows: Iterable[Row]) -> list[Sample]:
    """The rows' samples, in the order in which `MicroBatch.steps` counts them."""
    return [sample for row in rows for sample in row.samples]


def without(rows: Iterable[Row], left_out: Container[int]) -> list[Row]:
    """The rows without those samples (by `id`), and without rows that have no others."""
    kept = ((row, [one.keyed for one in row.branches if id(one.sample) not in left_out]) for row in rows)
    return [row if len(left) == len(row.branches) else Row.of(left) for row, left in kept if left]


def cut(rows: Iterable[Row], token_limit: int) -> Batches:
    """Micro-batches of rows of similar length, each of at most `token_limit` padded tokens (one row may be longer), the
    longest first: what does not fit into memory is met before the others have been computed.

    A micro-batch ends before its padding exceeds MAX_PADDING, unless it is still small: small ones cost more than
    padding does. Rows that need a mask are not among rows that need none: all rows of a micro-batch have one or none,
    and without one attention is several times faster (flash kernels take no mask).
    """
    batches: Batches = []
    real = 0
    # Sorted by images, too, so that rows which share screenshots end up in one micro-batch.
    for row in sorted(rows, key=lambda row: (row.straight, row.length, [image.sha256 for image in row.images])):
        alike = bool(batches) and batches[-1][-1].straight == row.straight
        padded = (len(batches[-1]) + 1) * row.length if alike else 0
        small = padded <= token_limit * SMALL
        if alike and padded <= token_limit and (small or real + row.length >= padded * (1 - MAX_PADDING)):
            batches[-1].append(row)
            real += row.length
        else:
            batches.append([row])
            real = row.length
    # The last row of a micro-batch is its longest.
    return sorted(batches, key=lambda batch: batch[-1].length, reverse=True)


def collate(rows: Sequence[Row], images: dict[bytes, Processed], layout: Layout) -> MicroBatch:
    """Tensors of one micro-batch. Raises SampleError if a prompt's placeholders do not match its images."""
    length = max(row.length for row in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    position_ids = torch.zeros(3, len(rows), length, dtype=torch.int64)
    predict: list[torch.Tensor] = []
    order = list(dict.fromkeys(image.sha256 for row in rows for image in row.images))
    for index, row in enumerate(rows):
        input_ids[index, : row.length] = row.tokens
        for branch in row.branches:
            position_ids[:, index, branch.own] = _positions(branch.sample, images, layout)[:, branch.shared :]
            predict.append(index * length + branch.predict)
    samples = samples_of(rows)
    lengths = torch.tensor([len(sample.generation.token_ids) for sample in samples])
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    step_index = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=None if all(row.straight for row in rows) else _mask(rows, length),
        pixel_values=torch.cat([images[digest].patches for digest in order]) if order else None,
        pixel_form=images[order[0]].form if order else None,
        image_grid_thw=torch.tensor([images[digest].grid for digest in order]) if order else None,
        image_digests=tuple(order),
        image_index=tuple(order.index(image.sha256) for row in rows for image in row.images),
        predict_index=torch.cat(predict),
        token_ids=torch.tensor([token for sample in samples for token in sample.generation.token_ids]),
        behaviour=torch.tensor([value for sample in samples for value in _behaviour(sample)], dtype=torch.float32),
        rescored=torch.tensor([sample.rescore for sample in samples])[step_index],
        advantages=advantages[step_index],
        versions=torch.tensor([version for sample in samples for version in _versions(sample)]),
        steps=Steps(step_index, lengths),
        load=Load(
            tokens=sum(row.length for row in rows),
            pairs=sum(row.pairs for row in rows),
            responses=int(lengths.sum()),
            screenshots=len(order),
            patches=sum(math.prod(images[digest].grid) for digest in order) // max(1, len(order)),
        ),
    )


def _behaviour(sample: Sample) -> Sequence[float]:
    """The behaviour policy's log-probs; for a re-scored sample zeros, which π_old replaces."""
    return (0.0,) * len(sample.generation.token_ids) if sample.rescore else sample.generation.logprobs


def _versions(sample: Sample) -> Iterator[int]:
    """The weight version of each token."""
    for span in sample.generation.versions:
        yield from itertools.repeat(span.version, span.end - span.start)


def _mask(rows: Sequence[Row], length: int) -> torch.Tensor:
    """bool [B, 1, L, L]: which tokens (last) each token sees: itself and its way to the root. Padding sees itself."""
    mask = torch.eye(length, dtype=torch.bool).repeat(len(rows), 1, 1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for seen, row in zip(mask, rows, strict=True):
        for branch in row.branches:
            own = branch.own
            size = own.stop - own.start
            seen[own, own] = causal[:size, :size]
            seen[own, branch.path[: branch.shared]] = True
    return mask.unsqueeze(1)


def _positions(sample: Sample, images: dict[bytes, Processed], layout: Layout) -> torch.Tensor:
    """Multimodal rotary positions, int64 [3, P + T], of the prompt and the response.

    Text counts up in all three rows; an image's tokens have one time and their own height and width, and the next
    text starts one after the largest.
    """
    pieces: list[torch.Tensor] = []
    position, at = 0, 0
    wanted = iter(sample.images)
    prompt, pad = sample.generation.prompt_token_ids, layout.image_token_id
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
                raise _wrong(
                    sample,
                    f"has {end - at} image placeholders at {at} for {what}: the replica, or the run that collected it, "
                    "resized it by another processor_config.json or preprocessor_config.json than model.path has",
                )
            _, height, width = images[image.sha256].grid
            height, width = height // layout.merge_size, width // layout.merge_size
            down, across = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
            pieces.append(torch.stack([torch.zeros_like(down), down, across]) + position)
            position += max(height, width)
        at = end
    if (left := sum(1 for _ in wanted)) > 0:
        raise _wrong(sample, f"has {left} images without placeholders in its prompt")
    pieces.append(torch.arange(position, position + len(sample.generation.token_ids)).expand(3, -1))
    return torch.cat(pieces, dim=1)


def trajectories(samples: Iterable[Sample]) -> list[str]:
    """Their ids, each once."""
    return sorted({sample.trajectory_id for sample in samples})


def steps(rows: list[Row]) -> int:
    """How many steps train in them."""
    return sum(len(row.branches) for row in rows)


def tokens(rows: list[Row]) -> int:
    """How many response tokens they have."""
    return sum(len(sample.generation.token_ids) for row in rows for sample in row.samples)
