"""What the storm counts as wrong, and the failpoints that it arms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.endurance.storm import FAILPOINTS, too_low
from dart.failpoints import armed
from dart.v1 import session_pb2 as pb

DART = Path(__file__).parents[2] / "dart"


@pytest.mark.parametrize(
    ("faulted", "calm", "wrong"),
    [
        ((6000, 0.92), (6000, 0.92), False),
        ((6000, 0.95), (6000, 0.92), False),
        ((6000, 0.89), (6000, 0.92), False),
        ((6000, 0.86), (6000, 0.92), True),
        ((6000, 0.875), (6000, 0.92), True),  # 4.5 points, but the interval reaches beyond 5
        ((30, 0.92), (30, 0.92), True),  # so few say nothing
        ((0, 0.0), (0, 0.0), True),
    ],
)
def test_success_that_may_be_more_than_five_points_lower_is_wrong(
    faulted: tuple[int, float], calm: tuple[int, float], wrong: bool
) -> None:
    assert bool(too_low(faulted, calm, 5.0)[1]) == wrong


def test_the_storm_arms_only_failpoints_that_there_are() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in DART.rglob("*.py"))
    known = set(re.findall(r'failpoint\("([^"]+)"\)', code))
    replies = {f"before-{field.message_type.name}" for field in pb.SessionRequest.DESCRIPTOR.fields}
    for text in (text for one in FAILPOINTS.values() for text in one):
        (failpoint,) = armed(text)
        assert failpoint.name in known | replies
