"""The training runs on GPUs, as far as a machine without GPUs can tell: they are valid, and findings are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import pair, shared
from benchmarks.gpu.trial import Trial, events_of, parity

TP_1, TP_2, TWO_RANKS, KILLED = pair.SET_UPS
ALONE = {set_up.name: set_up for set_up in shared.SET_UPS}


@pytest.mark.parametrize("set_up", pair.SET_UPS, ids=lambda set_up: set_up.name)
def test_the_pair_script_starts_runs_that_are_valid(set_up: pair.SetUp, tmp_path: Path) -> None:
    config = pair.config_of(set_up, tmp_path)
    assert (config.sync.transport, config.model.dtype) == ("nccl", "bfloat16")
    assert config.trainer.ranks + config.rollout.replicas * config.rollout.tensor_parallel == set_up.gpus


@pytest.mark.parametrize("set_up", shared.SET_UPS, ids=lambda set_up: set_up.name)
def test_the_shared_script_starts_runs_that_are_valid(set_up: shared.SetUp, tmp_path: Path) -> None:
    config = shared.config_of(set_up, tmp_path)
    assert (config.sync.transport, config.model.dtype, config.trainer.ranks) == ("gloo", "bfloat16", 1)
    assert config.rollout.engine_args == {"gpu_memory_utilization": shared.SHARE}
    # Beside five trainers, each of which needs little.
    assert len(shared.SET_UPS) * shared.SHARE < 0.5
    assert (config.rollout.quantization == "fp8") == (set_up.name == "fp8")
    assert (config.trainer.lora is not None) == (set_up.name == "adapter")
    assert config.rollout.enforce_eager == (set_up.name != "graphs")


def test_set_ups_for_more_gpus_than_there_are_are_left_out() -> None:
    assert list(pair.possible(2)) == [TP_1]
    assert list(pair.possible(3)) == list(pair.SET_UPS)


def _update(difference: float = 0.01, tokens: float = 100.0) -> dict[str, Any]:
    return {"event": "update", "trainer": {"same_version_tokens": tokens, "same_version_difference": difference}}


def _sync(replica: str = "rollout-0") -> dict[str, Any]:
    return {"event": "sync", "replica": replica, "seconds": 0.1, "bytes": 1}


def _success(low: float, high: float) -> dict[str, Any]:
    one = {"mean": (low + high) / 2, "low": low, "high": high, "episodes": 100, "temperature": 1.0}
    return {"greedy": one, "sampled": one}


LEARNED = {"success_before": _success(0.1, 0.2), "success_after": _success(0.5, 0.7)}


def _trial(
    events: list[dict[str, Any]],
    code: int | None = 0,
    killed: tuple[str, int] | None = None,
    summary: dict[str, Any] = LEARNED,
) -> Trial:
    return Trial(events, summary, code, killed, 1.0)


GOOD = [_update(), _sync()] * pair.UPDATES


def test_a_good_run_has_no_findings() -> None:
    assert pair.findings(TP_1, _trial(GOOD)) == []
    after = [*GOOD, _sync("rollout-1")]
    assert pair.findings(KILLED, _trial(after, killed=("rollout-1", 4))) == []
    assert shared.findings(ALONE["eager"], _trial(GOOD), pair.UPDATES) == []
    assert shared.findings(ALONE["killed replica"], _trial(GOOD, killed=("rollout-0", 4)), pair.UPDATES) == []


@pytest.mark.parametrize(
    ("events", "code", "told"),
    [
        (GOOD, None, "did not end by itself"),
        (GOOD, 1, "exit code is 1"),
        (GOOD[:4], 0, "2 of 8 updates"),
        ([_update()] * 8, 0, "no weights arrived"),
        ([*GOOD, {"event": "sync_failed", "why": "a timeout"}], 0, "a transfer failed: a timeout"),
        ([_update(tokens=0.0), _sync()] * 8, 0, "nothing is known of parity"),
        ([_update(difference=0.2), _sync()] * 8, 0, "differ by 0.2000"),
    ],
)
def test_each_fault_is_found(events: list[dict[str, Any]], code: int | None, told: str) -> None:
    assert any(told in one for one in pair.findings(TP_1, _trial(events, code)))
    assert any(told in one for one in shared.findings(ALONE["eager"], _trial(events, code), pair.UPDATES))


def test_8_bit_matrices_may_differ_by_more() -> None:
    coarse = _trial([_update(difference=0.1), _sync()] * 8)
    assert shared.findings(ALONE["fp8"], coarse, 8) == []
    assert shared.findings(ALONE["eager"], coarse, 8) == [
        "log-probabilities differ by 0.1000 on average, more than 0.05"
    ]


def test_a_killed_replica_must_come_back_and_the_other_must_go_on() -> None:
    assert any("no replica was killed" in one for one in pair.findings(KILLED, _trial(GOOD)))
    gone = pair.findings(KILLED, _trial(GOOD, killed=("rollout-1", 4)))
    assert gone == ["rollout-1, which was killed, got no weights afterwards"]
    alone = pair.findings(KILLED, _trial(GOOD, killed=("rollout-0", 4)))
    assert alone == ["no other replica got weights after rollout-0 was killed"]
    kill = ALONE["killed replica"]
    assert shared.findings(kill, _trial(GOOD), 8) == ["the replica was not killed"]
    assert shared.findings(kill, _trial(GOOD, killed=("rollout-0", len(GOOD))), 8) == [
        "the replica, which was killed, got no weights afterwards"
    ]


def test_success_must_rise_by_more_than_its_intervals() -> None:
    level = {"success_before": _success(0.1, 0.3), "success_after": _success(0.25, 0.5)}
    assert shared.findings(ALONE["eager"], _trial(GOOD, summary=level), 8) == [
        "greedy success did not rise", "sampled success did not rise",
    ]  # fmt: skip
    unknown = shared.findings(ALONE["eager"], _trial(GOOD, summary={}), 8)
    assert unknown == ["success was not measured before and after"]


def test_parity_is_weighted_by_tokens() -> None:
    assert parity([_update(0.1, 1.0), _update(0.0, 3.0)]) == (0.025, 4.0)
    assert parity([]) == (0.0, 0.0)


def test_lines_that_are_not_complete_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"event": "sync"}\n{"event": "upd')
    assert events_of(tmp_path) == [{"event": "sync"}]
    assert events_of(tmp_path / "run") == []
