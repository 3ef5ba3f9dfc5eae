"""What a window of screenshots costs: the real prompts through the trainer's real rows."""

from __future__ import annotations

from dataclasses import asdict

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from benchmarks import report  # noqa: E402
from benchmarks.simulation import window  # noqa: E402


def test_dropping_three_screenshots_at_a_time_computes_most_tokens_once() -> None:
    by_stride = {one.stride: one for one in window.costs()}
    recorded = report.results("window")["windows"]
    assert recorded == [asdict(one) | {"shown": list(one.shown)} for one in by_stride.values()]
    sliding, blocks = by_stride[1], by_stride[3]
    assert sliding.shown == (5, 5) and blocks.shown == (3, 5)
    assert blocks.longest <= sliding.longest
    assert blocks.computed <= 150_000 and sliding.computed > 2.5 * blocks.computed
    assert blocks.cached > 0.6 and sliding.cached < 0.2
    assert all(one.straight == one.rows for one in by_stride.values()), "no row needs a mask"
    # Five steps until something is dropped, then three at a time, of which each has a row.
    assert (blocks.rows, blocks.encodings) == (1 + 9, 5 + 8 * 5 + 3)
