"""For every mutation of every message of a worker, the run goes on and no other worker's work changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.simulation.fuzzing import HONEST_ENVS, fuzz
from benchmarks.simulation.mutations import KINDS, mutated
from dart.core.types import Image
from dart.v1 import session_pb2 as pb
from dart.wire.convert import image_to_proto

MUTATIONS, SEEDS = 1_000, (1, 2, 3)
assert MUTATIONS * len(SEEDS) >= 2_000


@pytest.mark.parametrize("seed", SEEDS)
def test_mutations_end_no_run_and_touch_no_honest_worker(seed: int, tmp_path: Path) -> None:
    outcome = fuzz(seed, MUTATIONS, tmp_path)
    assert not outcome.wrong, f"seed {seed}: {outcome.wrong[:3]}"
    assert outcome.mutations.total() >= MUTATIONS and {"observed", "generated", "ready", "hello"} <= set(
        outcome.mutations
    )
    assert outcome.violations > 100 and outcome.quarantines > 10, "they are noticed"
    assert outcome.honest_trajectories > 10 * HONEST_ENVS and outcome.updates >= 1
    assert outcome.longest_seconds < 1.0, "of the processor, for one message"


def test_a_seed_is_one_sequence_of_mutations_and_reaches_every_kind() -> None:
    screen = image_to_proto(Image.of(b"screen", "image/png", 160, 224))
    message = pb.SessionRequest(observed=pb.Observed(image=screen, instruction="click"))
    message.observed.assignment.assignment_id = "t"

    def drawn(seed: int) -> list[object]:
        chance = random.Random(seed)
        return [sent for _ in range(1500) for sent in mutated(message, chance)]

    first = drawn(1)
    assert first == drawn(1) and first != drawn(2)
    messages = [sent for sent in first if isinstance(sent, pb.SessionRequest)]
    assert {one.WhichOneof("body") for one in messages} == {*KINDS, None}
    assert sum(isinstance(sent, bytes) for sent in first) > 100
    assert message.observed.instruction == "click", "the message itself stays as it is"
