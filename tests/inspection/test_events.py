"""What the events page says of an event, and what a search finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dashboards.made import event, opened, small_run
from pydantic import JsonValue

from dart.inspection.events import sentence
from dart.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return small_run(tmp_path)


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("evaluation", {"label": "eval", "mean": 0.5, "low": 0.25, "high": 0.75, "episodes": 8},
         "held-out success 0.5 (0.25 to 0.75) in 8 episodes: eval"),
        ("stalled", {"kind": "learning", "waits": "nothing is learnt yet", "waits_for": "no reward", "failure": ""},
         "nothing is learnt yet: no reward"),
        ("stalled", {"waits": "update 4", "waits_for": "the trainer", "culprit": "train", "failure": ""},
         "update 4 waits for the trainer: train"),
        ("stalled", {"waits": "update 4", "waits_for": "the trainer", "culprit": "", "failure": "no answer"},
         "update 4 waits for the trainer: no answer"),
    ],
)  # fmt: skip
def test_an_event_is_a_whole_sentence_whatever_it_lacks(kind: str, data: dict[str, JsonValue], text: str) -> None:
    assert sentence(kind, data) == text


async def test_events_are_searched_as_text_and_not_as_a_pattern(run: RunDirectory) -> None:
    event(
        run, 9001, "attempt_failed", json.dumps({"trajectory": "g1-1", "why": 'said "50 %" and _', "worker": "env-ä"})
    )
    async with opened(run) as it:
        for text in ("50 %", 'said "50', "and _", "env-ä"):
            assert [row.sequence for row in (await it.events(text=text)).rows] == [9001], text
        assert not (await it.events(text="50_%")).rows
        page = await it.events(limit=3)
        assert sum(page.kinds.values()) >= len(page.rows) == 3
        older = await it.events(limit=3, before=page.next)
        assert max(row.sequence for row in older.rows) < min(row.sequence for row in page.rows)
        assert {row.kind for row in (await it.events(kinds=("update",), limit=500)).rows} == {"update"}


def test_an_update_without_roll_outs_says_nothing_of_success() -> None:
    update = {"update": 3, "version": 3, "success_rate": 0.5}
    assert sentence("update", update) == "update 3 made version 3; recent success 0.5"
    assert sentence("update", update | {"success_rate": None}) == "update 3 made version 3"


async def test_events_are_found_by_the_words_that_are_seen(run: RunDirectory) -> None:
    """Which are a sentence, and not the data that it is made of."""
    for number in range(9100, 9130):
        event(run, number, "update", json.dumps({"update": number, "version": number - 9000, "success_rate": 0.5}))
        event(run, number + 100, "sync", json.dumps({"replica": "made", "version": 120, "seconds": 1.0}))
    async with opened(run) as it:
        found = await it.events(text="Made version 12", limit=3)
        assert [row.sequence for row in found.rows] == [9129, 9128, 9127] and found.next
        older = await it.events(text="Made version 12", limit=300, before=found.next)
        assert [row.sequence for row in older.rows] == [9126, 9125, 9124, 9123, 9122, 9121, 9120]
        assert all("made version 12" in row.text for row in (*found.rows, *older.rows))
        assert len((await it.events(text="made took version 120 in 1 s", limit=500)).rows) == 30
        assert not (await it.events(text="made took version 12 in")).rows
