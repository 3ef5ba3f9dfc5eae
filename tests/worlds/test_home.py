"""A container's user may have neither a name nor a home folder."""

from __future__ import annotations

import getpass
import os
import pwd
from pathlib import Path

import pytest
from click.testing import CliRunner

from dart.cli import main
from dart.errors import UserError
from dart.processes.settings import name_user
from dart.worlds.missing import at_home

OSWORLD = Path(__file__).parents[2] / "configs" / "osworld_uitars15_7b.yaml"


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)


def test_a_user_without_a_name_is_given_one(nobody: None) -> None:
    name_user(os.environ)
    assert getpass.getuser() == f"user-{os.getuid()}"


def test_a_user_with_a_name_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    name_user(os.environ)
    assert os.environ["USER"] == "ada"


def test_a_folder_at_a_home_that_nobody_knows_is_a_users_error(nobody: None) -> None:
    assert at_home(Path("/srv/tasks")) == Path("/srv/tasks")
    with pytest.raises(UserError, match=r"^~/tasks: the home folder of this user is not known: set HOME"):
        at_home(Path("~/tasks"))


def test_doctor_says_that_the_home_folder_is_not_known(nobody: None) -> None:
    done = CliRunner().invoke(main, ["doctor", str(OSWORLD)])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert "missing  osworld evaluators: ~/.cache/dart/osworld-evaluators: the home folder" in done.output
