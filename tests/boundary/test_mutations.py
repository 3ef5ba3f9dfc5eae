"""For every mutation of every message of a worker, the run goes on and no other worker's work changes."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest

import benchmarks.fuzz as program
from benchmarks.fuzz import REACHES_ALL, Results, main, measure, what_failed
from benchmarks.simulation.fuzzing import HONEST_ENVS, Outcome, fuzz
from benchmarks.simulation.mutants import EXEMPT, FORCED, SAYS, missing
from benchmarks.simulation.mutations import KINDS, mutated
from dart.core.types import Image
from dart.v1 import session_pb2 as pb
from dart.wire import rules
from dart.wire.convert import image_to_proto

MUTATIONS, SEEDS = 1_000, (1, 2, 3, 8)
assert MUTATIONS * len(SEEDS) >= 2_000


@functools.cache
def outcome(seed: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(seed, MUTATIONS, Path(folder))


@pytest.mark.parametrize("seed", SEEDS)
def test_mutations_end_no_run_and_touch_no_honest_worker(seed: int) -> None:
    done = outcome(seed)
    assert not done.wrong, f"seed {seed}: {done.wrong[:3]}"
    assert done.mutations.total() >= MUTATIONS
    assert done.violations > 100 and done.quarantines > 10, "they are noticed"
    assert done.honest_trajectories > 10 * HONEST_ENVS and done.updates >= 1
    assert done.collected > HONEST_ENVS, "the collection goes on"
    assert done.longest_seconds < 1.0, "of the processor, for one message"


def test_every_message_that_a_worker_may_send_was_mutated() -> None:
    assert {kind for kinds in SAYS.values() for kind in kinds} - {FORCED} == {*KINDS}
    said = set(SAYS["env"] | SAYS["rollout"] | SAYS["train"])
    assert said >= {*rules.ANSWERED_WITH, *rules.UNASKED, "hello"}
    total = sum((outcome(seed).mutations for seed in SEEDS), Counter())
    assert missing(total) == []
    assert set(EXEMPT) == {("train", "failure"), ("train", "bye")} and not any(total[one] for one in EXEMPT)
    del total["env", "slots"]
    assert missing(total) == ["env slots"]


def test_what_does_not_hold_is_named_and_ends_the_program_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "MUTATIONS_OF_A_RUN", 50)
    well = measure(SEEDS[0], 1)
    assert what_failed(well) == [] and well["mutations"] >= 1
    ill: Results = {
        **well,
        "seeds_that_failed": {"7": ["the run ended"]},
        "stalls_over_a_second": 1,
        "longest_hold_seconds": 1.5,
        "memory_growth_mb": 120.0,
        "never_mutated": ["env slots"],
    }
    assert what_failed(ill) == [
        "seed 7: the run ended",
        "one message held the coordinator for 1.5 s",
        "memory_growth_mb is 120.0, and must be at most 100",
    ], "so few mutations may have missed a kind"
    assert what_failed({**well, "never_mutated": ["env slots"], "mutations": REACHES_ALL}) == [
        "never mutated: env slots"
    ]
    monkeypatch.setattr("sys.argv", ["fuzz", "--out", str(tmp_path / "fuzz.json")])
    for results, wanted in ((well, ""), (ill, "seed 7: the run ended")):
        monkeypatch.setattr(program, "measure", lambda *_, results=results: results)
        with pytest.raises(SystemExit) if wanted else contextlib.nullcontext() as ended:
            main()
        assert wanted in (str(ended.value.code) if ended else "")
        written = json.loads((tmp_path / "fuzz.json").read_text())["results"]
        assert written["seeds_that_failed"] == results["seeds_that_failed"] and written["exempt"]
    assert "mutations_by_message" in capsys.readouterr().out


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
