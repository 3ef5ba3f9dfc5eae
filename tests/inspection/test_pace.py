"""Time left is judged by what has been seen of the phase."""

from __future__ import annotations

import pytest

from dart.core.status import Status
from dart.inspection.pace import WINDOW_SECONDS, Pace


def at(share: float, phase: str = "training") -> Status:
    return Status("run", phase, share_done=share)


def test_time_left_is_that_of_the_pace_so_far() -> None:
    pace = Pace()
    assert pace.left(at(0.2), 100.0) is None, "one look says nothing"
    assert pace.left(at(0.3), 101.0) is None, "too soon"
    assert pace.left(at(0.4), 110.0) == pytest.approx(30.0)
    assert pace.left(at(0.4), 120.0) == pytest.approx(60.0), "it stands still"
    assert pace.left(at(1.0), 130.0) is None


def test_another_phase_and_a_share_that_falls_begin_anew() -> None:
    pace = Pace()
    pace.left(at(0.0, "evaluating"), 0.0)
    assert pace.left(at(0.5, "evaluating"), 10.0) == pytest.approx(10.0)
    assert pace.left(at(0.6), 20.0) is None
    assert pace.left(at(0.7), 30.0) == pytest.approx(30.0)
    assert pace.left(at(0.1), 40.0) is None, "the next evaluation"


def test_an_old_pace_is_forgotten() -> None:
    pace = Pace()
    for second in range(3 * int(WINDOW_SECONDS)):
        left = pace.left(at(min(0.5, second / 100) + max(0, second - 600) / 10_000), float(second))
    assert left == pytest.approx((1 - 0.5 - 1199 / 10_000) * 10_000, rel=0.02)
