"""Records ⇄ protobuf, one pair of functions per message. Unknown or unset kinds raise ValueError.

Numbers, texts and flags that a record and its message have under the same name are copied by name (`_same`); a new one
needs no edit here.

Python's protobuf copies a message into another one by serialising and parsing it, which takes 70 times as long as
setting the same bytes in place (170 µs against 2.4 µs for 200 KB). So messages with screenshots are filled in place
(`write_image`, `write_sample`), and so are the parts of every step's messages. A prompt is never a message here: its
parts are encoded one by one and sent as they are (`encoded_blocks`).
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from statistics import fmean
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from dart.core import action as a
from dart.core import types as t
from dart.core.packing import pack, unpack
from dart.v1 import action_pb2 as apb
from dart.v1 import image_pb2 as ipb
from dart.v1 import session_pb2 as spb
from dart.v1 import trajectory_pb2 as tpb
from dart.wire.encoding import field_of, tag_of, varint

_BUTTONS: dict[a.MouseButton, Any] = {
    "left": apb.MOUSE_BUTTON_LEFT, "middle": apb.MOUSE_BUTTON_MIDDLE, "right": apb.MOUSE_BUTTON_RIGHT,
}  # fmt: skip
_MODES: dict[a.PressMode, Any] = {"press": apb.PRESS_MODE_PRESS, "down": apb.PRESS_MODE_DOWN, "up": apb.PRESS_MODE_UP}
_STATUSES: dict[a.FinishStatus, Any] = {
    "success": apb.FINISH_STATUS_SUCCESS, "fail": apb.FINISH_STATUS_FAIL,
    "infeasible": apb.FINISH_STATUS_INFEASIBLE, "call_user": apb.FINISH_STATUS_CALL_USER,
}  # fmt: skip
_SYSTEMS: dict[a.SystemKind, Any] = {
    "back": apb.SYSTEM_KIND_BACK, "home": apb.SYSTEM_KIND_HOME,
    "open_app": apb.SYSTEM_KIND_OPEN_APP, "open_url": apb.SYSTEM_KIND_OPEN_URL,
    "app_switch": apb.SYSTEM_KIND_APP_SWITCH, "volume_up": apb.SYSTEM_KIND_VOLUME_UP,
    "volume_down": apb.SYSTEM_KIND_VOLUME_DOWN,
}  # fmt: skip
_TERMINATIONS = {
    t.Termination.ENVIRONMENT: tpb.TERMINATION_ENVIRONMENT, t.Termination.FINISHED: tpb.TERMINATION_FINISHED,
    t.Termination.STEP_LIMIT: tpb.TERMINATION_STEP_LIMIT, t.Termination.UNPARSABLE: tpb.TERMINATION_UNPARSABLE,
    t.Termination.CONTEXT_FULL: tpb.TERMINATION_CONTEXT_FULL,
}  # fmt: skip


def _same(record: type, message: type[Message]) -> tuple[str, ...]:
    """The plain fields of the record that the message has too."""
    return tuple(name for name in t.plain_fields(record) if name in message.DESCRIPTOR.fields_by_name)


MOST_TOLD_STEPS = 4_000
"""In one answer of one rank. It also lists the weights, and one with too many fields is refused (`rules.crowds`)."""
MOST_TOLD_BYTES = 8 << 20
"""Bytes of tokens' entropies in one message, which may have 16 MiB."""
_ENTROPY = _same(t.StepEntropy, spb.StepEntropy)
_PROMPT, _PART_IMAGE = tag_of(spb.Generate, "prompt"), tag_of(spb.PromptPart, "image")
_IMAGE_DATA = tag_of(ipb.Image, "data")
_OBSERVED = _same(t.Observation, spb.Observed)
_GENERATED = _same(t.Generation, spb.Generated)
_TRAJECTORY = _same(t.Trajectory, tpb.Trajectory)
_STEP, _STEP_GENERATION = _same(t.Step, tpb.Step), _same(t.Generation, tpb.Step)
_observation: Callable[..., t.Observation] = t.Observation
_observed_values = attrgetter(*_OBSERVED)  # with positions, which takes a third of the time that names take
assert ("image", *_OBSERVED, "goal_images") == tuple(field.name for field in fields(t.Observation)), (
    "a plain field of Observation stands between `image` and `goal_images`, and Observed has it too"
)
_SAMPLE, _SAMPLE_GENERATION = _same(t.Sample, spb.Sample), _same(t.Generation, spb.Sample)


def _values(source: object, names: tuple[str, ...]) -> Mapping[str, Any]:
    return {name: getattr(source, name) for name in names}


def _name(table: dict[Any, Any], value: int, what: str) -> Any:
    for name, number in table.items():
        if number == value:
            return name
    raise ValueError(f"{what} {value} is unspecified or unknown: the sender speaks another protocol version")


def _write_at(into: Any, at: a.Point | None) -> None:
    if at is None:
        into.SetInParent()
    else:
        point = into.at
        point.x, point.y = at.x, at.y


def _at(message: Any) -> a.Point | None:
    return a.Point(message.at.x, message.at.y) if message.HasField("at") else None


def action_to_proto(action: a.Action) -> apb.Action:
    message = apb.Action()
    write_action(message, action)
    return message


def write_action(into: apb.Action, action: a.Action) -> None:
    """Fill in an empty message."""
    if not isinstance(action, a.Several):
        write_single(into, action)
        return
    for one in action.actions:
        write_single(into.several.actions.add(), one)


def write_single(into: apb.Action, action: a.Single) -> None:
    """Fill in an empty message. Each nested message is looked up once, because that costs as much as four numbers."""
    match action:
        case a.Move(at):
            _write_at(into.move, at)
        case a.Click(at, button, count, modifiers, hold):
            click = into.click
            _write_at(click, at)
            click.button, click.count, click.hold_seconds = _BUTTONS[button], count, hold
            click.modifiers.extend(modifiers)
        case a.Button(at, button, mode):
            _write_at(into.button, at)
            into.button.button, into.button.mode = _BUTTONS[button], _MODES[mode]
        case a.Drag(path, button, duration):
            into.drag.button, into.drag.duration_seconds = _BUTTONS[button], duration
            for point in path:
                into.drag.path.add(x=point.x, y=point.y)
        case a.Scroll(at, dx, dy):
            scroll = into.scroll
            _write_at(scroll, at)
            scroll.dx_notches, scroll.dy_notches = dx, dy
        case a.Keys(keysyms, mode):
            into.keys.mode = _MODES[mode]
            into.keys.keysyms.extend(keysyms)
        case a.TypeText(text):
            into.type_text.text = text
        case a.Wait(seconds):
            into.wait.seconds = seconds
        case a.Observe():
            into.observe.SetInParent()
        case a.Finish(status, answer):
            into.finish.status, into.finish.answer = _STATUSES[status], answer
        case a.System(kind, argument):
            into.system.kind, into.system.argument = _SYSTEMS[kind], argument
        case a.Code(language, source):
            into.code.language, into.code.source = language, source


def action_from_proto(message: apb.Action) -> a.Action:
    """Raises ValueError for an action of an unknown kind, and for a `several` within a `several`."""
    if message.HasField("several"):
        return a.Several(tuple([_single_from_proto(one) for one in message.several.actions]))
    return _single_from_proto(message)


def _single_from_proto(message: apb.Action) -> a.Single:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ValueError("action has no kind: the sender speaks another protocol version")
    m: Any = getattr(message, kind)
    match kind:
        case "move":
            return a.Move(a.Point(m.at.x, m.at.y))
        case "click":
            button = _name(_BUTTONS, m.button, "mouse button")
            return a.Click(_at(m), button, m.count, tuple(m.modifiers), m.hold_seconds)
        case "button":
            return a.Button(_at(m), _name(_BUTTONS, m.button, "mouse button"), _name(_MODES, m.mode, "press mode"))
        case "drag":
            path = tuple(a.Point(p.x, p.y) for p in m.path)
            return a.Drag(path, _name(_BUTTONS, m.button, "mouse button"), m.duration_seconds)
        case "scroll":
            return a.Scroll(_at(m), m.dx_notches, m.dy_notches)
        case "keys":
            return a.Keys(tuple(m.keysyms), _name(_MODES, m.mode, "press mode"))
        case "type_text":
            return a.TypeText(m.text)
        case "wait":
            return a.Wait(m.seconds)
        case "observe":
            return a.Observe()
        case "finish":
            return a.Finish(_name(_STATUSES, m.status, "finish status"), m.answer)
        case "system":
            return a.System(_name(_SYSTEMS, m.kind, "system kind"), m.argument)
        case "code":
            return a.Code(m.language, m.source)
        case _:
            raise ValueError(f"an action of kind {kind} cannot be one of several")


def image_to_proto(image: t.Image, with_data: bool = True) -> ipb.Image:
    message = ipb.Image()
    write_image(message, image, with_data)
    return message


def write_image(into: ipb.Image, image: t.Image, with_data: bool = True) -> None:
    into.sha256, into.media_type = image.sha256, image.media_type
    into.width_pixels, into.height_pixels = image.width, image.height
    if with_data:
        into.data = image.data


def image_from_proto(message: ipb.Image) -> t.Image:
    return t.Image(message.sha256, message.media_type, message.width_pixels, message.height_pixels, message.data)


def task_to_proto(task: t.Task) -> tpb.Task:
    return tpb.Task(id=task.id, suite=task.suite, name=task.name, seed=task.seed)


def task_from_proto(message: tpb.Task) -> t.Task:
    return t.Task(message.suite, message.name, message.seed)


def encoded_blocks(prompt: t.Prompt) -> list[bytes]:
    """For each block, the bytes of a Generate whose prompt is this block, with screenshots without their bytes.

    A block is encoded once, and a template's texts once per process: a prompt of many turns takes one join.
    """
    return [block.encoded or _encode(block) for block in prompt.blocks]


def encoded_with_data(block: t.Block, data: Mapping[int, bytes]) -> list[bytes]:
    """The same for one block, in pieces. `data`: by their places in the block, the screenshots' bytes to send."""
    pieces: list[bytes] = []
    for place, part in enumerate(block.parts):
        if isinstance(part, t.Image) and place in data:
            head = image_to_proto(part, with_data=False).SerializeToString()
            inside = b"".join((head, _IMAGE_DATA, varint(len(data[place]))))
            size = len(inside) + len(data[place])
            image = _PART_IMAGE + varint(size)
            pieces += (_PROMPT, varint(len(image) + size), image, inside, data[place])
        else:
            pieces.append(_encoded(part))
    return pieces


def _encode(block: t.Block) -> bytes:
    block.encoded = b"".join(
        [_encoded_markup(part.text) if isinstance(part, t.Markup) else _encoded(part) for part in block.parts]
    )
    return block.encoded


@functools.lru_cache(256)
def _encoded_markup(text: str) -> bytes:
    return _encoded(t.Markup(text))


def _encoded(part: t.PromptPart) -> bytes:
    """The bytes of a Generate whose prompt is this part alone."""
    return field_of(_PROMPT, part_to_proto(part, with_data=False).SerializeToString())


def part_to_proto(part: t.PromptPart, with_data: bool = True) -> spb.PromptPart:
    message = spb.PromptPart()
    _write_part(message, part, with_data)
    return message


def _write_part(into: spb.PromptPart, part: t.PromptPart, with_data: bool) -> None:
    match part:
        case t.Image():
            write_image(into.image, part, with_data)
        case t.Markup(text):
            into.markup = text
        case t.Text(text):
            into.text = text
        case t.Tokens(ids):
            tokens = into.token_ids
            tokens.SetInParent()
            tokens.ids.extend(ids)


def part_from_proto(message: spb.PromptPart) -> t.PromptPart:
    match message.WhichOneof("part"):
        case "markup":
            return t.Markup(message.markup)
        case "text":
            return t.Text(message.text)
        case "token_ids":
            return t.Tokens(tuple(message.token_ids.ids))
        case "image":
            return image_from_proto(message.image)
        case _:
            raise ValueError("prompt part has no kind: the sender speaks another protocol version")


def spans_to_proto(spans: Iterable[t.VersionSpan]) -> list[tpb.VersionSpan]:
    return [tpb.VersionSpan(version=s.version, start=s.start, end=s.end) for s in spans]


def spans_from_proto(spans: Sequence[tpb.VersionSpan]) -> tuple[t.VersionSpan, ...]:
    return tuple([t.VersionSpan(s.version, s.start, s.end) for s in spans[:]])


def observation_from_proto(message: spb.Observed) -> t.Observation:
    goals = tuple([image_from_proto(one) for one in message.goal_images]) if message.goal_images else ()
    return _observation(image_from_proto(message.image), *_observed_values(message), goals)


def observation_to_proto(observation: t.Observation, seconds: float) -> spb.Observed:
    message = spb.Observed(seconds=seconds, **_values(observation, _OBSERVED))
    write_image(message.image, observation.image)
    for image in observation.goal_images:
        write_image(message.goal_images.add(), image)
    return message


def generation_to_proto(generation: t.Generation, seconds: float, *, packed: bool = False) -> spb.Generated:
    """`packed`: the receiver reads `packed_prompt_token_ids`."""
    ids = generation.prompt_token_ids
    return spb.Generated(
        prompt_token_ids=() if packed else ids,
        packed_prompt_token_ids=pack("I", ids) if packed else b"",
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=spans_to_proto(generation.versions),
        finish_reason=spb.FINISH_REASON_LENGTH if generation.truncated else spb.FINISH_REASON_STOP,
        seconds=seconds,
        cached_tokens=generation.cached_tokens,
        **_values(generation, _GENERATED),
    )


def generation_from_proto(message: spb.Generated) -> t.Generation:
    packed = message.packed_prompt_token_ids
    return t.Generation(
        unpack("I", packed) if packed else array("I", message.prompt_token_ids[:]),
        array("I", message.token_ids[:]),
        array("f", message.logprobs[:]),
        spans_from_proto(message.versions),
        truncated=message.finish_reason == spb.FINISH_REASON_LENGTH,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
        **_values(message, _GENERATED),
    )


def trajectory_to_proto(
    trajectory: t.Trajectory, advantages: Sequence[float], fate: str, with_images: bool
) -> tpb.Trajectory:
    """`advantages`: one per step, or none. `with_images`: with each picture's bytes, at the first step that has it."""
    sent: set[bytes] = set()
    message = tpb.Trajectory(
        task=task_to_proto(trajectory.task),
        termination=_TERMINATIONS[trajectory.termination],
        fate=fate,
        started_unix_seconds=trajectory.started,
        finished_unix_seconds=trajectory.finished,
        steps=[step_to_proto(step, with_images, sent) for step in trajectory.steps],
        advantages=advantages,
        **_values(trajectory, _TRAJECTORY),
    )
    if advantages:
        message.advantage = fmean(advantages)
    return message


def step_to_proto(step: t.Step, with_images: bool, sent: set[bytes]) -> tpb.Step:
    """`sent`: digests of pictures whose bytes come with an earlier step. This step's are added."""
    g = step.generation
    images = []
    for image in step.images:
        images.append(image_to_proto(image, with_images and image.sha256 not in sent))
        sent.add(image.sha256)
    return tpb.Step(
        images=images,
        prompt_token_ids=g.prompt_token_ids,
        token_ids=g.token_ids,
        logprobs=g.logprobs,
        versions=spans_to_proto(g.versions),
        action=None if step.action is None else action_to_proto(step.action),
        **_values(step, _STEP),
        **_values(g, _STEP_GENERATION),
    )


def sample_to_proto(sample: t.Sample) -> spb.Sample:
    """The message, with the bytes of its screenshots."""
    message = spb.Sample()
    write_sample(message, sample)
    return message


def write_sample(into: spb.Sample, sample: t.Sample, held: Container[bytes] = ()) -> None:
    """`held`: digests of screenshots whose bytes the receiver has, or gets from elsewhere."""
    g = sample.generation
    into.step_index = sample.index
    for source, names in ((sample, _SAMPLE), (g, _SAMPLE_GENERATION)):
        for name in names:
            setattr(into, name, getattr(source, name))
    into.prompt_token_ids.extend(g.prompt_token_ids)
    into.token_ids.extend(g.token_ids)
    into.logprobs.extend(g.logprobs)
    for span in g.versions:
        into.versions.add(version=span.version, start=span.start, end=span.end)
    for image in sample.images:
        write_image(into.images.add(), image, image.sha256 not in held)


def sample_from_proto(message: spb.Sample, held: Mapping[bytes, t.Image] = MappingProxyType({})) -> t.Sample:
    """`held`: screenshots with their bytes, by digest. The generation has no text, because training does not use it."""
    generation = t.Generation(
        array("I", message.prompt_token_ids[:]),
        array("I", message.token_ids[:]),
        array("f", message.logprobs[:]),
        spans_from_proto(message.versions),
        text="",
        **_values(message, _SAMPLE_GENERATION),
    )
    return t.Sample(
        index=message.step_index,
        images=tuple(held.get(image.sha256) or image_from_proto(image) for image in message.images),
        generation=generation,
        **_values(message, _SAMPLE),
    )


def entropies_to_proto(entropies: Sequence[t.StepEntropy], most_bytes: int = MOST_TOLD_BYTES) -> list[spb.StepEntropy]:
    """The first `MOST_TOLD_STEPS` steps; entropies of single tokens for as long as all fit into `most_bytes`."""
    told, left = [], most_bytes
    for one in entropies[:MOST_TOLD_STEPS]:
        message = spb.StepEntropy(**{name: getattr(one, name) for name in _ENTROPY})
        left -= len(one.token_entropies)
        if left >= 0:
            message.token_entropies = one.token_entropies
        told.append(message)
    return told


def entropies_from_proto(messages: Iterable[spb.StepEntropy], samples: Iterable[t.Sample]) -> list[t.StepEntropy]:
    """Those of steps that are among the samples of the update; tokens' only where there are as many as tokens."""
    lengths = {(one.trajectory_id, one.index): len(one.generation.token_ids) for one in samples}
    told = {}
    for message in messages:
        step = message.trajectory_id, message.step_index
        if (length := lengths.get(step)) is not None:
            known = message.token_entropies if len(message.token_entropies) == 2 * length else b""
            told[step] = t.StepEntropy(token_entropies=known, **_values(message, _ENTROPY))
    return list(told.values())
