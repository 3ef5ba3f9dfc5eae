"""Which answers a command may have, and what in an answer depends on the command or on the run.

`violation` checks every answer before anything else sees it. It is pure, and reports the first broken rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from google.protobuf.message import Message

from dart.core.types import Generation, VersionSpan
from dart.v1 import session_pb2 as pb
from dart.wire.convert import generation_from_proto
from dart.wire.rules.fields import BODIES
from dart.wire.rules.kinds import Violation, shortened
from dart.wire.rules.table import TOKEN_IDS

ANSWERS: Mapping[str, str] = {
    "reset": "observed",
    "act": "observed",
    "release": "released",
    "suggest": "suggested",
    "generate": "generated",
    "hold_screenshots": "screenshots_held",
    "receive_weights": "receiving_weights",
    "load_weights": "weights_loaded",
    "train_batch": "trained",
    "send_weights": "weights_sent",
    "save_checkpoint": "checkpoint_saved",
}
"""Command → the kind of its answer. Every one of them may be answered with a failure as well; Abort has no answer."""
ANSWERED_WITH = frozenset({*ANSWERS.values(), "failure"})
ID_BYTES = 4
"""Bytes of a packed token id."""
FEW = 64
"""Up to so many numbers, Python finds the largest one faster than numpy does."""
UNASKED = frozenset({"ready", "heartbeat", "bye", "slots"})
"""What a worker sends unasked, after its Hello."""


@dataclass(slots=True)
class Limits:
    """Facts of this run that answers must agree with. None means not known: any value is accepted.

    `version`: the newest weight version that the trainer has made. `vocabulary`: how many token ids the model has.
    """

    version: int | None = None
    vocabulary: int | None = None


def violation(answer: pb.SessionRequest, command: pb.SessionResponse, limits: Limits) -> Violation | None:
    """What is wrong with an answer to this command. What can be mended in it is (`Violation.mended`)."""
    kind = answer.WhichOneof("body") or ""
    body: Message = getattr(answer, kind, answer)
    broken = violation_of(kind, body, command.WhichOneof("body") or "", command, limits)
    if broken is None and isinstance(body, pb.Generated):
        return generation_violation(generation_from_proto(body), limits)
    return broken


def violation_of(kind: str, body: Message, asked: str, command: pb.SessionResponse, limits: Limits) -> Violation | None:
    """The same for the body of an answer, and of which kind both are: finding that out again would cost as much.

    `generation_violation` checks the tokens and the versions of a Generated.
    """
    if kind != "failure" and kind != ANSWERS.get(asked):
        wanted = f"{ANSWERS.get(asked)} or failure, in answer to {asked}"
        return Violation("SessionRequest.body", kind or "empty", wanted)
    broken = BODIES[kind].violation(body)
    if broken is not None and not broken.mended:
        return broken
    match body:
        case pb.Observed():
            return _observed(body, asked, command)
        case pb.Generated():
            return _generated(body, command.generate)
        case pb.Suggested():
            return _suggested(body)
        case pb.Trained():
            return _trained(body, command.train_batch, limits) or broken
        case pb.WeightsLoaded():
            return _same("WeightsLoaded.version", body.version, command.load_weights.version)
        case pb.WeightsSent():
            return _same("WeightsSent.version", body.version, command.send_weights.version)
        case pb.CheckpointSaved():
            return _saved(body, limits)
    return None


def ready(message: pb.Ready, role: int, limits: Limits) -> Violation | None:
    """What is wrong with a worker's Ready."""
    broken = BODIES["ready"].violation(message)
    if role == pb.ROLE_ENV or (broken is not None and not broken.mended):
        return broken
    return _published("Ready.weight_version", message.weight_version, limits) or broken


def hello(message: pb.Hello) -> Violation | None:
    """What is wrong with a worker's Hello."""
    return BODIES["hello"].violation(message)


def _observed(observed: pb.Observed, asked: str, command: pb.SessionResponse) -> Violation | None:
    """An episode that begins needs its instruction, one that begins or goes on its screenshot; one that is over needs
    its verdict alone."""
    if asked == "act" and command.act.last and not observed.done:
        # What is not done has no verdict, and would count as a reward of 0.
        return Violation("Observed.done", "false", "true, with the reward, in answer to an Act with last")
    if not observed.image.sha256 and not (asked == "act" and observed.done):
        return Violation("Observed.image: Image.sha256", "empty", "32 bytes long while the episode goes on")
    if not all(image.sha256 for image in observed.goal_images):
        return Violation("Observed.goal_images: Image.sha256", "empty", "32 bytes long")
    if asked == "reset" and observed.done:
        return Violation("Observed.done", "true", "false in answer to a Reset: nothing has been done yet")
    if asked == "reset" and not observed.instruction and not observed.goal_images:
        # The policy would be trained to guess.
        return Violation("Observed.instruction", "empty", "what the task is, in answer to a Reset")
    return None


def _suggested(suggested: pb.Suggested) -> Violation | None:
    if not suggested.HasField("action"):
        return None
    kind = suggested.action.WhichOneof("kind")
    if kind is None:
        return Violation("Suggested.action: Action.kind", "empty", "one of the kinds of action")
    if kind == "several":
        return Violation("Suggested.action: Action.kind", kind, "one action: an oracle is asked once for each")
    if kind == "move" and not suggested.action.move.HasField("at"):
        return Violation("Suggested.action: Move.at", "empty", "a point of the observation")
    return None


def _generated(generated: pb.Generated, asked: pb.Generate) -> Violation | None:
    packed = len(generated.packed_prompt_token_ids)
    count, prompt = len(generated.token_ids), len(generated.prompt_token_ids)
    if packed and prompt:
        return Violation("Generated.packed_prompt_token_ids", f"{packed:,} bytes", "empty beside prompt_token_ids")
    if packed % ID_BYTES:
        return Violation("Generated.packed_prompt_token_ids", f"{packed:,} bytes", f"{ID_BYTES} bytes for each id")
    prompt = prompt or packed // ID_BYTES
    most = min(asked.sampling.max_tokens or TOKEN_IDS.most, TOKEN_IDS.most)
    if not 1 <= count <= most:
        return Violation("Generated.token_ids", f"{count:,} entries", f"1 to {most:,} entries")
    if not 1 <= prompt <= TOKEN_IDS.most:
        return Violation("Generated.prompt_token_ids", f"{prompt:,} entries", f"1 to {TOKEN_IDS.most:,} entries")
    if generated.cached_tokens > prompt:
        return Violation("Generated.cached_tokens", f"{generated.cached_tokens:,}", f"at most the prompt's {prompt:,}")
    wanted = 0 if asked.HasField("forced_text") else count
    if len(generated.logprobs) != wanted:
        # Training would take sampled tokens without log-probabilities for on-policy ones.
        return Violation("Generated.logprobs", f"{len(generated.logprobs):,} entries", f"{wanted:,} entries")
    return None


def generation_violation(generation: Generation, limits: Limits) -> Violation | None:
    """Tokens of the prompt or of the answer that the model does not have, or weight versions that cannot be theirs.

    The generation comes from a Generated that broke no rule of `violation_of`: reading its lists from the message once
    more would cost as much as all other rules.
    """
    vocabulary = limits.vocabulary or TOKEN_IDS.most_id + 1
    for name, ids in (("token_ids", generation.token_ids), ("prompt_token_ids", generation.prompt_token_ids)):
        if (largest := max(ids) if len(ids) <= FEW else int(numpy.asarray(ids).max())) >= vocabulary:
            shown = f"{len(ids):,} entries, the largest {largest}"
            return Violation(f"Generated.{name}", shown, f"ids below {vocabulary:,}")
    return _spans(generation.versions, len(generation.token_ids), limits)


def _spans(spans: Sequence[VersionSpan], tokens: int, limits: Limits) -> Violation | None:
    at = newest = 0
    for span in spans:
        if span.start != at or span.end <= at:
            at = -1
            break
        at, newest = span.end, max(newest, span.version)
    if at != tokens:
        shown = shortened([(span.start, span.end) for span in spans[:8]])
        return Violation("Generated.versions", shown, f"spans that follow each other from 0 to {tokens:,}")
    return _published("Generated.versions: VersionSpan.version", newest, limits)


def _trained(trained: pb.Trained, command: pb.TrainBatch, limits: Limits) -> Violation | None:
    if broken := _same("Trained.update", trained.update, command.update):
        return broken
    if limits.version is None:
        return None
    return _same("Trained.weight_version", trained.weight_version, limits.version + 1)


def _saved(saved: pb.CheckpointSaved, limits: Limits) -> Violation | None:
    """Updates go on while it is written, and one under way may have ended before it was begun."""
    if limits.version is None or saved.weight_version <= limits.version + 1:
        return None
    versions = f"at most {limits.version + 1}, the newest version that the trainer can have"
    return Violation("CheckpointSaved.weight_version", shortened(saved.weight_version), versions)


def _published(where: str, version: int, limits: Limits) -> Violation | None:
    if limits.version is None or version <= limits.version:
        return None
    return Violation(where, shortened(version), f"at most {limits.version}, the newest version of this run")


def _same(where: str, value: int, wanted: int) -> Violation | None:
    return None if value == wanted else Violation(where, shortened(value), f"{wanted}, as it was asked for")
