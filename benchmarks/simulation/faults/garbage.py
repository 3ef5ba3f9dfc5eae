"""Invalid replies, made by corrupting valid ones.

None becomes a Failure or a Bye: those of a trainer are believed on purpose, and end the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dart.v1 import session_pb2 as pb


def garbled(message: pb.SessionRequest, chance: random.Random) -> pb.SessionRequest:
    """A copy with one thing wrong; it keeps the assignment, so that it is taken for the answer."""
    made = pb.SessionRequest()
    made.CopyFrom(message)
    body = made.WhichOneof("body") or ""
    choices = _WRONG.get(body, [])
    if choices:
        chance.choice(choices)(made)
    return made


def _swap(message: pb.SessionRequest) -> None:
    """Replace it by an answer of another kind."""
    assignment = pb.Assignment()
    assignment.CopyFrom(getattr(message, message.WhichOneof("body") or "").assignment)
    message.weights_loaded.assignment.CopyFrom(assignment)


def _nan_reward(message: pb.SessionRequest) -> None:
    message.observed.done, message.observed.reward = True, float("nan")


def _huge_reward(message: pb.SessionRequest) -> None:
    message.observed.done, message.observed.reward = True, 1e308


def _no_digest(message: pb.SessionRequest) -> None:
    message.observed.image.sha256 = b""


def _flat(message: pb.SessionRequest) -> None:
    message.observed.image.width_pixels = 0


def _no_tokens(message: pb.SessionRequest) -> None:
    del message.generated.token_ids[:]


def _unknown_token(message: pb.SessionRequest) -> None:
    message.generated.token_ids[0] = 2**31


def _infinite(message: pb.SessionRequest) -> None:
    message.generated.logprobs[0] = float("-inf")


def _future(message: pb.SessionRequest) -> None:
    message.generated.versions[0].version = 2**63


def _gap(message: pb.SessionRequest) -> None:
    message.generated.versions[0].start = 1


def _older(message: pb.SessionRequest) -> None:
    message.trained.weight_version -= 1


def _far(message: pb.SessionRequest) -> None:
    message.trained.weight_version = 2**64 - 1


def _another_update(message: pb.SessionRequest) -> None:
    message.trained.update += 1


def _never_sent(message: pb.SessionRequest) -> None:
    message.weights_sent.version += 1


def _endless(message: pb.SessionRequest) -> None:
    message.weights_sent.seconds = float("nan")


def _unknown_checkpoint(message: pb.SessionRequest) -> None:
    message.checkpoint_saved.weight_version = 2**40


_WRONG: dict[str, list[Callable[[pb.SessionRequest], None]]] = {
    "observed": [_nan_reward, _huge_reward, _no_digest, _flat, _swap],
    "generated": [_no_tokens, _unknown_token, _infinite, _future, _gap, _swap],
    "trained": [_older, _far, _another_update, _swap],
    "weights_sent": [_never_sent, _endless, _swap],
    "checkpoint_saved": [_unknown_checkpoint, _swap],
}
