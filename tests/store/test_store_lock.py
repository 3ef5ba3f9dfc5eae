"""One process at a time works on a run's directory."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from dart.cli import main
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store import lock
from dart.store.database import Database, sqlite_url
from dart.store.lock import held, is_held

HOLDER = """
import sys
from pathlib import Path
from dart.store.lock import held
with held(Path(sys.argv[1]) / "run.lock"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_run_that_another_process_works_on_is_refused_and_named(tmp_path: Path, holder: subprocess.Popen[str]):
    assert is_held(tmp_path / "run.lock")
    with (
        pytest.raises(UserError, match=f"in use by process {holder.pid} of .*: stop it first"),
        held(tmp_path / "run.lock"),
    ):
        pass


def test_a_killed_process_holds_nothing(tmp_path: Path, holder: subprocess.Popen[str]):
    holder.kill()
    holder.wait()
    assert not is_held(tmp_path / "run.lock")
    with held(tmp_path / "run.lock"):
        assert is_held(tmp_path / "run.lock")


def test_a_run_says_that_it_runs_as_long_as_its_process_lives(tmp_path: Path, holder: subprocess.Popen[str]):
    record = asyncio.run(_began(tmp_path))
    demo = str(Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml")
    resume = ["coordinator", demo, "--resume", str(tmp_path), "--quiet"]
    assert RunDirectory(tmp_path).state(record) == "running"
    refused = CliRunner().invoke(main, resume)
    assert refused.exit_code == 2
    assert "stop it first" in refused.output
    holder.kill()
    holder.wait()
    assert RunDirectory(tmp_path).state(record) == "interrupted"


HOLDS_ELSEWHERE = HOLDER.replace(
    "    print(",
    """    Path(sys.argv[1], "run.lock").write_text("process 7 of gone\\nanother")
    print(""",
)


def test_a_machine_that_is_gone_may_keep_its_lock_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until its file server has noticed."""
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 0.2)
    command = [sys.executable, "-c", HOLDS_ELSEWHERE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        released = threading.Timer(1.5, process.kill)
        released.start()
        with held(tmp_path / "run.lock") as hold:
            assert "in use by process 7 of gone: waiting up to 120 s" in caplog.text
            assert not hold.renew()
        released.join()


def test_a_machine_that_is_there_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 0.1)
    command = [sys.executable, "-c", HOLDS_ELSEWHERE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match="in use by process 7 of gone: stop it first"),
            held(tmp_path / "run.lock", 0.5),
        ):
            pass
        process.kill()


async def _began(directory: Path):
    async with await Database.open(sqlite_url(directory / "run.db"), directory / "blobs") as database:
        await database.start_run(directory.name, "r", {}, started=1.0)
        return await database.run()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path):
    with (
        pytest.raises(UserError, match=r"run\.lock cannot be written .*: make the folder writable"),
        held(tmp_path / "none" / "run.lock"),
    ):
        pass


def test_looking_takes_nothing_and_leaves_nothing(tmp_path: Path):
    assert not is_held(tmp_path / "run.lock")
    assert not list(tmp_path.iterdir())
    with held(tmp_path / "run.lock"):
        pass
    assert not is_held(tmp_path / "run.lock")
    with held(tmp_path / "run.lock"):
        pass


def test_a_lock_file_that_is_removed_lets_nobody_in(tmp_path: Path, holder: subprocess.Popen[str]):
    file = tmp_path / "run.lock"
    file.unlink()
    assert is_held(file)
    with pytest.raises(UserError, match="is in use by another process: stop it first"), held(file):
        pass
    assert is_held(file)


def test_a_lock_file_that_is_removed_is_made_again(tmp_path: Path):
    file = tmp_path / "run.lock"
    with held(file) as hold:
        assert not hold.renew()
        file.unlink()
        assert hold.renew()
        assert "process" in file.read_text()
        assert not hold.renew()
        assert is_held(file)
