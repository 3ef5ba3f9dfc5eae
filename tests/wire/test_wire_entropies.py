"""What a trainer tells of its steps' entropies: bounded in size, and believed only of steps that it was given."""

from __future__ import annotations

from dart.core.types import Generation, Sample, StepEntropy
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2
from dart.wire import rules
from dart.wire.channel import MAX_MESSAGE_BYTES
from dart.wire.convert import MOST_TOLD_STEPS, entropies_from_proto, entropies_to_proto


def sample(name: str, index: int, tokens: int) -> Sample:
    return Sample(name, "g", index, (), Generation((), tuple(range(tokens)), (-0.1,) * tokens, (), ""), 1.0)


def test_they_come_back_as_they_were() -> None:
    told = [StepEntropy("t1", 0, 0.25, True, b"\x00\x34" * 3), StepEntropy("t1", 1, 0.0, False, b"\x00\x00" * 2)]
    read = [pb.StepEntropy.FromString(one.SerializeToString()) for one in entropies_to_proto(told)]
    assert entropies_from_proto(read, [sample("t1", 0, 3), sample("t1", 1, 2)]) == told


def test_tokens_are_left_out_beyond_the_bound_and_steps_are_not() -> None:
    told = [StepEntropy("t", index, 0.5, True, b"12") for index in range(5)]
    assert [len(one.token_entropies) for one in entropies_to_proto(told, most_bytes=6)] == [2, 2, 2, 0, 0]


def test_only_steps_of_the_update_count_and_only_as_many_tokens_as_they_have() -> None:
    given = [sample("t1", 0, 3)]
    odd = [
        pb.StepEntropy(trajectory_id="t1", step_index=0, entropy=0.5, token_entropies=b"12345"),
        pb.StepEntropy(trajectory_id="t1", step_index=1, entropy=0.5),
        pb.StepEntropy(trajectory_id="t2", step_index=0, entropy=0.5),
    ]
    assert entropies_from_proto(odd, given) == [StepEntropy("t1", 0, 0.5, False, b"")]
    twice = [*odd, pb.StepEntropy(trajectory_id="t1", step_index=0, entropy=0.75, selected=True)]
    assert entropies_from_proto(twice, given) == [StepEntropy("t1", 0, 0.75, True, b"")]


def test_an_answer_with_the_most_steps_and_many_weights_is_read() -> None:
    """Of a mixture of experts, with more steps than are told."""
    told = [StepEntropy(f"g{index:06d}-1", index % 50, 0.5, True, b"12" * 300) for index in range(2 * MOST_TOLD_STEPS)]
    tensors = [
        weights_pb2.TensorInfo(name=f"model.layers.{index}.weight", shape=[64, 64], dtype="bfloat16")
        for index in range(40_000)
    ]
    answer = pb.Trained(
        assignment=pb.Assignment(assignment_id="u1", attempt=1, sequence=1), update=1, weight_version=1,
        metrics={f"metric_{index}": 0.5 for index in range(100)}, tensors=tensors,
        step_entropies=entropies_to_proto(told),
    )  # fmt: skip
    encoded = pb.SessionRequest(trained=answer).SerializeToString()
    assert len(encoded) < MAX_MESSAGE_BYTES
    read = rules.parsed(encoded)
    assert isinstance(read, pb.SessionRequest) and len(read.trained.step_entropies) == MOST_TOLD_STEPS
