"""Places beside durable steps, where a test makes this process fail to see that nothing is lost or doubled.

They do nothing unless the environment variable DART_FAILPOINT names them, as `[ROLE/]NAME[:VISITS][=FAULT]`, several
with commas between them:

    group-closed                              the process is killed the first time that it gets there
    group-closed:3                            the third time
    screenshot-write:3-5=fail:ENOSPC          the third, fourth and fifth time it is an OSError: the disk is full
    env/screenshot-write:3-=delay:2.5         from the third time on it takes 2.5 s longer, in env workers alone

ROLE is coordinator, env, rollout or train; every worker has `before-Trained`, `before-WeightsSent` and so on, between
its work and that reply. A delay holds up the thread that gets there, and with it an event loop.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from dart.errors import UserError

VARIABLE = "DART_FAILPOINT"
role = "coordinator"
"""What this process is; a worker says so when it begins."""


@dataclass(frozen=True, slots=True)
class _Armed:
    role: str
    name: str
    first: int
    last: float
    fault: str
    """kill, fail or delay."""
    detail: str
    """The name of the errno, or the seconds."""
    visits: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def happen(self) -> None:
        match self.fault:
            case "fail":
                number = getattr(errno, self.detail)
                raise OSError(number, f"{os.strerror(number)} (failpoint {self.name})")
            case "delay":
                time.sleep(float(self.detail))
            case _:
                os.kill(os.getpid(), signal.SIGKILL)


_WRITTEN = re.compile(
    r"(?:(coordinator|env|rollout|train)/)?([A-Za-z-]+)(?::([1-9]\d*)(-[1-9]\d*|-)?)?"
    rf"(?:=(kill|fail:(?:{'|'.join(errno.errorcode.values())})|delay:\d+(?:\.\d+)?))?"
)


def armed(text: str) -> tuple[_Armed, ...]:
    """Raises UserError if it is not written as above: a test that arms nothing would prove nothing."""
    return tuple(_parsed(one) for one in text.split(",") if one)


def _parsed(one: str) -> _Armed:
    if (written := _WRITTEN.fullmatch(one)) is None:
        raise UserError(
            f"environment variable {VARIABLE}: {one!r} is not [ROLE/]NAME[:VISITS][=FAULT], for example "
            "env/screenshot-write:3-5=fail:ENOSPC: ROLE is coordinator, env, rollout or train, VISITS is 3, 3-5 or 3-, "
            "and FAULT is kill, fail:ENOSPC or another errno, or delay:2.5"
        )
    of, name, first, more, fault = written.groups(default="")
    kind, _, detail = (fault or "kill").partition(":")
    last = float(more[1:] or "inf") if more else int(first or "1")
    return _Armed(of, name, int(first or "1"), last, kind, detail)


_all = armed(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """Have the fault here, if one is due: the process ends without any clean-up, or OSError is raised, or it takes
    time."""
    reached = [one for one in _all if one.name == name and one.role in ("", role)]
    due = [one for one in reached if one.first <= next(one.visits) <= one.last]  # all count, before the first fault
    for one in due:
        one.happen()
