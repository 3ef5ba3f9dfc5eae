"""What a run tells in metrics.jsonl."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dart.coordinator.service.journal import Journal
from dart.store.lines import read_lines


def events(file: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What the file tells, of one kind or all of it. A line that is still being written is left out."""
    told = map(json.loads, read_lines(file))
    return [event for event in told if kind is None or event["event"] == kind]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every event from now on, of runs in this process: the same as `events` gives, without what JSON makes of it."""
    told: list[dict[str, Any]] = []
    record = Journal.event

    def event(journal: Journal, kind: str, /, **fields: Any) -> None:
        told.append({"event": kind, "unix_seconds": time.time(), **fields})
        record(journal, kind, **fields)

    monkeypatch.setattr(Journal, "event", event)
    return told
