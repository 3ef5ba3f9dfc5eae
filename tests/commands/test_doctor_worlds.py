"""`dart doctor` makes one environment of a world that dart does not know, shows it and takes a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from dart.commands import doctor
from dart.config import Environment

LAMPS = {"id": "foreign.gym_samples:Lamps-v0", "cells": [2, 2], "instruction_at": "info.said.words"}
WORLD = """
import io
from PIL import Image as Picture
from dart.worlds import Observation, SyncEnv, Verdict

class Broken(SyncEnv):
    actions = {"click"}
    def reset(self, task):
        raise RuntimeError("the licence server does not answer")
    def act(self, action): ...
    def judge(self, last, at_limit): ...

class Slow(Broken):
    def reset(self, task):
        import time
        time.sleep(60)
"""


def tried(kind: str, options: dict[str, object]) -> str | None:
    return doctor._one_environment(
        Environment.model_validate({"kind": kind, "options": options, "tasks": {"names": ["lamps"]}})
    )


@pytest.fixture(autouse=True)
def seen_by_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_world.py").write_text(WORLD, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path('tests/support').resolve()}:{Path.cwd()}")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_environment_that_begins_is_all_right() -> None:
    assert tried("gym", LAMPS) == ""


def test_an_environment_that_cannot_begin_is_told_in_its_own_words() -> None:
    told = tried("broken_world:Broken", {})
    assert told is not None and "reset(" in told and "the licence server does not answer" in told


def test_an_environment_that_takes_too_long_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "TRIED_SECONDS", 3)
    assert tried("broken_world:Slow", {}) is None
    assert "has not begun lamps within 3 s" in capsys.readouterr().out


def test_a_world_that_comes_with_dart_is_not_tried() -> None:
    assert tried("ladder", {}) is None
