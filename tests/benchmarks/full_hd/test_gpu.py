"""The GPU benchmarks, as far as a machine without GPUs can tell: everything runs, and findings are found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import pair
from benchmarks.gpu.pair import SET_UPS, SetUp, config_of, findings, parity

TP_1, TP_2, TWO_RANKS, KILLED = SET_UPS


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for one another take longer than these passes."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.torch
@pytest.mark.usefixtures("one_thread")
def test_every_measurement_runs_on_a_cpu(tmp_path: Path) -> None:
    from benchmarks.gpu.__main__ import MEASUREMENTS, main

    main(["--device", "cpu", "--tiny", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "cpu-tiny.json").read_text())
    results = written["results"]
    assert list(results) == list(MEASUREMENTS)
    assert not {name: found["failed"] for name, found in results.items() if "failed" in found}
    assert "tiny" in written["real_or_simulated"]
    assert any("flash" in name for name in results["attention"]["chosen"])
    assert results["rows"]["chain"]["tokens"] < results["rows"]["separate"]["tokens"]
    assert set(results["fully_shard"]) >= {"autocast", "fully_shard"}


@pytest.mark.torch
def test_without_a_gpu_the_full_width_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.gpu.__main__ import main

    with pytest.raises(SystemExit, match="add --tiny"):
        main(["--device", "cpu", "--output", str(tmp_path)])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no GPU"):
            main(["--output", str(tmp_path)])


@pytest.mark.parametrize("set_up", SET_UPS, ids=lambda set_up: set_up.name)
def test_the_pair_script_starts_runs_that_are_valid(set_up: SetUp, tmp_path: Path) -> None:
    config = config_of(set_up, tmp_path)
    assert (config.sync.transport, config.model.dtype) == ("nccl", "bfloat16")
    assert config.trainer.ranks + config.rollout.replicas * config.rollout.tensor_parallel == set_up.gpus


def test_set_ups_for_more_gpus_than_there_are_are_left_out() -> None:
    assert list(pair.possible(2)) == [TP_1]
    assert list(pair.possible(3)) == list(SET_UPS)


def _update(difference: float = 0.01, tokens: float = 100.0) -> dict[str, Any]:
    return {"event": "update", "trainer": {"same_version_tokens": tokens, "same_version_difference": difference}}


def _sync(replica: str = "rollout-0") -> dict[str, Any]:
    return {"event": "sync", "replica": replica}


GOOD = [_update(), _sync()] * pair.UPDATES


def test_a_good_run_has_no_findings() -> None:
    assert findings(TP_1, GOOD, 0, None) == []
    after = [*GOOD, _sync("rollout-1")]
    assert findings(KILLED, after, 0, ("rollout-1", 4)) == []


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
    assert any(told in one for one in findings(TP_1, events, code, None))


def test_a_killed_replica_must_come_back_and_the_other_must_go_on() -> None:
    assert any("no replica was killed" in one for one in findings(KILLED, GOOD, 0, None))
    gone = findings(KILLED, GOOD, 0, ("rollout-1", 4))
    assert gone == ["rollout-1, which was killed, got no weights afterwards"]
    alone = findings(KILLED, GOOD, 0, ("rollout-0", 4))
    assert alone == ["no other replica got weights after rollout-0 was killed"]


def test_parity_is_weighted_by_tokens() -> None:
    assert parity([_update(0.1, 1.0), _update(0.0, 3.0)]) == (0.025, 4.0)
    assert parity([]) == (0.0, 0.0)


def test_lines_that_are_not_complete_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"event": "sync"}\n{"event": "upd')
    assert pair.events_of(tmp_path) == [{"event": "sync"}]
    assert pair.events_of(tmp_path / "run") == []
