"""The pool in simulation: every VM-second is booked once, and the real env worker's places manage the VMs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pool import __main__ as command
from benchmarks.pool import arms, results
from benchmarks.simulation.desktops import Cause

HOURS = 0.25


def short(arm: arms.Arm, seed: int = 0) -> dict[str, Any]:
    return arms.run(arm, arms.efficiency.BALANCED, seed, HOURS, workers=2)


def test_every_vm_second_is_booked_once() -> None:
    managed, naive = short(arms.MANAGED), short(arms.NAIVE)
    for row in (managed, naive):
        assert row["vm_seconds"] == pytest.approx(20 * HOURS * 3600, abs=1)
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        assert 0.6 < row["useful"] < 1.0
        assert row["events"]["hangs"] > 0 and row["events"]["failed set-ups"] > 0
        failed = row["events"]["hangs"] + row["events"]["failed set-ups"]
        assert row["failed_attempts"] == pytest.approx(failed, abs=5), "the run went on a little longer"
    assert naive["shares"]["renewing"] == 0.0 < managed["shares"]["renewing"]
    assert naive["ledger"]["renewing"] < managed["ledger"]["renewing"], "the coordinator's ledger saw it as well"
    assert short(arms.MANAGED) | {"cpu_seconds": 0} == managed | {"cpu_seconds": 0}, "a seed determines a run"


def test_idle_time_is_divided_as_the_coordinator_divides_it() -> None:
    shares = arms.shares_of({Cause.IDLE: 50.0, Cause.ACTING: 50.0}, {"the trainer is behind: so": 30.0, "paused": 10.0})
    assert shares["waiting for the trainer"] == pytest.approx(0.375)
    assert shares["idle for another reason"] == pytest.approx(0.125)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_differences_are_paired_by_seed() -> None:
    def row(arm: str, seed: int, actions: float) -> dict[str, Any]:
        return {"training_gpus": 8, "arm": arm, "seed": seed, "useful": 0.5, "shares": {}, "staleness": 1.0,
                "trained_actions_per_minute": actions, "trajectories_per_hour": 1.0}  # fmt: skip

    rows = [
        row(name, seed, 100.0 * seed + more) for name, more in ((results.NAIVE, 0), ("managed", 10)) for seed in (1, 2)
    ]
    (_, managed) = results.summaries(rows)
    over = managed["figures"]["trained_actions_per_minute"]["over_naive"]
    assert (over["mean"], over["low"], over["high"]) == (10.0, 10.0, 10.0)
    assert managed["figures"]["trained_actions_per_minute"]["mean"]["mean"] == 160.0


def test_runs_of_another_length_are_not_discarded_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool.json"
    shutil.copy(results.RESULT, path)
    before = path.read_bytes()
    (hours,) = {row["hours"] for row in json.loads(before)["results"]["runs"]}
    monkeypatch.setattr(results, "RESULT", path)
    monkeypatch.setattr(arms, "run", lambda *_: pytest.fail("a run was made"))
    monkeypatch.setattr("sys.argv", ["pool", "--hours", str(2 * hours)])
    with pytest.raises(SystemExit, match=f"runs of {hours:g} h.*--anew"):
        command.main()
    monkeypatch.setattr("sys.argv", ["pool", "--hours", str(hours)])
    command.main()
    assert path.read_bytes() == before, "no run was made, so date and machine are those of the runs"
