"""How workers that break rules are put in quarantine, and let back."""

from __future__ import annotations

from dart.core.fleet.conduct import (
    FIRST_SECONDS,
    FORGIVEN_SECONDS,
    MOST_NAMES,
    MOST_SECONDS,
    PROBES,
    STRIKES,
    Conduct,
    Quarantine,
    Standing,
)  # fmt: skip


def struck(conduct: Conduct, times: int, now: float) -> Quarantine | None:
    last = None
    for _ in range(times):
        last = conduct.broke("env-1", "Observed.reward is nan", now)
    return last


def let_back(conduct: Conduct, now: float) -> None:
    for probe in range(PROBES):
        assert conduct.standing("env-1", now) is Standing.PROBATION
        assert conduct.may_work("env-1", now) and not conduct.may_work("env-1", now), "one piece of work at a time"
        assert conduct.ended("env-1", well=True) is (probe == PROBES - 1)


def test_a_worker_is_quarantined_when_it_keeps_breaking_rules() -> None:
    conduct = Conduct()
    assert struck(conduct, STRIKES - 1, 100.0) is None and conduct.may_work("env-1", 100.0)
    assert struck(conduct, 1, 100.0) == Quarantine(FIRST_SECONDS, STRIKES, "Observed.reward is nan")
    assert conduct.standing("env-1", 101.0) is Standing.QUARANTINED and not conduct.may_work("env-1", 101.0)
    assert conduct.may_work("env-2", 101.0), "another worker is not concerned"
    assert conduct.seconds_left("env-1", 104.0) == FIRST_SECONDS - 4


def test_strikes_are_forgiven_with_time() -> None:
    conduct = Conduct()
    for number in range(50):
        assert conduct.broke("env-1", "x", number * FORGIVEN_SECONDS) is None
    assert conduct.told("env-1", 50 * FORGIVEN_SECONDS) == "broke a rule 50 times, the last: x"


def test_probes_let_a_worker_back_and_its_next_quarantine_is_the_first_again() -> None:
    conduct = Conduct()
    struck(conduct, STRIKES, 0.0)
    let_back(conduct, FIRST_SECONDS)
    assert conduct.standing("env-1", FIRST_SECONDS) is Standing.GOOD
    again = struck(conduct, STRIKES, 1000.0)
    assert again is not None and again.seconds == FIRST_SECONDS


def test_a_strike_on_probation_doubles_the_quarantine_up_to_a_bound() -> None:
    conduct, now, seconds = Conduct(), 0.0, []
    struck(conduct, STRIKES - 1, now)
    for _ in range(12):
        quarantine = struck(conduct, 1, now)
        assert quarantine is not None
        seconds.append(quarantine.seconds)
        now += quarantine.seconds
        assert conduct.may_work("env-1", now)
    assert seconds[:4] == [FIRST_SECONDS * 2**power for power in range(4)]
    assert seconds[-1] == MOST_SECONDS


def test_what_it_had_before_does_not_make_a_quarantine_longer() -> None:
    conduct = Conduct()
    struck(conduct, STRIKES, 0.0)
    assert struck(conduct, 100, 1.0) is None
    assert conduct.seconds_left("env-1", 1.0) == FIRST_SECONDS - 1


def test_a_failed_probe_is_not_counted_and_the_next_may_begin() -> None:
    conduct = Conduct()
    struck(conduct, STRIKES, 0.0)
    assert conduct.may_work("env-1", 20.0)
    assert not conduct.ended("env-1", well=False)
    let_back(conduct, 20.0)


def test_what_is_told_names_the_last_broken_rule() -> None:
    conduct = Conduct()
    assert conduct.told("env-1", 0.0) == ""
    struck(conduct, 1, 0.0)
    assert conduct.told("env-1", 0.0) == "broke a rule once, the last: Observed.reward is nan"
    struck(conduct, 2, 0.0)
    assert conduct.told("env-1", 3.0).startswith("quarantined for 7 s more: broke a rule 3 times, the last: ")
    assert conduct.told("env-1", 99.0).startswith("on probation: ")


def test_made_up_names_do_not_fill_the_memory() -> None:
    conduct = Conduct()
    for number in range(2 * MOST_NAMES):
        conduct.broke(f"made-up-{number}", "x", 0.0)
    assert len(conduct._records) == MOST_NAMES
