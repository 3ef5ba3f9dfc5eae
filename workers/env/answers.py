"""What a world's verbs returned, checked: nothing else holds the user's code to the types of `dart.worlds.contract`.

A value of another type raises EnvironmentFailure, so that it costs the attempt, as an exception of the world does. In
texts, what no message takes is replaced (`dart.core.cutting.encodable`).
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from numbers import Real

from dart.core.action import Action
from dart.core.cutting import encodable
from dart.core.types import Image, Observation
from dart.screenshots.header import BadHeader, check_pixels, size_of
from dart.wire.rules.table import MOST_SIDE
from dart.worlds import EnvironmentFailure, Verdict
from dart.worlds.pictures import NO_IMAGE

MAX_ASPECT_RATIO = 200  # as the coordinator's boundary, which would blame the worker


def observed(verb: str, value: object) -> Observation:
    """The observation that `reset` or `act` returned. Raises EnvironmentFailure."""
    if not isinstance(value, Observation):
        raise _wrong(f"{verb} returned", value, "an Observation")
    if not isinstance(value.reward, Real):
        raise _wrong(f"{verb} returned an Observation whose reward is", value.reward, "a number")
    seen = replace(
        value,
        image=_image(f"{verb} returned an Observation whose image is", value.image),
        instruction=_text(verb, "instruction", value.instruction),
        accessibility_tree=_text(verb, "accessibility_tree", value.accessibility_tree),
        last_action_error=_text(verb, "last_action_error", value.last_action_error),
        evidence_json=_text(verb, "evidence_json", value.evidence_json),
        goal_images=_images(verb, value.goal_images),
        reward=0.0,  # `judge` gives the reward of an episode; there is none for a step, whatever its range
    )
    if verb == "reset" and not seen.instruction and not seen.goal_images:
        raise EnvironmentFailure("reset returned an Observation without an instruction: nothing says what the task is")
    if verb == "reset" and seen.done:
        raise EnvironmentFailure("reset returned an Observation that is done: nothing has been done yet")
    return seen


def concluded(value: object) -> Image:
    """The picture that `conclude` returned, if any: a world's own may return nothing. Raises EnvironmentFailure."""
    return NO_IMAGE if value is None else _image("conclude returned", value)


def judged(value: object) -> Verdict:
    """The verdict that `judge` returned. Raises EnvironmentFailure."""
    if not isinstance(value, Verdict):
        raise _wrong("judge returned", value, "a Verdict")
    return value


def suggested(value: object) -> Action | None:
    """The action that `suggest` returned. Raises EnvironmentFailure."""
    if value is not None and not isinstance(value, Action):
        raise _wrong("suggest returned", value, "an action of dart.worlds, or None,")
    return value


def _text(verb: str, name: str, value: object) -> str:
    if value is None:  # which protobuf takes for an empty text
        return ""
    if not isinstance(value, str):
        raise _wrong(f"{verb} returned an Observation whose {name} is", value, "a str")
    return encodable(value)


def _image(where: str, value: object) -> Image:
    if not isinstance(value, Image):
        raise _wrong(where, value, "an Image (from_png and from_pixels make one)")
    if not value.data:  # the end of an episode needs none
        return value
    try:
        size = size_of(value.data)
        check_pixels(value.width, value.height)
    except BadHeader as error:
        raise EnvironmentFailure(f"{where} a picture that {error}") from None
    if max(value.width, value.height) > min(MOST_SIDE, MAX_ASPECT_RATIO * min(value.width, value.height)):
        raise EnvironmentFailure(
            f"{where} a picture of {value.width}×{value.height} pixels: a side has at most {MOST_SIDE:,}, and at most "
            f"{MAX_ASPECT_RATIO} times the other's"
        )
    if size not in (None, (value.width, value.height)):
        raise EnvironmentFailure(f"{where} called {value.width}×{value.height}, but its bytes say {size[0]}×{size[1]}")
    return value


def _images(verb: str, value: object) -> tuple[Image, ...]:
    where = f"{verb} returned an Observation whose goal_images"
    if not isinstance(value, tuple | list):
        raise _wrong(f"{where} are", value, "a tuple of Images")
    return tuple([_image(f"{where} hold", one) for one in value])


def _wrong(what: str, value: object, expected: str) -> EnvironmentFailure:
    return EnvironmentFailure(f"{what} {reprlib.repr(value)} ({type(value).__name__}), where {expected} is expected")
