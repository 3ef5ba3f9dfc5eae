"""Which signals end a process in order."""

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
