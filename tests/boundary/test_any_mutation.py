"""For every mutation of every reply and of Ready, the run goes on and no other worker's work changes."""

from __future__ import annotations

import logging

import pytest

from benchmarks.simulation.fuzzing import fuzz

MUTATIONS, PER_RUN = 2000, 400
SLOW_SECONDS = 1.0


def test_whatever_a_worker_says_only_that_worker_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Seeded: what fails here fails again with `python -m benchmarks.fuzz --mutations 1 --seed SEED`."""
    caplog.set_level(logging.CRITICAL)
    mutations = seed = violations = 0
    fields: set[str] = set()
    while mutations < MUTATIONS:
        seen = fuzz(seed, PER_RUN)
        assert not seen.wrong, f"seed {seed}: {seen.wrong}"
        assert not seen.ended
        assert seen.longest_hold < SLOW_SECONDS
        mutations, violations, seed = mutations + seen.mutations, violations + seen.violations, seed + 1
        fields |= set(seen.fields)
    assert violations > MUTATIONS / 10, "most nonsense is noticed"
    assert len(fields) > 30
