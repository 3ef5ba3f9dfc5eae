"""The training runs on GPUs, as far as a machine without GPUs can tell: they are valid, and findings are found."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import pair, shared, trial
from benchmarks.gpu.trial import Trial, events_of, parity

TP_1, TP_2, TWO_RANKS, KILLED = pair.SET_UPS
ALONE = {set_up.name: set_up for set_up in shared.SET_UPS}


@pytest.mark.parametrize("set_up", pair.SET_UPS, ids=lambda set_up: set_up.name)
def test_the_pair_script_starts_runs_that_are_valid(set_up: pair.SetUp) -> None:
    config = pair.config_of(set_up)
    assert (config.sync.transport, config.model.dtype) == ("nccl", "bfloat16")
    assert config.trainer.ranks + config.rollout.replicas * config.rollout.tensor_parallel == set_up.gpus


@pytest.mark.parametrize("set_up", shared.SET_UPS, ids=lambda set_up: set_up.name)
def test_the_shared_script_starts_runs_that_are_valid(set_up: shared.SetUp) -> None:
    config = shared.config_of(set_up)
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


def test_only_transfers_to_the_killed_replica_may_fail() -> None:
    kill, failed = ALONE["killed replica"], {"event": "sync_failed", "replica": "rollout-0", "why": "it is gone"}
    assert shared.findings(kill, _trial([*GOOD[:4], failed, *GOOD[4:]], killed=("rollout-0", 4)), 8) == []
    for events, killed in (([failed, *GOOD], ("rollout-0", 4)), ([*GOOD[:4], failed, *GOOD[4:]], ("rollout-1", 4))):
        wrong = shared.findings(kill, _trial(events, killed=killed), 8)
        assert wrong == ["a transfer failed: it is gone"]


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


RUN = """
import json, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1]) / "run"
folder.mkdir(parents=True)
metrics = (folder / "metrics.jsonl").open("a", buffering=1)
say = lambda **event: print(json.dumps(event), file=metrics, flush=True)
"""
"""The beginning of a stand-in for `dart train`, which is given the run's directory."""
HANGS = "signal.signal(signal.SIGINT, signal.SIG_IGN); say(event='update'); time.sleep(600)"
FAILS = "say(event='update'); sys.exit(3)"
LOSES_A_REPLICA = """
replica = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "--role", "rollout", "--id", "r-1"])
say(event="update"); say(event="sync", replica="r-1"); time.sleep(0.5)
say(event="update"); say(event="sync_started", replica="r-1")
replica.wait(); say(event="sync_failed", replica="r-1", why="it is gone"); say(event="sync", replica="r-1")
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes `dart train` this code."""

    def use(code: str) -> None:
        def command(words: Sequence[str]) -> list[str]:
            (directory,) = [word.removeprefix("run.directory=") for word in words if word.startswith("run.directory=")]
            return [sys.executable, "-c", RUN + code, directory]

        monkeypatch.setattr(trial, "tied", command)
        monkeypatch.setattr(trial.tempfile, "mkdtemp", lambda prefix: str(tmp_path))

    return use


def test_a_run_that_hangs_is_ended(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The longest time is over as soon as it has made its update."""
    stand_in(HANGS)
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: trial.LONGEST_SECONDS * len(events_of(tmp_path)))
    monkeypatch.setattr(trial, "time", clock)
    monkeypatch.setattr(trial, "ENDING_SECONDS", 0.5)
    found = trial.train([f"run.directory={tmp_path}"], tmp_path)
    assert (found.code, found.of("update")) == (None, [{"event": "update"}])


def test_the_folder_of_a_run_is_kept_if_something_is_wrong(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in(FAILS)
    result = trial.tried([], lambda seen: [f"exit code {seen.code}"])
    assert (result["ok"], result["findings"], result["updates"]) == (False, ["exit code 3"], 1)
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


def test_a_replica_is_killed_within_a_transfer(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in(LOSES_A_REPLICA)
    found = trial.train([f"run.directory={tmp_path}"], tmp_path, kill=True)
    assert (found.code, found.killed) == (0, ("r-1", 4))
    assert [event["event"] for event in found.events][4:] == ["sync_failed", "sync"]


@pytest.mark.parametrize("together", [False, True])
def test_every_set_up_gives_a_result(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    monkeypatch.setattr(shared, "run", lambda set_up, updates, episodes: {"name": set_up.name, "updates": updates})
    found = dict(shared.runs(list(shared.SET_UPS[:2]), 3, 4, together=together))
    assert {name: one["name"] for name, one in found.items()} == {"eager": "eager", "adapter": "adapter"}
    assert all(one.get("beside_others", 0) == int(together) for one in found.values())


def test_a_result_file_has_rates_with_intervals(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    summary = json.dumps(LEARNED | {"env_steps": 7})
    stand_in(f"say(event='sync', seconds=0.5, bytes=3); (folder / 'summary.json').write_text({summary!r})")
    result = trial.tried([], lambda seen: [])
    assert not tmp_path.exists()
    assert (result["ok"], result["syncs"], result["sync_bytes"], result["env_steps"]) == (True, 1, 3, 7)
    assert result["success_after"]["sampled"]["low"] == 0.5  # type: ignore[index]
