"""Which signals end a process in order."""

import signal
import subprocess
import sys

import pytest

from dart.processes.settings import ending_signals


@pytest.mark.parametrize(("prefix", "ends"), [("", True), ("nohup", False)])
def test_a_terminal_that_closes_ends_a_run_but_not_under_nohup(prefix: str, ends: bool) -> None:
    code = "from dart.processes.settings import ending_signals; print(*(number.name for number in ending_signals()))"
    # This test may itself run under nohup, whose children inherit it.
    command = ["env", "--default-signal=HUP", *prefix.split(), sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("SIGHUP" in said) is ends
    assert {"SIGINT", "SIGTERM"} <= {number.name for number in ending_signals()} and "SIGINT" in said


def test_what_is_started_with_sigterm_ignored_does_not_heed_it() -> None:
    """As the trainer of a Slurm job, which a checkpoint still needs when every process gets the signal."""
    code = "from dart.processes.settings import ending_signals; print(*(number.name for number in ending_signals()))"
    asked = ["bash", "-c", 'trap "" TERM; exec "$@"', "bash", sys.executable, "-c", code]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    assert "SIGTERM" not in said and "SIGINT" in said


@pytest.mark.parametrize(("watches", "code"), [(["--parent-watch"], 128 + signal.SIGTERM), ([], 0)])
def test_a_worker_that_somebody_ends_says_so_to_whoever_started_it(watches: list[str], code: int) -> None:
    """A launcher starts it again then: without a supervisor it has done what it was asked to."""
    command = [sys.executable, "-m", "dart", "worker", "--role", "env", "--coordinator", "127.0.0.1:1", *watches]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        assert any("is not there yet" in line for line in worker.stderr), "it dials"
        worker.terminate()
        worker.communicate(timeout=60)
    assert worker.returncode == code
