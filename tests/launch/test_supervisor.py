"""One real process under its supervisor: its output, its end, its secrets. No Ray."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from dart.launch import supervisor as supervisor_module
from dart.launch.restarts import End
from dart.launch.supervisor import FILES, Order, Supervisor, _Said
from dart.rundir import RunDirectory

HANG_SECONDS = 240
SETTINGS = {
    "model": {"path": "builtin:tiny-qwen3vl"},
    "environment": {"tasks": {"names": ["click-test"]}, "slots": 1},
    "stop": {"updates": 1},
    "evaluation": {"episodes": 0},
    "dashboard": {"port": 0},
}
Running = tuple[Supervisor, RunDirectory, Order]


@pytest.fixture
def coordinator(tmp_path: Path) -> Running:
    supervisor = Supervisor()
    run, problem = supervisor.directory(None, str(tmp_path), "run")
    assert not problem
    words = ("coordinator", f"{FILES}/config.yaml", "--run", run, "--host", "127.0.0.1", "--quiet")
    order = Order("coordinator", words, run, str(tmp_path), 1 << 20, files={"config.yaml": yaml.safe_dump(SETTINGS)})
    return supervisor, RunDirectory(Path(run)), order


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_a_coordinator_is_watched_told_of_and_stopped(
    coordinator: Running, threads: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor, run, order = coordinator
    listens = threads.submit(supervisor.listening, 1, str(run.path))  # also when it is asked first
    ended: Future[End] = threads.submit(supervisor.run, 1, order)
    told = listens.result(HANG_SECONDS)
    assert told is not None and told.address == run.address.read_text()
    assert told.tokens["env"] == (run.secrets / "env.token").read_text()
    supervisor.stop(1, HANG_SECONDS)
    assert ended.result(HANG_SECONDS).code == 130
    shown = capfd.readouterr().out
    assert "coordinator listens on" in shown and "coordinator listens on" in (run.logs / "coordinator.log").read_text()
    dashboard = run.secrets / "dashboard"
    token = dashboard.read_text().strip().rpartition("token=")[2]
    assert stat.S_IMODE(dashboard.stat().st_mode) == 0o600
    for secret in (token, *told.tokens.values()):
        assert len(secret) > 20 and secret not in shown
        assert all(secret not in log.read_text() for log in run.logs.iterdir())


def test_a_second_start_is_told_apart_from_the_first(coordinator: Running, threads: ThreadPoolExecutor) -> None:
    supervisor, run, order = coordinator
    for number in (1, 2):
        ended = threads.submit(supervisor.run, number, order)
        listens = threads.submit(supervisor.listening, number, str(run.path)).result(HANG_SECONDS)
        assert listens is not None and not ended.done()
        supervisor.stop(number, HANG_SECONDS)
        assert ended.result(HANG_SECONDS).code == 130


def test_wrong_input_is_told_in_its_own_words(coordinator: Running, threads: ThreadPoolExecutor) -> None:
    supervisor, run, order = coordinator
    wrong = Order("env-0", ("worker", "--role", "env"), str(run.path), order.folder, 1 << 20)
    listens = threads.submit(supervisor.listening, 1, str(run.path))
    end = supervisor.run(1, wrong)
    assert end.code == 2 and end.said.startswith("name either the coordinator with --coordinator")
    assert listens.result(HANG_SECONDS) is None


def test_a_machine_that_cannot_start_a_process_says_why(
    coordinator: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, run, order = coordinator
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    end = supervisor.run(1, order)
    assert end.code is None and "it cannot be started there: [Errno 2]" in str(end)
    assert supervisor.listening(1, str(run.path)) is None


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run, problem = Supervisor().directory(str(tmp_path / "file" / "run"), "", "")
    assert not run and "choose a writable folder" in problem


def test_the_coordinator_ends_when_its_supervisor_is_killed(coordinator: Running, tmp_path: Path) -> None:
    _, run, order = coordinator
    code = (
        "import sys; from pathlib import Path; from dart.launch.supervisor import Order, Supervisor;"
        f"Supervisor().run(1, Order('coordinator', {order.words!r}, {order.run!r}, {order.folder!r}, 1 << 20,"
        f" files={dict(order.files)!r}))"
    )
    actor = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(run.address.is_file)
        assert is_locked(run)
    finally:
        os.kill(actor.pid, 9)
        actor.wait()
    wait_until(lambda: not is_locked(run))


def is_locked(run: RunDirectory) -> bool:
    from dart.store.lock import is_held

    return is_held(run.lock_file)


def wait_until(happened: object) -> None:
    assert callable(happened)
    until = time.monotonic() + HANG_SECONDS
    while not happened():
        assert time.monotonic() < until
        threading.Event().wait(0.1)


def test_a_node_whose_disk_is_full_still_reads_what_its_process_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        said = _Said(Order("env-0", (), str(tmp_path), str(tmp_path), 1 << 20))
        for printed, last in (
            ("one; echo two", "two"),
            ("'error: no disk; continue with'; echo dart train", "no disk"),
        ):
            with subprocess.Popen(["sh", "-c", f"echo {printed}"], stdout=subprocess.PIPE, text=True) as process:
                said.read(process)
            assert said.last.startswith(last)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


LEAVES = """
import subprocess, sys
from pathlib import Path
left = "import signal, sys, time; from pathlib import Path; there = Path(sys.argv[1]);" \
    "signal.signal(signal.SIGTERM, lambda *_: (there.write_text('cleaned up'), sys.exit()));" \
    "there.write_text('works'); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", left, sys.argv[1]])
while not Path(sys.argv[1]).exists() or Path(sys.argv[1]).read_text() != "works":
    pass
sys.exit(7)
"""


def test_what_outlives_its_process_may_clean_up_and_the_runs_checkpoints_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's rings in shared memory stay there if it is killed together with what would remove them."""
    there = tmp_path / "there"
    for name in ("v000002", "v000004", ".v000006.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)

    def started(order: Order, folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LEAVES, str(there)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    monkeypatch.setattr(supervisor_module, "_started", started)
    end = Supervisor().run(1, Order("rollout-0", (), str(tmp_path), str(tmp_path), 1 << 20))
    assert (end.code, end.checkpoints) == (7, {"v000002", "v000004"})
    assert there.read_text() == "cleaned up"
