"""`dart worker --run`: what it takes from the run's directory, and what from its user."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dart.cli import main
from dart.commands.worker import _dial_of_run
from dart.errors import UserError
from dart.processes.secrets import AUTHORITY, token_file
from dart.rundir import RunDirectory
from dart.wire.channel import TOKEN_ENVIRONMENT, _authority


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.secrets.mkdir()
    run.tell_address("127.0.0.1:50051")
    return run


def test_the_users_token_comes_first_and_needs_no_files(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENVIRONMENT, "mine")
    dial = _dial_of_run("env", run.path, (None, None, None))
    assert (dial.token, dial.tls_ca) == ("mine", None)


def test_otherwise_the_runs_own_are_used(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENVIRONMENT, raising=False)
    token_file(run.secrets, "env").write_text("theirs")
    (run.secrets / AUTHORITY).write_text("authority")
    dial = _dial_of_run("env", run.path, (None, None, None))
    assert (dial.token, dial.tls_ca) == ("theirs", run.secrets / AUTHORITY)


def test_a_finished_run_needs_no_worker(run: RunDirectory) -> None:
    run.summary.write_text("{}")
    result = CliRunner().invoke(main, ["worker", "--role", "env", "--run", str(run.path)])
    assert result.exit_code == 0 and "is finished" in result.output


def test_an_authority_that_was_read_once_outlives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    with pytest.raises(UserError, match="--tls-ca"):
        _authority(file)
    for content in (b"first", b"renewed"):
        file.write_bytes(content)
        assert _authority(file) == content
    file.unlink()
    assert _authority(file) == b"renewed"
