"""How a run begins and is continued in its directory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from dart.commands.running import JobRun, run_in_loop
from dart.config import load
from dart.coordinator.job import Train
from dart.errors import UserError
from dart.rundir import RunDirectory

MINIWOB = Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml"


def test_a_run_whose_dashboard_cannot_listen_has_failed_and_goes_on_with_its_own_vocabulary_alone(
    tmp_path: Path,
) -> None:
    nowhere = ("dashboard.host=192.0.2.1", "dashboard.port=0", "model.path=builtin:tiny-qwen3vl")
    directory = RunDirectory.at(tmp_path / "run")
    with pytest.raises(UserError, match=r"dashboard.host is '192.0.2.1'"):
        run_in_loop(JobRun(load(MINIWOB, nowhere), directory, Train(), quiet=True))
    with sqlite3.connect(directory.database) as database:
        assert database.execute("select state from runs").fetchall() == [("failed",)], "not running for ever"
    for model, why in (
        ("ladder", "whose vocabulary is not that of the run"),
        ("tiny", "dashboard.host"),
    ):
        config = load(MINIWOB, (*nowhere, f"model.path=builtin:{model}-qwen3vl"))
        with pytest.raises(UserError, match=why):
            run_in_loop(JobRun(config, directory, Train(), quiet=True, resume=True))
