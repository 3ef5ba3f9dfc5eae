"""The table of rules: it has every field, it lets through what honest workers say, and it names what breaks it."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from dart.core.curation.usable import why_unusable
from dart.core.packing import pack
from dart.core.types import Image, Step, Task, Termination, Trajectory
from dart.v1 import control_pb2 as cpb
from dart.v1 import image_pb2 as ipb
from dart.v1 import session_pb2 as pb
from dart.v1 import trajectory_pb2 as tpb
from dart.v1 import weights_pb2 as wpb
from dart.wire import rules
from dart.wire.convert import generation_from_proto, image_to_proto
from dart.wire.rules import Limits, Malformed, crowds
from dart.wire.rules.crowds import MOST_FIELDS
from dart.wire.rules.table import MOST_BATCH, RULES

LIMITS = Limits(version=7, vocabulary=1000)


def types_of_peers() -> dict[str, Descriptor]:
    """Every message type that a worker, or a caller of Control, may send."""
    control = cpb.DESCRIPTOR.services_by_name["ControlService"].methods
    found: dict[str, Descriptor] = {}
    left = [pb.SessionRequest.DESCRIPTOR, *(method.input_type for method in control)]
    while left:
        one = left.pop()
        if one.name not in found and not one.GetOptions().map_entry:
            found[one.name] = one
            left += [field.message_type for field in one.fields if field.message_type is not None]
    return found


def test_every_field_that_a_peer_may_send_has_a_rule_and_no_rule_is_without_a_field() -> None:
    there = {(name, field.name) for name, one in types_of_peers().items() for field in one.fields}
    assert there == {(name, field) for name, fields in RULES.items() for field in fields}
    assert set(types_of_peers()) == set(RULES)


def test_every_command_has_its_kind_of_answer() -> None:
    commands = {field.name for field in pb.SessionResponse.DESCRIPTOR.oneofs_by_name["body"].fields}
    assert commands - set(rules.ANSWERS) == {"welcome", "reject", "heartbeat", "bye", "abort", "notice"}
    assert rules.ANSWERED_WITH | rules.UNASKED | {"hello"} == set(rules.BODIES)


def asked(**command: object) -> pb.SessionResponse:
    return pb.SessionResponse(**command)  # type: ignore[arg-type]


def told(**answer: object) -> pb.SessionRequest:
    return pb.SessionRequest(**answer)  # type: ignore[arg-type]


RESET, ACT = asked(reset=pb.Reset()), asked(act=pb.Act())
LAST = asked(act=pb.Act(last=True))
SUGGEST = asked(suggest=pb.Suggest())
GENERATE = asked(generate=pb.Generate(sampling=pb.SamplingParams(max_tokens=8)))
FORCED = asked(generate=pb.Generate(sampling=pb.SamplingParams(max_tokens=8), forced_text="a"))
LOAD = asked(load_weights=pb.LoadWeights(version=5))
TRAIN = asked(train_batch=pb.TrainBatch(update=8))
SEND = asked(send_weights=pb.SendWeights(version=7))
SAVE = asked(save_checkpoint=pb.SaveCheckpoint(path="x"))
SCREEN = image_to_proto(Image.of(b"screen", "image/png", 160, 224))


def observed(**changed: object) -> pb.SessionRequest:
    return told(observed=pb.Observed(**{"image": SCREEN, "instruction": "click", "seconds": 0.5} | changed))  # type: ignore[arg-type]


def generated(**changed: object) -> pb.SessionRequest:
    usual = {
        "prompt_token_ids": [1, 2, 999], "token_ids": [5, 6], "logprobs": [-0.5, 0.0], "text": "ab", "finish_reason": 1,
        "versions": [tpb.VersionSpan(version=6, start=0, end=1), tpb.VersionSpan(version=7, start=1, end=2)],
    }  # fmt: skip
    return told(generated=pb.Generated(**usual | changed))  # type: ignore[arg-type]


def packed(prompt: bytes) -> pb.SessionRequest:
    return generated(prompt_token_ids=[], packed_prompt_token_ids=prompt)


def trained(**changed: object) -> pb.SessionRequest:
    usual = {"update": 8, "weight_version": 8, "metrics": {"loss": 0.5}, "seconds": 3.0,
             "tensors": [wpb.TensorInfo(name="w", dtype="float32", shape=[2, 3])]}  # fmt: skip
    return told(trained=pb.Trained(**usual | changed))  # type: ignore[arg-type]


def span(version: int, start: int, end: int) -> tpb.VersionSpan:
    return tpb.VersionSpan(version=version, start=start, end=end)


HONEST = {
    "reset": (RESET, observed()),
    "a packed prompt": (GENERATE, packed(pack("I", [1, 2, 999]))),
    "all that an environment may tell": (
        RESET,
        observed(accessibility_tree="x" * (1 << 18), last_action_error="x" * 8192, goal_images=[SCREEN] * 16),
    ),
    "a picture instead of words": (RESET, observed(instruction="", goal_images=[SCREEN])),
    "a verdict without a screenshot": (LAST, told(observed=pb.Observed(done=True, reward=1.0))),
    "done before the last action": (ACT, told(observed=pb.Observed(done=True))),
    "a suggestion": (
        SUGGEST,
        told(suggested=pb.Suggested(action={"click": {"at": {"x": 0.5, "y": 0.0}, "button": 1, "count": 1}})),
    ),
    "no suggestion": (SUGGEST, told(suggested=pb.Suggested())),
    "sampled": (GENERATE, generated()),
    "sampled after a prompt that was cached": (GENERATE, generated(cached_tokens=3)),
    "forced": (FORCED, generated(logprobs=[])),
    "loaded": (LOAD, told(weights_loaded=pb.WeightsLoaded(version=5, pause_seconds=0.1, bytes=10**10))),
    "trained": (TRAIN, trained()),
    "sent": (SEND, told(weights_sent=pb.WeightsSent(version=7))),
    "saved": (SAVE, told(checkpoint_saved=pb.CheckpointSaved(path="/tmp/x", weight_version=7))),
    "saved after the update that is under way": (
        SAVE,
        told(checkpoint_saved=pb.CheckpointSaved(path="x", weight_version=8)),
    ),
    "saved while updates went on": (SAVE, told(checkpoint_saved=pb.CheckpointSaved(path="x", weight_version=2))),
    "a failure": (TRAIN, told(failure=pb.Failure(code=7, message="no memory\n\tat line 3"))),
    "a failure of a newer kind": (ACT, told(failure=pb.Failure(code=99))),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_honest_workers_answer_breaks_no_rule(name: str) -> None:
    command, answer = HONEST[name]
    before = answer.SerializeToString(deterministic=True)
    assert rules.violation(answer, command, LIMITS) is None
    assert answer.SerializeToString(deterministic=True) == before, "nothing is mended"


BROKEN = {
    # Point 3 of the list of what a peer could do: one odd reply must not end the run.
    "a press for an hour": (
        SUGGEST,
        told(suggested=pb.Suggested(action={"click": {"button": 1, "count": 1, "hold_seconds": 3600.0}})),
        "Suggested.action: Action.click: Click.hold_seconds",
    ),
    "a drag backwards in time": (
        SUGGEST,
        told(suggested=pb.Suggested(action={"drag": {"button": 1, "duration_seconds": -1.0}})),
        "Suggested.action: Action.drag: Drag.duration_seconds",
    ),
    "several suggestions": (
        SUGGEST,
        told(suggested=pb.Suggested(action={"several": {"actions": [{"wait": {"seconds": 1.0}}]}})),
        "Suggested.action: Action.kind",
    ),
    "a tree without end": (ACT, observed(accessibility_tree="x" * ((1 << 18) + 1)), "Observed.accessibility_tree"),
    "an error without end": (ACT, observed(last_action_error="x" * 8193), "Observed.last_action_error"),
    "an album": (RESET, observed(goal_images=[SCREEN] * 17), "Observed.goal_images"),
    "a short digest": (RESET, observed(goal_images=[ipb.Image(sha256=b"x")]), "Observed.goal_images: Image.sha256"),
    "a picture without a digest": (RESET, observed(goal_images=[ipb.Image()]), "Observed.goal_images: Image.sha256"),
    "a reward that is NaN": (ACT, observed(done=True, reward=math.nan), "Observed.reward"),
    "an infinite reward": (ACT, observed(reward=math.inf), "Observed.reward"),
    "a huge reward": (ACT, observed(reward=1e308), "Observed.reward"),
    "a negative reward": (ACT, observed(reward=-5.0), "Observed.reward"),
    "another kind, to reset": (RESET, told(released=pb.Released()), "SessionRequest.body"),
    "another kind, to generate": (GENERATE, told(weights_loaded=pb.WeightsLoaded()), "SessionRequest.body"),
    "another kind, to train": (TRAIN, told(checkpoint_saved=pb.CheckpointSaved()), "SessionRequest.body"),
    "a digest of 5 bytes": (RESET, observed(image={"sha256": b"12345"}), "Observed.image: Image.sha256"),
    "no verdict after the last action": (LAST, observed(reward=1.0), "Observed.done"),
    "nothing after the last action": (LAST, told(observed=pb.Observed()), "Observed.done"),
    "no instruction": (RESET, observed(instruction=""), "Observed.instruction"),
    "done before anything was": (RESET, observed(done=True), "Observed.done"),
    "no digest": (RESET, observed(image={}), "Observed.image: Image.sha256"),
    "a version of 2^64-1": (
        GENERATE,
        generated(versions=[span(2**64 - 1, 0, 2)]),
        "Generated.versions: VersionSpan.version",
    ),
    "a version that was not made yet": (
        GENERATE,
        generated(versions=[span(8, 0, 2)]),
        "Generated.versions: VersionSpan.version",
    ),
    "a version that repeats": (TRAIN, trained(weight_version=7), "Trained.weight_version"),
    "a version that jumps": (TRAIN, trained(weight_version=9), "Trained.weight_version"),
    "another update": (TRAIN, trained(update=7), "Trained.update"),
    "the wrong version loaded": (LOAD, told(weights_loaded=pb.WeightsLoaded(version=6)), "WeightsLoaded.version"),
    "bytes that no database holds": (
        LOAD,
        told(weights_loaded=pb.WeightsLoaded(version=5, bytes=2**63)),
        "WeightsLoaded.bytes",
    ),
    "a pause without end": (
        LOAD,
        told(weights_loaded=pb.WeightsLoaded(version=5, pause_seconds=math.inf)),
        "WeightsLoaded.pause_seconds",
    ),
    "the wrong version sent": (SEND, told(weights_sent=pb.WeightsSent(version=6)), "WeightsSent.version"),
    "a checkpoint of another version": (
        SAVE,
        told(checkpoint_saved=pb.CheckpointSaved(weight_version=9)),
        "CheckpointSaved.weight_version",
    ),
    # Point 4: poison, which would be stored.
    "a gap between versions": (
        GENERATE,
        generated(token_ids=[1, 2, 3], logprobs=[0.0] * 3, versions=[span(7, 0, 1), span(7, 2, 3)]),
        "Generated.versions",
    ),
    "versions that stop early": (GENERATE, generated(versions=[span(7, 0, 1)]), "Generated.versions"),
    "versions that go too far": (GENERATE, generated(versions=[span(7, 0, 3)]), "Generated.versions"),
    "an empty span at the end": (GENERATE, generated(versions=[span(7, 0, 2), span(7, 2, 2)]), "Generated.versions"),
    "no versions": (GENERATE, generated(versions=[]), "Generated.versions"),
    "no prompt": (GENERATE, generated(prompt_token_ids=[]), "Generated.prompt_token_ids"),
    "an empty packed prompt": (GENERATE, packed(b""), "Generated.prompt_token_ids"),
    "a packed prompt that ends within an id": (GENERATE, packed(b"12345"), "Generated.packed_prompt_token_ids"),
    "a prompt in both forms": (
        GENERATE,
        generated(packed_prompt_token_ids=pack("I", [1])),
        "Generated.packed_prompt_token_ids",
    ),
    "a packed token beyond the vocabulary": (GENERATE, packed(pack("I", [1, 1000])), "Generated.prompt_token_ids"),
    "the largest packed number": (GENERATE, packed(b"\xff" * 4), "Generated.prompt_token_ids"),
    "no tokens": (GENERATE, generated(token_ids=[], logprobs=[], versions=[]), "Generated.token_ids"),
    "more tokens than were asked for": (GENERATE, generated(token_ids=[1] * 9), "Generated.token_ids"),
    "a token beyond the vocabulary": (GENERATE, generated(token_ids=[5, 1000]), "Generated.token_ids"),
    "a prompt token beyond the vocabulary": (
        GENERATE,
        generated(prompt_token_ids=[2**32 - 1]),
        "Generated.prompt_token_ids",
    ),
    "more cached than asked": (GENERATE, generated(cached_tokens=4), "Generated.cached_tokens"),
    "a log-probability too few": (GENERATE, generated(logprobs=[-0.5]), "Generated.logprobs"),
    "forced tokens with log-probabilities": (FORCED, generated(), "Generated.logprobs"),
    "a log-probability that is NaN": (GENERATE, generated(logprobs=[0.0, math.nan]), "Generated.logprobs"),
    "a log-probability of minus infinity": (GENERATE, generated(logprobs=[-math.inf, 0.0]), "Generated.logprobs"),
    "a probability above 1": (GENERATE, generated(logprobs=[0.1, 0.0]), "Generated.logprobs"),
    "no reason to finish": (GENERATE, generated(finish_reason=0), "Generated.finish_reason"),
    "a width of 2^32-1": (
        RESET,
        observed(image={"sha256": b"x" * 32, "width_pixels": 2**32 - 1}),
        "Observed.image: Image.width_pixels",
    ),
    # Point 8: nothing limited strings.
    "a long instruction": (RESET, observed(instruction="x" * 70_000), "Observed.instruction"),
    "a long text": (GENERATE, generated(text="x" * (1 << 21)), "Generated.text"),
    "a long path": (
        SAVE,
        told(checkpoint_saved=pb.CheckpointSaved(path="x" * 5000, weight_version=7)),
        "CheckpointSaved.path",
    ),
    "a metric with a long name": (TRAIN, trained(metrics={"x" * 500: 1.0}), "Trained.metrics"),
    "too many metrics": (TRAIN, trained(metrics={str(number): 1.0 for number in range(2000)}), "Trained.metrics"),
    "a tensor without a name": (
        TRAIN,
        trained(tensors=[wpb.TensorInfo(dtype="float32")]),
        "Trained.tensors: TensorInfo.name",
    ),
    "a tensor of no size": (
        TRAIN,
        trained(tensors=[wpb.TensorInfo(name="w", dtype="f", shape=[2**60])]),
        "Trained.tensors: TensorInfo.shape",
    ),
    "a click outside": (
        SUGGEST,
        told(suggested=pb.Suggested(action={"click": {"at": {"x": 1.0, "y": 0.5}, "button": 1, "count": 1}})),
        "Suggested.action: Action.click: Click.at: Point.x",
    ),
    "a click with no button": (
        SUGGEST,
        told(suggested=pb.Suggested(action={"click": {"count": 1}})),
        "Suggested.action: Action.click: Click.button",
    ),
    "an action without a kind": (SUGGEST, told(suggested=pb.Suggested(action={})), "Suggested.action: Action.kind"),
    "negative seconds": (ACT, observed(seconds=-1.0), "Observed.seconds"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_a_rule_is_named_by_its_field(name: str) -> None:
    command, answer, field = BROKEN[name]
    broken = rules.violation(answer, command, LIMITS)
    assert broken is not None and not broken.mended
    assert broken.field == field
    assert broken.rule and len(str(broken)) < 400, "the value is shortened"


def test_a_violation_names_field_value_and_rule() -> None:
    broken = rules.violation(*BROKEN["a reward that is NaN"][1::-1], LIMITS)
    assert str(broken) == "Observed.reward is nan, and must be a finite number from 0 to 1"


def test_metrics_that_are_not_finite_are_left_out_and_the_update_stands() -> None:
    """Point 20: NaN in metrics was no JSON."""
    answer = trained(metrics={"loss": math.nan, "entropy": 0.5, "norm": math.inf})
    broken = rules.violation(answer, TRAIN, LIMITS)
    assert broken is not None and broken.mended and broken.field.startswith("Trained.metrics[")
    assert dict(answer.trained.metrics) == {"entropy": 0.5}


def test_a_long_failure_is_cut_and_told_without_control_characters() -> None:
    """Point 8: 27 failures of 8 MB each took 564 MB."""
    answer = told(failure=pb.Failure(code=1, message="\x1b[2J\x00" + "x" * 8_000_000))
    assert rules.violation(answer, ACT, LIMITS) is None
    message = answer.failure.message
    assert message.startswith("\ufffd[2J\ufffdxxx") and message.endswith("… (cut: 8,000,005 characters)")
    assert len(message) < 2100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slots", 0),
        ("slots", 2**32 - 1),
        ("engine_ranks", 2**32 - 1),
        ("weight_version", 2**64 - 1),
        ("weight_version", 8),
        ("image_cache_entries", 2**32 - 1),
        ("transfer_host", "a b"),
        ("transfer_host", "x" * 300),
        ("versions", {"": "1"}),
        ("versions", {str(number): "1" for number in range(100)}),
        ("longest_seconds", {"act": 1e8}),
    ],
)
def test_a_ready_that_would_fill_the_memory_is_refused(field: str, value: object) -> None:
    """Point 2."""
    ready = pb.Ready(**{"slots": 4, "engine_ranks": 1, field: value})  # type: ignore[arg-type]
    broken = rules.ready(ready, pb.ROLE_ROLLOUT, LIMITS)
    assert broken is not None and field in broken.field


def test_an_honest_ready_is_taken() -> None:
    ready = pb.Ready(
        slots=65_536,
        weight_version=7,
        engine_ranks=8,
        image_cache_entries=4096,
        transfer_host="gpu-1.example.org",
        versions={"vllm": "0.32.0 (cpu)"},
        shares_blobs=True,
        longest_seconds={"act": 86_400.0},
    )
    assert rules.ready(ready, pb.ROLE_ROLLOUT, LIMITS) is None
    assert rules.ready(pb.Ready(slots=1), pb.ROLE_TRAIN, Limits()) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", ""),
        ("worker_id", "x" * 15_000_000),
        ("worker_id", "a\nb"),
        ("worker_id", "[bold]x[/bold]"),
        ("worker_id", "\x1b[2J"),
        ("instance_id", ""),
        ("role", 0),
        ("role", 4),
        ("capabilities", ["x"] * 100),
        ("capabilities", ["x" * 100]),
        ("rank", 2**32 - 1),
        ("world_size", 2**32 - 1),
        ("protocol_version", 2**32 - 1),
    ],
)
def test_a_hello_with_an_impossible_name_or_number_is_refused(field: str, value: object) -> None:
    """Points 8 and 20: names of 15 MB, and markup in them."""
    usual = {"worker_id": "gpu-1.example.org-env-17", "instance_id": "0f3c", "role": pb.ROLE_ENV, "protocol_version": 1}
    assert rules.hello(pb.Hello(**usual)) is None  # type: ignore[arg-type]
    broken = rules.hello(pb.Hello(**usual | {field: value}))  # type: ignore[arg-type]
    assert broken is not None and broken.field == f"Hello.{field}" and len(broken.value) < 100


def test_millions_of_empty_entries_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point 7: they held the coordinator's event loop for 17 s."""
    cannot_parse = SimpleNamespace(BATCH_FIELD_NUMBER=pb.SessionRequest.BATCH_FIELD_NUMBER)
    monkeypatch.setattr(crowds, "pb", SimpleNamespace(SessionRequest=cannot_parse, Assignment=pb.Assignment))
    assignment = pb.Assignment(assignment_id="q1", attempt=1, epoch=5, sequence=1)
    spans = pb.SessionRequest(generated=pb.Generated(assignment=assignment)).SerializeToString()[3:]
    spans += b"\x2a\x00" * 5_000_000
    crowded = {
        "a batch": b"\xc2\x02\x00" * 5_000_000,
        "a batch in a batch": b"\xc2\x02" + varint(3 * 4_000_000) + b"\xc2\x02\x00" * 4_000_000,
        "spans": b"\xa2\x01" + varint(len(spans)) + spans,
        "metrics": b"\xf2\x01" + varint(2 * 5_000_000) + b"\x22\x00" * 5_000_000,
    }
    for name, data in crowded.items():
        began = time.process_time()
        broken = rules.parsed(data)
        assert time.process_time() - began < 5.0, f"{name}: hang guard; it takes a quarter of a second"
        assert isinstance(broken, Malformed), name
        assert f"{MOST_FIELDS:,}" in str(broken.violation)
        assert (broken.assignment == assignment) is (name == "spans"), "the command that it answers is known"


def varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def test_a_batch_is_bounded_and_an_honest_one_is_parsed() -> None:
    assert isinstance(rules.parsed(b"\xc2\x02\x00" * (MOST_BATCH + 1)), Malformed)
    tensors = [{"name": f"model.layers.0.mlp.experts.{n}.up_proj.weight", "dtype": "bfloat16", "shape": [768, 2048]}
               for n in range(36_000)]  # fmt: skip
    trained = pb.SessionRequest(trained=pb.Trained(tensors=tensors))  # a mixture of experts, unfused
    assert rules.parsed(trained.SerializeToString()) == trained
    batch = pb.SessionRequest(batch=[observed(image=image_to_proto(Image.of(bytes(150_000), "image/png", 1, 1)))] * 5)
    assert rules.parsed(batch.SerializeToString()) == batch


@pytest.mark.parametrize(
    "data", [b"\xff" * 50, b"\x07", b"\x0a\x05ab", b"\xff" * 200_000, bytes(200_000), b"\x0b" * 200_000]
)
def test_bytes_that_are_no_message_raise_nothing(data: bytes) -> None:
    assert isinstance(rules.parsed(data), Malformed)


NUMBERS = [-0.5, 0.0, -1e30, 0.0005, 0.1, math.nan, math.inf, -math.inf]
IDS = [0, 5, 999, 1000, (1 << 32) - 1]
EDGES = st.integers(0, 4)
SPANS = st.lists(st.builds(span, st.sampled_from([0, 7, 8, (1 << 63) - 1]), EDGES, EDGES), max_size=3)
WHOLE = st.integers(1, 4).flatmap(
    lambda count: st.fixed_dictionaries(
        {},
        optional={
            "token_ids": st.lists(st.sampled_from(IDS), min_size=count, max_size=count),
            "logprobs": st.lists(st.sampled_from(NUMBERS), min_size=count, max_size=count),
            "versions": SPANS | st.just([span(7, 0, count)]),
            "prompt_token_ids": st.lists(st.sampled_from(IDS), max_size=3),
        },
    )
)


@given(WHOLE)
@settings(max_examples=500, deadline=None)
def test_a_turn_that_keeps_the_rules_can_be_trained_on(changed: dict[str, object]) -> None:
    answer = generated(**changed)
    if rules.violation(answer, GENERATE, LIMITS) is None:
        turn = generation_from_proto(answer.generated)
        step = Step(0, (), turn, None)
        sampled = Trajectory(
            "g0-0", "g0", Task("suite", "task"), "do", (step,), Termination.FINISHED, 1.0, True, 9, 0.0, 1.0
        )
        assert why_unusable(sampled, LIMITS.vocabulary) is None
