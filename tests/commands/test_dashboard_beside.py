"""The dashboard that `dart train` starts: where it listens, who may look, and that it ends with its parent."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from dashboards.made import small_run

from dart.commands.running import JobRun, run_in_loop
from dart.config import Config, Dashboard, load
from dart.errors import UserError
from dart.job import Train
from dart.processes.beside import Beside, listen
from dart.rundir import RunDirectory

MINIWOB = Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml"
HANG_SECONDS = 120


def config(*overrides: str) -> Config:
    return load(MINIWOB, ("dashboard.port=0", *overrides))


def test_a_port_that_is_taken_is_another_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with listen(Dashboard(port=port)) as listening:
            assert listening.getsockname()[1] != port


def test_a_host_that_fails_is_named_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"dashboard.host is '192.0.2.1': .*: use an address of this machine"):
        listen(Dashboard(host="192.0.2.1"))
    with pytest.raises(UserError, match=r"dashboard.host is 'no.such.host.invalid'"):
        listen(Dashboard(host="no.such.host.invalid"))


def test_the_token_is_not_left_to_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DART_VIEW_TOKEN", "secret")
    beside = Beside.of(config(), tmp_path / "run")
    with beside.listening:
        assert beside.address.endswith("/runs/run?token=secret")
        kept = tmp_path / "run" / "secrets" / "dashboard"
        assert beside.told(to_terminal=True) == f"dashboard {beside.address} (with its token in {kept})"
        assert "secret" not in beside.told(to_terminal=False).partition("(")[0]
        assert kept.read_text() == f"{beside.address}\n" and stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert "DART_VIEW_TOKEN" not in os.environ
        child = beside.child()
        assert child.environment == {"DART_VIEW_TOKEN": "secret"} and "secret" not in " ".join(child.command)


def test_a_run_that_somebody_else_works_on_keeps_the_address_of_its_dashboard(tmp_path: Path) -> None:
    asked: list[None] = []
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    wanted = JobRun(config(), directory, Train(), resume=True, beside=lambda: asked.append(None))
    with directory.lock(), pytest.raises(UserError, match="is in use by"):
        run_in_loop(wanted)
    assert not asked


def test_where_control_needs_a_token_so_do_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTROL", "lever")
    beside = Beside.of(config("server.tokens={control: env:CONTROL}"), tmp_path / "run")
    with beside.listening:
        assert beside.token and beside.token != "lever"
        assert beside.child().environment == {"DART_VIEW_TOKEN": beside.token, "DART_TOKEN": "lever"}


def test_its_process_serves_the_run_and_ends_with_its_parent(tmp_path: Path) -> None:
    run = small_run(tmp_path / "runs")
    beside = Beside.of(config(), run.path)
    address, child = beside.address, beside.child()
    with beside.listening:
        process = subprocess.Popen(
            child.command, stdin=subprocess.PIPE, pass_fds=child.descriptors, env={**os.environ, **child.environment}
        )
    try:
        with urllib.request.urlopen(address.replace("/runs/", "/api/runs/"), timeout=HANG_SECONDS) as answer:
            assert answer.status == 200
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(HANG_SECONDS) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=HANG_SECONDS)
