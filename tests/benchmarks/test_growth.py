"""The benchmark of memory over days sees what grows, and what only fills up."""

from __future__ import annotations

import logging
import random

from benchmarks.endurance.growth import Growth, grew, grow
from benchmarks.endurance.soak import Series


def _series(slope_per_hour: float, hours: float = 48.0, first: float = 100.0) -> Series:
    chance, made = random.Random(0), Series()
    for number in range(96):
        at = hours * number / 96
        made.add(at, first + slope_per_hour * at + chance.uniform(-1.0, 1.0))
    return made


def test_a_leak_is_seen_and_noise_is_not() -> None:
    assert grew(_series(0.2))
    assert not grew(_series(0.0))
    assert not grew(_series(-0.2))


def test_a_cache_that_fills_in_the_first_quarter_is_no_leak() -> None:
    filling = _series(0.0)
    for number in range(24):
        filling.values[number] -= 24 - number
    assert not grew(filling)


def test_what_a_process_keeps_is_counted_by_type() -> None:
    class Kept:
        pass

    growth, kept = Growth(), []
    for number in range(8):
        kept += [Kept() for _ in range(1000)]
        growth.read(number, 8, float(number))
    (name, ratio), *_ = growth.most_grown().items()
    assert name.endswith("Kept") and ratio == round(7500 / 3500, 3)
    assert growth.blocks.values[-1] - growth.blocks.values[0] > 6.5, "some seven thousand blocks"


def test_the_real_coordinator_is_read() -> None:
    logging.disable(logging.CRITICAL)
    growth = grow(0.2, environments=8, replicas=1, readings=8)
    assert len(growth.blocks.at) == len(growth.malloc.at) == 8
    assert growth.trajectories > 0
    assert any(name.startswith("dart.") for name in growth.late)


def test_reading_keeps_nothing_that_the_next_reading_counts() -> None:
    growth = Growth()
    for number in range(40):
        growth.read(number, 40, float(number))
    # Two sums may be kept of each type, but nothing of each type and reading.
    assert 1000 * (growth.blocks.values[39] - growth.blocks.values[20]) < 4 * len(growth.late) + 500
