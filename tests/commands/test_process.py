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
