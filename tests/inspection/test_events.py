"""What the events page says of an event."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from dart.inspection.events import sentence


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("evaluation", {"label": "eval", "mean": 0.5, "low": 0.25, "high": 0.75, "episodes": 8},
         "held-out success 0.5 (0.25 to 0.75) in 8 episodes: eval"),
        ("stalled", {"waits": "update 4", "waits_for": "the trainer", "culprit": "train", "failure": ""},
         "update 4 waits for the trainer: train"),
        ("stalled", {"waits": "update 4", "waits_for": "the trainer", "culprit": "", "failure": "no answer"},
         "update 4 waits for the trainer: no answer"),
    ],
)  # fmt: skip
def test_an_event_is_a_whole_sentence_whatever_it_lacks(kind: str, data: dict[str, JsonValue], text: str) -> None:
    assert sentence(kind, data) == text
