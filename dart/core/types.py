"""The records that travel through the system: task, step, trajectory, sample, prompt.

They are plain and frozen; state that changes (statistics, groups) is documented in the module that owns it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import get_type_hints

from dart.core.action import Action
from dart.core.records import unguarded

PLAIN = (bool, int, float, str)
_NAMES: dict[tuple[type, tuple[type, ...]], tuple[str, ...]] = {}
"""Answers of `plain_fields`, which is asked for every update and status."""


def plain_fields(record: type, kinds: tuple[type, ...] = PLAIN) -> tuple[str, ...]:
    """Names of the dataclass's fields of these kinds, in order: one number, text or flag each.

    The wire and the database copy these by name, so that a new one needs no edit there (docs/extending.md).
    """
    if (record, kinds) not in _NAMES:
        hints = get_type_hints(record)
        _NAMES[record, kinds] = tuple(one.name for one in fields(record) if hints[one.name] in kinds)
    return _NAMES[record, kinds]


@dataclass(frozen=True, slots=True)
class Task:
    """One concrete task: the same id always means the same start state and the same verifier.

    Statistics are kept by `name` (a MiniWoB page, an OSWorld task); `seed` picks the instance.
    """

    suite: str
    name: str
    seed: int = 0

    @property
    def id(self) -> str:
        return f"{self.suite}/{self.name}#{self.seed}"


@unguarded
@dataclass(frozen=True, slots=True)
class Image:
    """An encoded screenshot. `data` holds exactly the bytes that `sha256` (32 raw bytes) is the digest of.

    `data` is empty when the receiver is known to hold the digest.
    """

    sha256: bytes
    media_type: str
    width: int
    height: int
    data: bytes = b""

    @classmethod
    def of(cls, data: bytes, media_type: str, width: int, height: int) -> Image:
        return cls(hashlib.sha256(data).digest(), media_type, width, height, data)


@unguarded
@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens [start, end) were made by weight version `version`."""

    version: int
    start: int
    end: int


@unguarded
@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment shows after a reset or an action. `reward` in [0, 1] counts only in a worker's final answer,
    whose `done` it is: there are no rewards for single steps, and what a world's `act` puts here is ignored."""

    image: Image
    instruction: str = ""
    done: bool = False
    reward: float = 0.0
    evidence_json: str = ""
    """The evidence for the verdict: a JSON object, as the world wrote it, or empty."""
    accessibility_tree: str = ""
    """What the screen holds, as text, if the world has such a tree. The prompt has it if `agent.show` says so."""
    last_action_error: str = ""
    """Why the environment could not carry out the last action, in its own words; empty if it could."""
    goal_images: tuple[Image, ...] = ()
    """Pictures that belong to the instruction; only at the first observation."""


@unguarded
@dataclass(frozen=True, slots=True)
class Generation:
    """One turn of the policy.

    prompt_token_ids: int[P], exactly as the engine ran them (image placeholders expanded). token_ids: int[T], sampled,
    the stop token included. logprobs: float[T], natural, of the behaviour policy (after temperature). versions: spans
    that cover [0, T). text: the sampled tokens decoded. Generations from the wire or the store hold arrays of 4 bytes a
    token: a run holds thousands of prompts, and as Python numbers they would take nine times as much.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...]
    text: str
    truncated: bool = False
    """The token limit ended it, not the stop token."""
    cached_tokens: int | None = None
    """How many of the prompt's tokens the engine had in its prefix cache; None: it does not say. Never stored."""


@unguarded
@dataclass(frozen=True, slots=True)
class Step:
    """One step of a trajectory and one training sample: (history, screenshot) → tokens of thought and action."""

    index: int
    images: tuple[Image, ...]
    """Pictures in the prompt: those of the instruction, then screenshots, oldest first; the last is this step's
    observation."""
    generation: Generation
    action: Action | None
    """None when the text could not be parsed."""
    parse_error: str = ""
    reading_rules: str = ""
    """The rules that reading the text took (docs/grammars.md), with spaces between them."""
    accessibility_tree: str = ""
    last_action_error: str = ""
    """Both as in the step's observation, whether the prompt has them or not."""


@dataclass(frozen=True, slots=True)
class StepEntropy:
    """How uncertain the policy before an update was at one step of its batch (high-entropy step selection)."""

    trajectory_id: str
    step_index: int
    entropy: float
    """H, the mean over the response's tokens, in nats."""
    selected: bool
    """It reached the quantile of its group's steps, so that the step was to be trained on."""
    token_entropies: bytes = b""
    """The entropy of each token, in nats: float16, little-endian. Empty if they were too many for one message."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One step to train on: what the coordinator sends to the trainer.

    It refers to its step's own screenshots and generation; nothing is copied.
    """

    trajectory_id: str
    group_id: str
    index: int
    """The step's index in its trajectory."""
    images: tuple[Image, ...]
    generation: Generation
    advantage: float
    rescore: bool = False
    """No policy of this run sampled it, or one that is too old: it has no log-probabilities, and the trainer's own
    before the update are used as the behaviour policy's."""

    @property
    def name(self) -> str:
        return f"sample {self.trajectory_id}/{self.index}"

    @property
    def tokens(self) -> int:
        return len(self.generation.prompt_token_ids) + len(self.generation.token_ids)


class Termination(StrEnum):
    ENVIRONMENT = "environment"
    FINISHED = "finished"
    STEP_LIMIT = "step_limit"
    UNPARSABLE = "unparsable"
    CONTEXT_FULL = "context_full"
    """Its next prompt would not have fitted into the model's context."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished roll-out. An attempt that infrastructure ended never becomes a trajectory."""

    id: str
    group_id: str
    task: Task
    instruction: str
    steps: tuple[Step, ...]
    termination: Termination
    reward: float
    success: bool
    step_limit: int
    started: float
    """Unix seconds."""
    finished: float
    evidence_json: str = ""
    """The evidence for the reward, or for `state_reward`: a JSON object, as the world wrote it, or empty."""
    pooled_from: str = ""
    """The id of the success that this is a copy of, if it replaces a failure (`core.curation.pool`)."""
    goal_images: int = 0
    """How many of the first pictures of each step belong to the instruction."""
    state_judged: bool = False
    """The policy's text was not an action, or its history outgrew the context, so the reward is 0, and the world has
    judged the state that it left behind: `state_reward`, in [0, 1], with `evidence_json`. Harnesses that judge such
    episodes count that; training does not."""
    state_reward: float = 0.0
    state_success: bool = False
    last_image: Image | None = None
    """The screen after the last action, for people alone; None where the last step's own screenshot is the last, or
    nothing was sent."""

    @property
    def oldest_version(self) -> int:
        """The weight version of the oldest sampled token, from which staleness is counted."""
        return min([span.version for step in self.steps for span in step.generation.versions])

    @property
    def images(self) -> Iterator[Image]:
        """Every picture that it refers to."""
        yield from (image for step in self.steps for image in step.images)
        if self.last_image is not None:
            yield self.last_image

    @property
    def newest_version(self) -> int:
        return max([span.version for step in self.steps for span in step.generation.versions])


def without_bytes(trajectory: Trajectory) -> Trajectory:
    """The trajectory as the store gives it back: its screenshots by digest alone."""
    bare: dict[bytes, Image] = {}

    def of(image: Image) -> Image:
        return bare.setdefault(image.sha256, replace(image, data=b"") if image.data else image)

    steps = tuple(replace(step, images=tuple(map(of, step.images))) for step in trajectory.steps)
    return replace(trajectory, steps=steps, last_image=of(trajectory.last_image) if trajectory.last_image else None)


@dataclass(frozen=True, slots=True)
class Markup:
    """Text of the prompt template: special tokens in it are tokenised as such."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text from outside (an instruction): special tokens in it are plain characters."""

    text: str


@unguarded
@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens sampled on an earlier turn, unchanged."""

    ids: Sequence[int]


PromptPart = Markup | Text | Tokens | Image
"""Parts are tokenised one by one: tokens are never decoded and tokenised again."""


@dataclass(slots=True, eq=False)
class Block:
    """Parts that belong together: the same object in every prompt of the episode that has them."""

    parts: tuple[PromptPart, ...]
    images: tuple[tuple[int, Image], ...] = field(init=False)
    """The screenshots among the parts, each with its index in `parts`."""
    encoded: bytes | None = None
    """The protobuf bytes from `dart.wire.convert`: a turn is encoded once per episode, not once per prompt."""

    def __post_init__(self) -> None:
        images = []  # a loop, because a comprehension takes longer for so few parts
        for place, part in enumerate(self.parts):
            if isinstance(part, Image):
                images.append((place, part))
        self.images = tuple(images)


@unguarded
@dataclass(frozen=True, slots=True)
class Prompt:
    """Everything that the policy sees before one turn."""

    blocks: tuple[Block, ...]
    images: tuple[Image, ...]
    """The pictures in the blocks, in order: those of the instruction, then screenshots, oldest first; the last is this
    step's observation."""

    @property
    def parts(self) -> tuple[PromptPart, ...]:
        return tuple(part for block in self.blocks for part in block.parts)
