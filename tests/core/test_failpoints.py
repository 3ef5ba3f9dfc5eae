"""`dart.failpoints`: which visit of which process has which fault."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dart import failpoints
from dart.commands.worker import ROLES
from dart.errors import USER_ERROR, UserError
from dart.failpoints import VARIABLE, armed, failpoint


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


@pytest.mark.parametrize(
    "text",
    [
        "here=fial:ENOSPC", "here=fail:ENOTHING", "here=fail", "here=delay:soon", "here=delay:nan", "here=delay:-1",
        "here:x", "here:0", "here:3-x", "envs/here", "screenshot write",
    ],
)  # fmt: skip
def test_what_arms_nothing_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"DART_FAILPOINT: {text!r} is not [ROLE/]NAME")):
        armed(text)


def test_every_role_names_the_variable_that_is_wrong(tmp_path: Path) -> None:
    """Not as a traceback, and with the code by which it is not started again."""
    config = Path(__file__).parents[2] / "configs" / "ladder_cpu.yaml"
    worker = ["worker", "--coordinator", "127.0.0.1:1", "--role"]
    commands = [*([*worker, role] for role in ROLES), ["coordinator", str(config), "--run", str(tmp_path / "run")]]
    environment = {**os.environ, VARIABLE: "here=fial:ENOSPC"}
    for command in commands:
        ended = subprocess.run(
            [sys.executable, "-m", "dart", *command], env=environment, stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr.count("\n")) == (USER_ERROR, 1), ended.stderr
        assert ended.stderr.startswith("error: environment variable DART_FAILPOINT: 'here=fial:ENOSPC' is not")
    assert not (tmp_path / "run").exists(), "nothing was begun"
