"""Golden bytes: what is on the wire today must be readable for ever."""

from __future__ import annotations

import pytest

from dart.core import action as a
from dart.core.types import Generation, VersionSpan
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_from_proto, action_to_proto, generation_from_proto, generation_to_proto

GOLDEN = {
    "hello": (
        pb.SessionRequest(
            hello=pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ENV, last_epoch=7, protocol_version=1, rank=1)
        ),
        "0a0e0a01771201691801280730013801",
    ),
    "act": (
        pb.SessionResponse(
            act=pb.Act(
                assignment=pb.Assignment(assignment_id="g1-2", attempt=1, epoch=9, sequence=3),
                action=action_to_proto(a.Click(a.Point(0.25, 0.5), count=2)),
                last=True,
            )
        ),
        "5a2c0a0c0a0467312d32100118092003121a12180a1209000000000000d03f11000000000000e03f100118021801",
    ),
    "suggest": (
        pb.SessionResponse(
            suggest=pb.Suggest(assignment=pb.Assignment(assignment_id="g1-2", attempt=1, epoch=9, sequence=3))
        ),
        "6a0e0a0c0a0467312d32100118092003",
    ),
    "suggested": (
        pb.SessionRequest(
            suggested=pb.Suggested(
                assignment=pb.Assignment(assignment_id="g1-2", attempt=1, epoch=9, sequence=3),
                action=action_to_proto(a.TypeText("ok")),
            )
        ),
        "62160a0c0a0467312d3210011809200312063a040a026f6b",
    ),
    "forced": (
        pb.SessionResponse(
            generate=pb.Generate(
                assignment=pb.Assignment(assignment_id="q1", attempt=1, epoch=9, sequence=1),
                prompt=[pb.PromptPart(text="do it")],
                sampling=pb.SamplingParams(max_tokens=40),
                forced_text="",
            )
        ),
        "a2011b0a0a0a02713110011809200112071205646f2069741a0210282200",
    ),
    "generated": (
        pb.SessionRequest(
            generated=pb.Generated(
                assignment=pb.Assignment(assignment_id="q1", attempt=1, epoch=9, sequence=1),
                prompt_token_ids=[1, 300],
                token_ids=[5, 2],
                logprobs=[-0.5, 0.0],
                text="ok",
                finish_reason=pb.FINISH_REASON_STOP,
            )
        ),
        "a201250a0a0a027131100118092001120301ac021a02050222080000 00bf0000000032026f6b3801",
    ),
    "generated, packed": (
        pb.SessionRequest(
            generated=generation_to_proto(
                Generation((1, 300), (5, 2), (-0.5, 0.0), (VersionSpan(0, 0, 2),), "ok"), 0.0, packed=True
            )
        ),
        "a201221a0205022208000000bf000000002a02180232026f6b38014a08010000002c010000",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_are_as_ever(name: str) -> None:
    message, golden = GOLDEN[name]
    assert message.SerializeToString(deterministic=True).hex() == golden.replace(" ", "")
    assert type(message).FromString(bytes.fromhex(golden.replace(" ", ""))) == message


ACTIONS: list[a.Action] = [
    a.Move(a.Point(0.1, 0.2)),
    a.Click(None, "right", 1, ("Control_L",)),
    a.Button(a.Point(0, 0), "middle", "up"),
    a.Drag((a.Point(0, 0), a.Point(0.5, 0.5))),
    a.Scroll(a.Point(0.5, 0.5), -1, 3),
    a.Keys(("Control_L", "a"), "down"),
    a.TypeText("ünï\n"),
    a.Wait(1.5),
    a.Observe(),
    a.Finish("infeasible", "no"),
    a.System("open_url", "file:///"),
    a.Code("python", "1"),
    a.Click(a.Point(0.5, 0.5), hold_seconds=1.5),
    a.Drag((a.Point(0, 0), a.Point(0.5, 0.5), a.Point(0.5, 0)), duration_seconds=0.25),
    a.System("volume_down"),
    a.Several((a.Keys(("Shift_L",), "down"), a.Click(None), a.Keys(("Shift_L",), "up"))),
]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: type(action).__name__)
def test_actions_survive_the_wire(action: a.Action) -> None:
    assert (
        action_from_proto(type(action_to_proto(action)).FromString(action_to_proto(action).SerializeToString()))
        == action
    )


def test_unset_kinds_are_errors() -> None:
    from dart.v1 import action_pb2 as apb

    nested = apb.Action(several=apb.Several(actions=[action_to_proto(a.Several((a.Wait(1.0),)))]))
    for message, why in (
        (nested, "an action of kind several cannot be one of several"),
        (apb.Action(several=apb.Several()), "0 actions together"),
        (apb.Action(several=apb.Several(actions=[action_to_proto(a.Wait(1.0))] * 17)), "17 actions together"),
        (apb.Action(several=apb.Several(actions=[action_to_proto(a.Finish())])), "cannot be one of several"),
    ):
        with pytest.raises(ValueError, match=why):
            action_from_proto(message)
    with pytest.raises(ValueError, match="action has no kind"):
        action_from_proto(apb.Action())
    with pytest.raises(ValueError, match="mouse button 0 is unspecified"):
        action_from_proto(apb.Action(click=apb.Click(count=1)))


@pytest.mark.parametrize("cached", [None, 0, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_a_turn_arrives_as_it_was_sent(packed: bool, cached: int | None) -> None:
    spans = (VersionSpan(3, 0, 2),)
    sent = Generation((1, 300, 2**31 - 1), (5, 2), (-0.5, 0.0), spans, "ok", cached_tokens=cached)
    message = generation_to_proto(sent, 0.5, packed=packed)
    assert bool(message.packed_prompt_token_ids) is packed and bool(message.prompt_token_ids) is not packed
    got = generation_from_proto(message)
    assert (tuple(got.prompt_token_ids), tuple(got.token_ids)) == (sent.prompt_token_ids, sent.token_ids)
    assert tuple(got.logprobs) == sent.logprobs and (got.versions, got.text) == (sent.versions, sent.text)
    assert got.cached_tokens == cached
