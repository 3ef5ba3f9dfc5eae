"""Local workers that end by themselves: restarted, and given up when they never last."""

import sys
from pathlib import Path

import pytest

from dart import launcher
from dart.errors import UserError
from dart.launcher import Child, Launcher

COUNT = """
import sys
from pathlib import Path
runs = Path(sys.argv[1])
runs.write_text(runs.read_text() + "." if runs.exists() else ".")
print("it broke")
sys.exit(0 if len(runs.read_text()) == int(sys.argv[2]) else int(sys.argv[3]))
"""


def _child(folder: Path, good_run: int, code: int = 1, restart: bool = True) -> Child:
    """Ends with `code` until its run number `good_run`."""
    return Child("env-0", [sys.executable, "-c", COUNT, str(folder / "runs"), str(good_run), str(code)], {}, restart)


def _runs(folder: Path) -> int:
    return len((folder / "runs").read_text())


async def test_a_worker_that_ends_is_started_again(tmp_path: Path) -> None:
    await Launcher([_child(tmp_path, 3)], tmp_path / "logs").run()
    assert _runs(tmp_path) == 3
    assert (tmp_path / "logs" / "env-0.log").read_text().count("ended with code 1: it broke") == 2


async def test_one_that_ends_again_and_again_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="env-0 ended 4 times in a row; the last time it ended with code 1: it broke"):
        await Launcher([_child(tmp_path, 9)], tmp_path / "logs").run()
    assert _runs(tmp_path) == 4


async def test_restarts_count_anew_after_one_that_lasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LASTING_SECONDS", 0.0)
    await Launcher([_child(tmp_path, 7)], tmp_path / "logs").run()
    assert _runs(tmp_path) == 7


async def test_wrong_input_and_a_lost_trainer_end_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^it broke$"):
        await Launcher([_child(tmp_path, 9, code=2)], tmp_path / "logs").run()
    with pytest.raises(UserError, match="then go on with --resume"):
        await Launcher([_child(tmp_path, 9, restart=False)], tmp_path / "logs").run()
    assert _runs(tmp_path) == 2
