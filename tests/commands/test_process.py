"""Which signals end a process in order, when a run is resumed whose processes have failed, and what a worker reads."""

import ast
import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import uvloop
from click.testing import CliRunner

from dart import manifest
from dart.cli import main
from dart.commands import train
from dart.commands.running import JobRun
from dart.commands.worker import _dial_of_run, _load
from dart.config import load
from dart.errors import NOT_READY, ProcessLost, UserError
from dart.job import Train
from dart.processes import launcher
from dart.processes.launcher import Child, Launcher, local_children
from dart.processes.secrets import AUTHORITY, token_file
from dart.processes.settings import ending_signals, interruptible
from dart.rundir import RunDirectory
from dart.store.lock import Hold, is_held
from dart.wire.channel import TOKEN_ENVIRONMENT, _authority

MINIWOB = Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml"


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


def _runs(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[Exception | int],
    *,
    local: bool = True,
    weights: bool = False,
) -> list[JobRun]:
    """What `dart train` runs when each of its attempts ends so; a number: it saves a checkpoint of that version first,
    and loses its trainer then."""
    begun: list[JobRun] = []
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def run_held(wanted: JobRun, hold: Hold) -> dict[str, object]:
        assert is_held(wanted.directory.lock_file), "between two attempts, too"
        begun.append(wanted)
        if not ends:
            return {"updates": 7}
        end = ends.pop(0)
        if isinstance(end, int):
            with manifest.written(folder / "checkpoints" / f"v{end}"):
                pass
            end = ProcessLost("the trainer is gone")
        raise end

    monkeypatch.setattr(train, "run_held", run_held)
    wanted = JobRun(load(MINIWOB), RunDirectory(folder), Train(), local=local, initial_weights=weights)
    with wanted.directory.lock() as hold:
        assert train._to_the_end(wanted, hold) == {"updates": 7}
    return begun


def test_a_run_whose_trainer_is_lost_is_resumed_until_it_makes_no_checkpoint_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = ProcessLost("the trainer is gone")
    begun = _runs(tmp_path, monkeypatch, [lost, lost, lost, 1, lost, lost], weights=True)
    assert [one.resume for one in begun] == [False, True, True, True, True, True, True]
    assert [one.initial_weights for one in begun] == [True, True, True, True, False, False, False], (
        "until it has its own"
    )
    said = capsys.readouterr().err
    assert [line.partition("(")[0] for line in said.splitlines()] == [
        f"the trainer is gone; the run is resumed after {seconds} s " for seconds in (2, 4, 8, 2, 4, 8)
    ]
    with pytest.raises(ProcessLost, match="the trainer is gone"):
        _runs(tmp_path, monkeypatch, [lost] * 4)


def test_a_child_of_a_resumed_run_that_had_saved_weights_has_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ProcessLost("the trainer is gone")
    begun = _runs(tmp_path, monkeypatch, [lost, 1, lost])
    assert [one.has_worked for one in begun] == [False, False, True, True]


def test_a_signal_between_two_attempts_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[bool] = []

    async def interrupted() -> None:
        with interruptible(asyncio.get_running_loop(), heard.append):
            os.kill(os.getpid(), signal.SIGINT)
            while not heard:
                await asyncio.sleep(0.01)

    def run_held(wanted: JobRun, hold: Hold) -> None:
        uvloop.run(interrupted())
        raise ProcessLost("the trainer is gone")

    def pressed(_: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train, "run_held", run_held)
    monkeypatch.setattr(time, "sleep", pressed)
    wanted = JobRun(load(MINIWOB), RunDirectory(tmp_path), Train())
    with wanted.directory.lock() as hold:
        assert train._to_the_end(wanted, hold) is None
    assert heard == [True], "by hand"
    assert f"--resume {tmp_path}" in capsys.readouterr().out


def test_what_a_run_leaves_is_collected_before_the_next_one_begins() -> None:
    class Left:
        def __init__(self) -> None:
            self.own = self

        def interrupt(self, by_hand: bool) -> None:
            raise AssertionError

    async def made() -> weakref.ref[Left]:
        left = Left()
        with interruptible(asyncio.get_running_loop(), left.interrupt):
            return weakref.ref(left)

    left = uvloop.run(made())
    gc.collect()
    assert left() is None


def test_weights_that_were_given_anew_are_not_given_again_once_a_checkpoint_has_taken_an_older_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "v20").mkdir(parents=True)
    begun = _runs(tmp_path, monkeypatch, [20], weights=True)
    assert [one.initial_weights for one in begun] == [True, False]


def test_other_failures_and_runs_with_workers_from_elsewhere_are_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="the disk is full"):
        _runs(tmp_path, monkeypatch, [UserError("the disk is full")])
    with pytest.raises(ProcessLost):
        _runs(tmp_path, monkeypatch, [ProcessLost("the trainer is gone")], local=False)


SLOW = """
import sys, time
from pathlib import Path
sys.stdin.read()
time.sleep(0.5)
Path(sys.argv[1]).write_text("gave all back")
"""
FAILS = "import sys, time; time.sleep(1.0); sys.exit(3)"


async def test_the_others_are_ended_whole_although_the_run_fails_meanwhile(tmp_path: Path) -> None:
    """New processes that resume the run must not meet them."""
    there, failed = tmp_path / "there", asyncio.Event()
    slow = Child("env-0", [sys.executable, "-c", SLOW, str(there)], goodbye_seconds=60)
    ends = Child("train", [sys.executable, "-c", FAILS], restart=False)
    running = asyncio.create_task(Launcher([slow, ends], tmp_path / "logs", failed=lambda _: failed.set()).run())
    await failed.wait()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert there.read_text() == "gave all back"


async def test_one_that_is_never_ready_ends_the_run_however_long_each_try_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LASTING_SECONDS", 0.0)
    monkeypatch.setattr(launcher, "pause_seconds", lambda _: 0.0)
    never = f"print('the engine was not ready'); raise SystemExit({NOT_READY})"
    with pytest.raises(UserError, match=r"rollout-0 ended 4 times in a row; .*: the engine was not ready"):
        await Launcher([Child("rollout-0", [sys.executable, "-c", never])], tmp_path / "logs").run()


OF_ANOTHER_LAUNCHER = {
    "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node17.cluster",
    "MASTER_PORT": "29500", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "2",
    "OMPI_COMM_WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true", "VLLM_DP_SIZE": "2",
}  # fmt: skip
KEPT = {"OMP_NUM_THREADS": "3", "VLLM_ATTENTION_BACKEND": "x", "DART_TRANSFER_HOST": "here", "SLURM_JOB_ID": "7"}


async def test_no_process_is_told_its_place_by_the_variables_of_another_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (OF_ANOTHER_LAUNCHER | KEPT).items():
        monkeypatch.setenv(name, value)
    names = [*OF_ANOTHER_LAUNCHER, *KEPT]
    program = f"import os; print({{name: os.environ[name] for name in {names} if name in os.environ}})"
    await Launcher([Child("train", [sys.executable, "-c", program], {"LOCAL_RANK": "1"})], tmp_path).run()
    assert ast.literal_eval((tmp_path / "train.log").read_text()) == KEPT | {"LOCAL_RANK": "1"}


def test_a_rank_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UserError, match="RANK is 'first', and must be a number: unset it"):
        _load("train")


def test_ranks_end_by_themselves_before_their_launcher_is_killed() -> None:
    """torchrun puts each into a process group of its own, which a signal to torchrun's does not reach."""
    config = load(MINIWOB, ("trainer.ranks=2",))
    for child in local_children(config, "127.0.0.1:1", Train()):
        command = list(child.command)
        ending = float(command[command.index("--ending-seconds") + 1]) if "--ending-seconds" in command else None
        if child.name == "train":
            assert ending is not None and ending < child.goodbye_seconds + launcher.TERMINATE_SECONDS
        elif child.name.startswith("env"):
            assert ending is not None and ending > child.goodbye_seconds


VERIFIES = """
import asyncio, sys, time
from pathlib import Path
from dart.commands import running
from dart.config import load
from dart.job import Train
from dart.rundir import RunDirectory

def verify():
    print("verifying", flush=True)
    time.sleep(600)

async def begun(*_):
    await asyncio.to_thread(verify)

running._begun = begun
running.run_in_loop(running.JobRun(load(Path(sys.argv[1])), RunDirectory(Path(sys.argv[2])), Train(), local=False))
"""


def test_ctrl_c_ends_a_run_that_still_verifies_its_checkpoint(tmp_path: Path) -> None:
    """A thread does that, for minutes, and Python would wait for its end."""
    command = [sys.executable, "-c", VERIFIES, str(MINIWOB), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "verifying\n"
        run.send_signal(signal.SIGINT)
        try:
            said, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 130 and said.startswith("interrupted; ") and "--resume" in said


# ---- what `dart worker --run` takes from the run's directory, and what from its user ----


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
    monkeypatch.setenv(TOKEN_ENVIRONMENT, "")  # so that what is set here does not stay
    monkeypatch.delenv(TOKEN_ENVIRONMENT)
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
