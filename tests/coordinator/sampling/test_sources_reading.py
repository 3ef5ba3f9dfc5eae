"""Demonstrations and how they were read: what a strict run would refuse is not imitated in one."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from run_processes.data_rig import CONFIG as TRAINING
from run_processes.data_rig import Rig
from test_collect import collected, training_with

from dart.config import Config
from dart.core.types import Task
from dart.errors import UserError

COLOR = [Task("miniwob", "click-color", 3)]


def reading(trains: Config, read: str) -> Config:
    return trains.model_copy(update={"agent": trains.agent.model_copy(update={"read": read})})


def without_field(made: Path) -> None:
    """The run as one from before the field."""
    connection = sqlite3.connect(made / "run.db")
    (record,) = connection.execute("SELECT config_json FROM runs").fetchone()
    older = json.loads(record)
    del older["agent"]["read"]
    with connection:
        connection.execute("UPDATE runs SET config_json = ?", (json.dumps(older),))
    connection.close()


@pytest.mark.parametrize("read", ["strict", "reference"])
@pytest.mark.parametrize("older", [False, True])
async def test_what_was_read_strictly_fits_both(read: str, older: bool, tmp_path: Path) -> None:
    made = await collected(tmp_path / "made", COLOR, agent=TRAINING.agent.model_dump() | {"read": "strict"})
    if older:
        without_field(made)
    (tmp_path / "run").mkdir()
    async with Rig(tmp_path / "run", reading(training_with(made), read)) as rig:
        assert (await rig.order()).task.name == "click-color"


async def test_what_was_read_by_rules_does_not_fit_a_strict_run(tmp_path: Path) -> None:
    made = await collected(tmp_path / "made", COLOR, agent=TRAINING.agent.model_dump() | {"read": "reference"})
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=r"made with agent\.read reference, and this run has strict"):
        async with Rig(tmp_path / "run", reading(training_with(made), "strict")):
            pass
