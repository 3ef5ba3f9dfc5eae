"""Statistics over runs, against values from elsewhere: R 4 and textbooks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.trials import inference
from benchmarks.trials.inference import compare, estimate, holm, smallest_detectable


def test_an_interval_of_student() -> None:
    # R: t.test(c(65, 70, 63, 66, 61)) gives 65 with 60.8 to 69.2.
    found = estimate([65.0, 70.0, 63.0, 66.0, 61.0])
    assert found.mean == 65.0 and found.n == 5
    assert (found.low, found.high) == (pytest.approx(60.7884, abs=1e-3), pytest.approx(69.2116, abs=1e-3))


def test_three_runs_get_the_wide_interval_that_they_deserve() -> None:
    found = estimate([0.0, 1.0, 2.0])
    assert found.half_width == pytest.approx(4.30265 / 3**0.5, rel=1e-5)


def test_one_run_has_no_interval() -> None:
    assert estimate([0.5]).low is None
    with pytest.raises(ValueError, match="no run"):
        estimate([])


def test_95_of_100_intervals_hold_the_mean() -> None:
    chance = random.Random(0)
    held = 0
    for _ in range(500):
        found = estimate([chance.gauss(3.0, 2.0) for _ in range(5)])
        assert found.low is not None and found.high is not None
        held += found.low <= 3.0 <= found.high
    assert held / 500 == pytest.approx(0.95, abs=0.03)


def test_students_sleep_data() -> None:
    """The paired t-test's first data set: R's t.test(extra ~ group, sleep, paired = TRUE), p = 0.002833."""
    one = dict(enumerate([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]))
    other = dict(enumerate([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]))
    found = compare(other, one)
    assert found is not None
    assert found.difference.mean == pytest.approx(1.58)
    assert found.difference.low == pytest.approx(0.7001142, abs=1e-6)
    assert found.difference.high == pytest.approx(2.4598858, abs=1e-6)
    assert found.p == pytest.approx(0.00283289, abs=1e-7)
    # R's t.test(extra ~ group, sleep), p = 0.07939
    assert found.p_unpaired == pytest.approx(0.07939414, abs=1e-7)


def test_only_seeds_that_both_have_are_paired() -> None:
    found = compare({0: 0.5, 1: 0.6, 2: 0.9}, {1: 0.4, 2: 0.6, 3: 0.0})
    assert found is not None and found.difference.n == 2
    assert found.difference.mean == pytest.approx(0.25)
    assert compare({0: 1.0}, {1: 1.0}) is None
    single = compare({0: 1.0}, {0: 0.5})
    assert single is not None and single.p is None


def test_what_pairs_runs_is_said_as_it_is() -> None:
    """A resumed run takes tasks in another order (dart.coordinator.sampling.data), so the order is not shared."""
    learning = Path("docs/learning.md").read_text(encoding="utf-8")
    for text in (inference.__doc__ or "", learning):
        words = " ".join(text.split()).lower()
        assert "two paired runs share only the order of their tasks, and only until the first restart" in words


def test_differences_without_spread() -> None:
    same, shifted = compare({0: 0.5, 1: 0.25}, {0: 0.5, 1: 0.25}), compare({0: 1.0, 1: 0.75}, {0: 0.5, 1: 0.25})
    assert same is not None and same.p == 1.0
    assert shifted is not None and shifted.p == 0.0
    level = compare(dict.fromkeys(range(3), 0.5), dict.fromkeys(range(3), 0.25))
    assert level is not None and level.p_unpaired == 0.0


def test_holm() -> None:
    # R: p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.05), "holm")
    assert holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    # Out of order, and never above 1: p.adjust(c(0.6, 0.001, 0.5), "holm")
    assert holm([0.6, 0.001, 0.5]) == pytest.approx([1.0, 0.003, 1.0])
    assert holm([]) == []


@pytest.mark.parametrize(("n", "effect"), [(198.15, 0.2), (33.36713, 0.5), (14.30276, 0.8)])
def test_smallest_detectable_effect(n: float, effect: float) -> None:
    """R's pwr.t.test(d, power = 0.8, type = "paired") gives these n, which are no whole numbers."""
    assert smallest_detectable(1.0, n) == pytest.approx(effect, rel=1e-4)  # type: ignore[arg-type]


def test_what_can_be_detected_grows_with_spread_and_family() -> None:
    assert smallest_detectable(2.0, 5) == pytest.approx(2 * smallest_detectable(1.0, 5))
    assert smallest_detectable(1.0, 5, family=8) > smallest_detectable(1.0, 5, family=4) > smallest_detectable(1.0, 5)
    assert smallest_detectable(0.0, 5) == 0.0
    with pytest.raises(ValueError, match="two at least"):
        smallest_detectable(1.0, 1)


def test_it_is_detected_as_often_as_promised() -> None:
    chance = random.Random(1)
    effect = smallest_detectable(1.0, 5)
    found = 0
    for _ in range(500):
        result = compare({seed: chance.gauss(effect, 1.0) for seed in range(5)}, dict.fromkeys(range(5), 0.0))
        assert result is not None and result.p is not None
        found += result.p <= 0.05
    assert found / 500 == pytest.approx(0.8, abs=0.05)
