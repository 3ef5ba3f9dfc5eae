"""The training runs on GPUs, as far as a machine without GPUs can tell: they are valid, and findings are found."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import pair, shared, trial
from benchmarks.gpu.trial import Injected, Trial, between_transfers, events_of, given_up, parity, within_transfer

TP_1, TP_2, TWO_RANKS, KILLED = pair.SET_UPS
ALONE = {set_up.name: set_up for set_up in shared.SET_UPS}


@pytest.mark.parametrize("set_up", pair.SET_UPS, ids=lambda set_up: set_up.name)
def test_the_pair_script_starts_runs_that_are_valid(set_up: pair.SetUp) -> None:
    config = pair.config_of(set_up)
    assert (config.sync.transport, config.model.dtype) == ("nccl", "bfloat16")
    assert config.trainer.ranks + config.rollout.replicas * config.rollout.tensor_parallel == set_up.gpus


@pytest.mark.parametrize("set_up", [TP_1, TP_2, TWO_RANKS], ids=lambda set_up: set_up.name)
def test_a_transfer_is_tried_with_samples_of_the_trainers_version(set_up: pair.SetUp) -> None:
    schedule = pair.config_of(set_up).schedule
    assert (schedule.sampling, schedule.training) == ("batch", "synchronous")
    assert (set_up.faults, set_up.environment) == ((), ())


def test_a_stopped_replica_is_lost_later_than_its_transfer() -> None:
    config = pair.config_of(KILLED)
    assert config.sync.mode == "abort"
    assert 3 * config.sync.timeout_seconds < config.server.lost_after_seconds
    assert config.stop.train_seconds is not None
    assert config.server.lost_after_seconds < config.stop.train_seconds < trial.LONGEST_SECONDS
    assert dict(KILLED.environment)["NCCL_BUFFSIZE"] == str(pair.BUFFER_BYTES)


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


def _update(difference: float | None = 0.01, tokens: float = 100.0) -> dict[str, Any]:
    return {"event": "update", "trainer": {"same_version_tokens": tokens, "same_version_difference": difference}}


def _sync(replica: str = "rollout-0") -> dict[str, Any]:
    return {"event": "sync", "replica": replica, "seconds": 0.1, "bytes": 6_420_608}


def _started(replica: str = "rollout-0") -> dict[str, Any]:
    return {"event": "sync_started", "replica": replica}


def _failed(replica: str = "rollout-0", why: str = "it is gone") -> dict[str, Any]:
    return {"event": "sync_failed", "replica": replica, "why": why}


def _success(low: float, high: float) -> dict[str, Any]:
    one = {"mean": (low + high) / 2, "low": low, "high": high, "episodes": 100, "temperature": 1.0}
    return {"greedy": one, "sampled": one}


NONE = Injected()
LEARNED = {"success_before": _success(0.1, 0.2), "success_after": _success(0.5, 0.7)}


def _trial(
    events: list[dict[str, Any]],
    code: int | None = 0,
    injected: Injected = NONE,
    summary: dict[str, Any] = LEARNED,
) -> Trial:
    return Trial(events, summary, code, injected, 1.0)


GOOD = [_update(), _sync()] * pair.UPDATES
TIMED_OUT = _failed(why="the transfer, or the pause for it, took longer than sync.timeout_seconds (20 s)")
STOPPED, KILLED_AT = len(GOOD), len(GOOD) + 3
LOST = [*GOOD, _started(), TIMED_OUT, _sync("rollout-1"), _failed(), _sync(), _sync("rollout-1")]
"""rollout-0 is stopped, a transfer to it times out, rollout-1 gets weights, rollout-0 is killed and comes back."""
AT = Injected("rollout-0", (STOPPED, KILLED_AT))


def test_a_good_run_has_no_findings() -> None:
    assert pair.findings(TP_1, _trial(GOOD)) == []
    assert pair.findings(KILLED, _trial(LOST, injected=AT)) == []
    assert shared.findings(ALONE["eager"], _trial(GOOD), pair.UPDATES) == []
    killed = Injected("rollout-0", (4,))
    assert shared.findings(ALONE["killed replica"], _trial(GOOD, injected=killed), pair.UPDATES) == []


@pytest.mark.parametrize(
    ("events", "code", "told"),
    [
        (GOOD, None, "did not end by itself"),
        (GOOD, 1, "exit code is 1"),
        (GOOD[:4], 0, "2 of 8 updates"),
        ([_update()] * 8, 0, "no weights arrived"),
        ([*GOOD, _failed(why="a timeout")], 0, "a transfer failed: a timeout"),
        ([*GOOD, {"event": "trainer_lost", "why": "it stopped"}], 0, "the trainer was lost: it stopped"),
        ([_update(tokens=0.0), _sync()] * 8, 0, "nothing is known of parity"),
        ([_update(difference=0.2), _sync()] * 8, 0, "differ by 0.2000"),
        ([_update(difference=None), _sync()] * 8, 0, "differ by inf"),
    ],
)
def test_each_fault_is_found(events: list[dict[str, Any]], code: int | None, told: str) -> None:
    assert any(told in one for one in pair.findings(TP_1, _trial(events, code)))
    assert any(told in one for one in shared.findings(ALONE["eager"], _trial(events, code), pair.UPDATES))


@pytest.mark.parametrize(
    ("number", "update", "told"),
    [
        (1, _update(difference=3.0), "differ by 3.0000"),  # garbage arrived
        (7, _update(difference=0.2), "differ by 0.2000"),  # one transfer of seven went wrong
        (7, _update(difference=None), "differ by inf"),
        (4, _update(tokens=0.0), "nothing is known of parity"),
    ],
)
def test_every_transfer_must_show_in_the_next_update(number: int, update: dict[str, Any], told: str) -> None:
    events = [*GOOD[: 2 * number], update, *GOOD[2 * number + 1 :]]
    (found,) = pair.findings(TP_1, _trial(events))
    assert told in found


def test_the_first_update_says_nothing_of_transfers() -> None:
    """Both ends read its weights from the disk."""
    events = [_update(), _sync(), *[_update(tokens=0.0), _sync()] * 7]
    assert len(pair.findings(TP_1, _trial(events))) == 7
    assert shared.findings(ALONE["eager"], _trial(events), 8) == []
    assert pair.findings(TP_1, _trial([_update(difference=0.2), *GOOD[1:]])) == []


def test_8_bit_matrices_may_differ_by_more() -> None:
    coarse = _trial([_update(difference=0.1), _sync()] * 8)
    assert shared.findings(ALONE["fp8"], coarse, 8) == []
    assert shared.findings(ALONE["eager"], coarse, 8) == [
        "log-probabilities differ by 0.1000 on average, more than 0.05"
    ]


def test_the_replica_of_one_gpu_must_be_killed_and_come_back() -> None:
    kill = ALONE["killed replica"]
    assert shared.findings(kill, _trial(GOOD), 8) == ["the replica was not killed"]
    assert shared.findings(kill, _trial(GOOD, injected=Injected("rollout-0", (len(GOOD),))), 8) == [
        "the replica, which was killed, got no weights afterwards"
    ]


def _changed(events: list[dict[str, Any]], number: int, event: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """With another event in the place of this one, or with none."""
    return [*events[:number], *([] if event is None else [event]), *events[number + 1 :]]


@pytest.mark.parametrize(
    ("events", "injected", "told"),
    [
        (GOOD, NONE, "no replica was stopped"),
        (LOST, Injected("rollout-0", (STOPPED,)), "rollout-0 was stopped, and no transfer to it failed"),
        (_changed(LOST, STOPPED + 1, _failed(why="silent for 15 s")), AT, "no transfer to rollout-0 ended by its time"),
        (_changed(LOST, STOPPED + 4), AT, "rollout-0, which was killed, got no weights afterwards"),
        (LOST[:-1], AT, "no other replica got weights after rollout-0 was killed"),
        ([event | ({"bytes": 1000} if "bytes" in event else {}) for event in LOST], AT, "weights fit NCCL's buffer"),
        ([*LOST, _failed("rollout-1")], AT, "a transfer failed: it is gone"),
        ([*LOST, {"event": "trainer_lost", "why": "it hung"}], AT, "the trainer was lost: it hung"),
    ],
)
def test_what_a_stopped_replica_must_show(events: list[dict[str, Any]], injected: Injected, told: str) -> None:
    (found,) = pair.findings(KILLED, _trial(events, injected=injected))
    assert told in found


def test_the_sender_may_tell_the_timeout_first() -> None:
    events = _changed(LOST, STOPPED + 1, _failed(why="train: the transfer did not finish: no answer within 20 s"))
    assert pair.findings(KILLED, _trial(events, injected=AT)) == []


def test_only_transfers_to_the_killed_replica_may_fail() -> None:
    kill, killed = ALONE["killed replica"], Injected("rollout-0", (4,))
    assert shared.findings(kill, _trial([*GOOD[:4], _failed(), *GOOD[4:]], injected=killed), 8) == []
    early, other = [_failed(), *GOOD], [*GOOD[:4], _failed("rollout-1"), *GOOD[4:]]
    for events in (early, other):
        assert shared.findings(kill, _trial(events, injected=killed), 8) == ["a transfer failed: it is gone"]


def test_a_replica_is_killed_within_a_transfer_of_its_own() -> None:
    events = [_update(), _started(), _sync(), _update(), _started("rollout-1")]
    assert [within_transfer(events, name) for name in ("rollout-0", "rollout-1")] == [False, True]
    assert not within_transfer(events[2:], "rollout-1")  # after one update
    assert not within_transfer([*events, _sync("rollout-1")], "rollout-1")
    assert within_transfer([_update()] * trial.KILLED_BY, "rollout-0")


def test_a_replica_is_stopped_between_transfers() -> None:
    events = [_started(), _sync(), _started("rollout-1"), _sync("rollout-1"), _started(), _sync()]
    assert [between_transfers(events, name) for name in ("rollout-0", "rollout-1")] == [True, False]
    assert between_transfers([*events, _started("rollout-1")], "rollout-0")
    assert not between_transfers([*events, _started()], "rollout-0")
    assert not between_transfers([*events, _started(), _failed()], "rollout-0")
    assert not between_transfers(events[2:], "rollout-0")


def test_a_stopped_replica_is_killed_when_another_has_weights_after_its_failure() -> None:
    other = _sync("rollout-1")
    assert given_up([_started(), TIMED_OUT, _update(), other], "rollout-0")
    for events in ([_started(), other, TIMED_OUT], [TIMED_OUT, _sync()], [_failed("rollout-1"), other], [other], []):
        assert not given_up(events, "rollout-0")


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
ENGINE = "import subprocess; engine = subprocess.Popen(['sleep', '600']); print(engine.pid, flush=True); engine.wait()"
"""A replica with an engine."""
STOPS_A_REPLICA = f"""
import psutil
command = [sys.executable, "-c", {ENGINE!r}, "--role", "rollout", "--id", "r-1"]
replica = subprocess.Popen(command, stdout=subprocess.PIPE)
processes = [psutil.Process(replica.pid), psutil.Process(int(replica.stdout.readline()))]
say(event="sync_failed", replica="r-1", why="it was slow"); say(event="sync", replica="r-2")
for _ in range(2):
    say(event="sync_started", replica="r-1"); say(event="sync", replica="r-1")
states, until = lambda: [one.status() for one in processes], time.monotonic() + 60
while states() != ["stopped", "stopped"] and time.monotonic() < until:
    time.sleep(0.01)
say(event="sync_started", replica="r-1"); say(event="sync_failed", replica="r-1", why="sync.timeout_seconds")
time.sleep(0.5); say(event="seen", states=states())
say(event="sync_started", replica="r-2"); say(event="sync", replica="r-2")
replica.wait(); processes[1].kill(); say(event="sync", replica="r-1")
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
    found = trial.train([f"run.directory={tmp_path}"], tmp_path, trial.KILLED)
    assert (found.code, found.injected) == (0, Injected("r-1", (4,)))
    assert [event["event"] for event in found.events][4:] == ["sync_failed", "sync"]


def test_a_replica_is_stopped_with_its_engine_and_killed_once_it_is_given_up(
    stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    stand_in(STOPS_A_REPLICA)
    found = trial.train([f"run.directory={tmp_path}"], tmp_path, trial.STOPPED_AND_KILLED)
    assert (found.code, found.injected) == (0, Injected("r-1", (6, 11)))
    assert found.of("seen") == [{"event": "seen", "states": ["stopped", "stopped"]}]


def test_all_faults_of_a_run_are_of_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    suffered: list[Any] = []
    monkeypatch.setattr(trial, "_worker", lambda parent, replica: replica)
    fault, events = trial.Fault(suffered.append, lambda events, replica: True), [_started("rollout-1"), _started()]
    first = trial._inject(fault, NONE, events[:1], parent=0)
    assert trial._inject(fault, first, events, parent=0) == Injected("rollout-1", (1, 2))
    assert suffered == ["rollout-1", "rollout-1"]


def test_a_run_has_the_set_ups_variables(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in("import os; say(event='update', of={name: os.environ[name] for name in ('NCCL_PROTO', 'PATH')})")
    found = trial.train([f"run.directory={tmp_path}"], tmp_path, environment=pair.SMALL_BUFFER)
    assert found.of("update") == [{"event": "update", "of": {"NCCL_PROTO": "Simple", "PATH": os.environ["PATH"]}}]


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
