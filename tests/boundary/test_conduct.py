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

ENV = (1, "env-1")


def struck(conduct: Conduct, times: int, now: float) -> Quarantine | None:
    last = None
    for _ in range(times):
        last = conduct.broke(ENV, "Observed.reward is nan", now)
    return last


def let_back(conduct: Conduct, now: float) -> None:
    for probe in range(PROBES):
        assert conduct.standing(ENV, now) is Standing.PROBATION
        assert conduct.may_work(ENV, now) and not conduct.may_work(ENV, now), "one piece of work at a time"
        assert conduct.ended(ENV, well=True) is (probe == PROBES - 1)


def test_a_worker_is_quarantined_when_it_keeps_breaking_rules() -> None:
    conduct = Conduct()
    assert struck(conduct, STRIKES - 1, 100.0) is None and conduct.may_work(ENV, 100.0)
    assert struck(conduct, 1, 100.0) == Quarantine(FIRST_SECONDS, STRIKES, "Observed.reward is nan")
    assert conduct.standing(ENV, 101.0) is Standing.QUARANTINED and not conduct.may_work(ENV, 101.0)
    assert conduct.may_work((1, "env-2"), 101.0), "another worker is not concerned"
    assert conduct.seconds_left(ENV, 104.0) == FIRST_SECONDS - 4


def test_strikes_are_forgiven_with_time() -> None:
    conduct = Conduct()
    for number in range(50):
        assert conduct.broke(ENV, "x", number * FORGIVEN_SECONDS) is None
    assert conduct.told(ENV, 50 * FORGIVEN_SECONDS) == "broke a rule 50 times, the last: x"


def test_probes_let_a_worker_back_and_its_next_quarantine_is_the_first_again() -> None:
    conduct = Conduct()
    struck(conduct, STRIKES, 0.0)
    let_back(conduct, FIRST_SECONDS)
    assert conduct.standing(ENV, FIRST_SECONDS) is Standing.GOOD
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
        assert conduct.may_work(ENV, now)
    assert seconds[:4] == [FIRST_SECONDS * 2**power for power in range(4)]
    assert seconds[-1] == MOST_SECONDS


def test_what_it_had_before_does_not_make_a_quarantine_longer() -> None:
    conduct = Conduct()
    struck(conduct, STRIKES, 0.0)
    assert struck(conduct, 100, 1.0) is None
    assert conduct.seconds_left(ENV, 1.0) == FIRST_SECONDS - 1


def test_a_failed_probe_is_not_counted_and_the_next_may_begin() -> None:
    conduct = Conduct()
    struck(conduct, STRIKES, 0.0)
    assert conduct.may_work(ENV, 20.0)
    assert not conduct.ended(ENV, well=False)
    let_back(conduct, 20.0)


def test_what_is_told_names_the_last_broken_rule() -> None:
    conduct = Conduct()
    assert conduct.told(ENV, 0.0) == ""
    struck(conduct, 1, 0.0)
    assert conduct.told(ENV, 0.0) == "broke a rule once, the last: Observed.reward is nan"
    struck(conduct, 2, 0.0)
    assert conduct.told(ENV, 3.0).startswith("quarantined for 7 s more: broke a rule 3 times, the last: ")
    assert conduct.told(ENV, 99.0).startswith("on probation: ")


def test_made_up_names_do_not_fill_the_memory() -> None:
    conduct = Conduct()
    for number in range(2 * MOST_NAMES):
        conduct.broke((1, f"made-up-{number}"), "x", 0.0)
    assert len(conduct._records) == MOST_NAMES


def test_a_worker_of_another_role_and_the_same_name_is_another_worker() -> None:
    conduct = Conduct()
    assert conduct.spotless and struck(conduct, STRIKES, 0.0) is not None and not conduct.spotless
    assert conduct.may_work((2, "env-1"), 1.0) and conduct.seconds_left((2, "env-1"), 1.0) == 0.0


def test_a_replica_is_probed_by_the_answers_that_it_gives_anyway() -> None:
    conduct = Conduct()
    struck(conduct, STRIKES, 0.0)
    for _ in range(PROBES):
        conduct.answered_well(ENV, 1.0)
    assert conduct.standing(ENV, 2 * FIRST_SECONDS) is Standing.PROBATION, "answers during a quarantine prove nothing"
    for _ in range(PROBES):
        conduct.answered_well(ENV, 2 * FIRST_SECONDS)
    assert conduct.standing(ENV, 2 * FIRST_SECONDS) is Standing.GOOD
    conduct.answered_well((1, "env-9"), 0.0)
