"""`dart.failpoints`: which visit of which process has which fault."""

from __future__ import annotations

import errno
import time

import pytest

from dart import failpoints
from dart.failpoints import armed, failpoint


def outcomes(name: str, visits: int) -> list[int]:
    """The errno of each visit, 0 where nothing happened."""
    found = []
    for _ in range(visits):
        try:
            failpoint(name)
        except OSError as error:
            found.append(error.errno)
        else:
            found.append(0)
    return found


FULL = errno.ENOSPC


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", [0, 0, 0, 0]),
        ("here=fail:ENOSPC", [FULL, 0, 0, 0]),
        ("here:3=fail:ENOSPC", [0, 0, FULL, 0]),
        ("here:2-3=fail:ENOSPC", [0, FULL, FULL, 0]),
        ("here:2-=fail:ENOSPC", [0, FULL, FULL, FULL]),
        ("there:1-=fail:ENOSPC", [0, 0, 0, 0]),
        ("env/here:1-=fail:ENOSPC", [0, 0, 0, 0]),
        ("coordinator/here:1-=fail:ENOSPC", [FULL, FULL, FULL, FULL]),
        ("here:1=fail:ENOSPC,here:4=fail:EMFILE", [FULL, 0, 0, errno.EMFILE]),
    ],
)
def test_only_the_named_visits_fail(text: str, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_all", armed(text))
    assert outcomes("here", 4) == seen


def test_a_worker_has_the_faults_of_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_all", armed("env/here:1-=fail:ENOSPC"))
    monkeypatch.setattr(failpoints, "role", "env")
    assert outcomes("here", 2) == [FULL, FULL]


def test_a_delay_takes_at_least_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_all", armed("here=delay:0.05"))
    began = time.monotonic()
    failpoint("here")
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("text", ["here=fial:ENOSPC", "here=fail:ENOTHING", "here=delay:soon", "here:x", "here=fail"])
def test_what_arms_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        armed(text)
