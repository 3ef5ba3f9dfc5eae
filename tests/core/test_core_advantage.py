"""What a group's rewards become."""

from __future__ import annotations

import pytest

from dart.core.curation.advantage import overlong_penalty


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    # L_max 512, L_cache 128, so it starts at 384: (384 - 416) / 128 = -0.25, (384 - 480) / 128 = -0.75.
    [(1, 0.0), (384, 0.0), (416, -0.25), (480, -0.75), (512, -1.0), (513, -1.0), (10_000, -1.0)],
)
def test_overlong_responses_are_punished_softly(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, 512, 128) == penalty


def test_without_a_buffer_only_what_is_beyond_the_limit_is_punished() -> None:
    assert [overlong_penalty(tokens, 512, 0) for tokens in (511, 512, 513)] == [0.0, 0.0, -1.0]


def test_the_buffer_may_be_the_whole_limit() -> None:
    assert [overlong_penalty(tokens, 4, 4) for tokens in (0, 1, 4)] == [0.0, -0.25, -1.0]


@pytest.mark.parametrize("buffer", [-1, 513])
def test_a_buffer_that_is_no_part_of_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="from 0 to the limit, 512"):
        overlong_penalty(1, 512, buffer)
