"""Local workers: on which GPUs, and what becomes of those that end by themselves."""

import asyncio
import dataclasses
import errno
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dart import config
from dart.config.environment import VerbTimeouts
from dart.core.capacity import devices
from dart.core.fleet.restarts import pause_seconds
from dart.errors import ProcessLost, UserError
from dart.job import Evaluate, Train
from dart.processes import gpus, launcher
from dart.processes.gpus import Placement, gpus_here, place
from dart.processes.launcher import Child, Launcher, local_children
from dart.processes.logs import bound, elder
from dart.processes.settings import ENDING_SECONDS


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before restarts, in seconds; none of them is kept."""
    asked: list[float] = []

    def none(failures: int) -> float:
        asked.append(pause_seconds(failures))
        return 0.0

    monkeypatch.setattr(launcher, "pause_seconds", none)
    return asked


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


async def test_one_that_ends_again_and_again_is_given_time_and_then_ends_the_run(
    tmp_path: Path, pauses: list[float]
) -> None:
    with pytest.raises(UserError, match="env-0 ended 4 times in a row; the last time it ended with code 1: it broke"):
        await Launcher([_child(tmp_path, 9)], tmp_path / "logs").run()
    assert _runs(tmp_path) == 4
    assert pauses == [2.0, 4.0, 8.0]


async def test_restarts_count_anew_after_one_that_lasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    monkeypatch.setattr(launcher, "LASTING_SECONDS", 0.0)
    await Launcher([_child(tmp_path, 7)], tmp_path / "logs").run()
    assert _runs(tmp_path) == 7
    assert pauses == [2.0] * 6


async def test_a_pause_is_kept_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    def long(failures: int) -> float:
        asked.set()
        return 3600.0

    monkeypatch.setattr(launcher, "pause_seconds", long)
    running = asyncio.create_task(Launcher([_child(tmp_path, 9)], tmp_path / "logs").run())
    await asked.wait()
    await asyncio.wait({running}, timeout=0.5)  # in which it would be started again
    assert _runs(tmp_path) == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize(("good_run", "code"), [(9, 1), (9, 2)])
async def test_the_run_goes_on_without_what_it_does_not_need(tmp_path: Path, good_run: int, code: int) -> None:
    child = dataclasses.replace(_child(tmp_path, good_run, code), name="dashboard", needed=False)
    await Launcher([child], tmp_path / "logs").run()
    assert "is not started again: " in (tmp_path / "logs" / "dashboard.log").read_text()


LEAVES_AN_ENGINE = """
import subprocess, sys
from pathlib import Path
there = Path(sys.argv[1])
if there.exists():
    sys.exit(0)
there.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
sys.exit(1)
"""


async def test_what_a_worker_that_broke_leaves_behind_ends_before_it_is_started_again(tmp_path: Path) -> None:
    there = tmp_path / "engine"
    await Launcher([Child("rollout-0", [sys.executable, "-c", LEAVES_AN_ENGINE, str(there)])], tmp_path / "logs").run()
    assert _has_ended(there)


async def test_a_log_that_cannot_be_bounded_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(log: Path, most_bytes: int) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(log))

    monkeypatch.setattr(launcher, "bound", full)
    await Launcher([_child(tmp_path, 2)], tmp_path / "logs", most_log_bytes=1).run()
    assert _runs(tmp_path) == 2
    assert "No space left on device" in caplog.text


async def test_wrong_input_and_a_lost_trainer_end_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^it broke$"):
        await Launcher([_child(tmp_path, 9, code=2)], tmp_path / "logs").run()
    with pytest.raises(ProcessLost, match="ended with code"):
        await Launcher([_child(tmp_path, 9, restart=False)], tmp_path / "logs").run()
    assert _runs(tmp_path) == 2


async def test_why_it_fails_is_told_before_the_others_are_ended(tmp_path: Path) -> None:
    stays = Child("train", [sys.executable, "-c", "import sys; sys.stdin.read()"])
    told: list[tuple[str, bool]] = []

    def failed(error: UserError) -> None:
        told.append((str(error), made._processes["train"].returncode is None))

    made = Launcher([stays, _child(tmp_path, 9)], tmp_path / "logs", failed=failed)
    with pytest.raises(UserError, match="env-0 ended 4 times in a row"):
        await made.run()
    ((why, alive),) = told
    assert alive and why.startswith("env-0 ended 4 times in a row")


async def test_wrong_input_of_one_that_has_worked_is_a_failure_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LASTING_SECONDS", 0.0)
    begins = _child(tmp_path, 9, code=1)
    then = COUNT.replace("sys.exit(", "sys.exit(1 if len(runs.read_text()) == 1 else ")
    child = dataclasses.replace(begins, command=[sys.executable, "-c", then, str(tmp_path / "runs"), "3", "2"])
    await Launcher([child], tmp_path / "logs").run()
    assert _runs(tmp_path) == 3, "with code 1, then 2, then 0"
    never = dataclasses.replace(child, command=[*child.command[:-2], "99", "2"])
    (tmp_path / "runs").unlink()
    with pytest.raises(UserError, match="ended 4 times in a row"):
        await Launcher([never], tmp_path / "logs").run()
    (tmp_path / "runs").unlink()
    monkeypatch.setattr(launcher, "LASTING_SECONDS", 600.0)
    await Launcher([_child(tmp_path, 3, code=2)], tmp_path / "logs", has_worked=True).run()
    assert _runs(tmp_path) == 3, "its earlier process has worked"


async def test_a_process_that_cannot_be_started_is_told_and_may_be_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = Child("env-0", [str(tmp_path / "none")], {}, restart=True)
    with pytest.raises(UserError, match=r"env-0 cannot be started: .*No such file"):
        await Launcher([gone], tmp_path / "logs").run()
    dashboard = dataclasses.replace(gone, name="dashboard", needed=False)
    (tmp_path / "logs" / "dashboard.log").mkdir()  # so that it cannot be noted there either
    await Launcher([dashboard], tmp_path / "logs").run()
    assert "the run goes on without the dashboard: dashboard cannot be started" in caplog.text


def _config(ranks: int, replicas: int, parallel: int = 1, transport: str = "nccl", stages: int = 1) -> config.Config:
    demo = Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml"
    return config.load(
        demo,
        [
            f"trainer.ranks={ranks}",
            f"rollout.replicas={replicas}",
            f"rollout.tensor_parallel={parallel}",
            f"rollout.pipeline_parallel={stages}",
            f"sync.transport={transport}",
            "sync.max_unavailable=1",
        ],
    )


EIGHT = [str(number) for number in range(8)]


def test_trainer_and_replicas_have_gpus_of_their_own() -> None:
    assert place(_config(4, 4), Train(), EIGHT) == Placement(("0", "1", "2", "3"), (("4",), ("5",), ("6",), ("7",)))
    assert place(_config(2, 3, 2), Train(), EIGHT) == Placement(("0", "1"), (("2", "3"), ("4", "5"), ("6", "7")))
    assert place(_config(2, 1, 2, stages=3), Train(), EIGHT) == Placement(("0", "1"), (("2", "3", "4", "5", "6", "7"),))
    assert place(_config(4, 2), Evaluate(), EIGHT).replicas == (("0",), ("1",)), "nothing is trained"
    assert place(_config(1, 2, transport="gloo"), Train(), []) == Placement()


def test_with_too_few_gpus_they_share_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    message = r"trainer.ranks \(4\) and rollout.replicas \(5\) x rollout.tensor_parallel \(1\) x rollout.pipe"
    with pytest.raises(UserError, match=message):
        place(_config(4, 5), Train(), EIGHT)
    with pytest.raises(UserError, match=r"rollout.pipeline_parallel \(4\), 9 in all, and this machine has 8"):
        place(_config(1, 1, 2, stages=4), Train(), EIGHT)
    assert place(_config(1, 2, transport="gloo"), Train(), ["3"]) == Placement(("3",), (("3",), ("3",)))
    assert place(_config(4, 5, transport="gloo"), Train(), EIGHT).replicas[-2:] == (("7",), ("0",))
    with pytest.raises(UserError, match=r"trainer.ranks \(2\).* this machine has 1: lower it"):
        place(_config(2, 1, transport="gloo"), Train(), ["3"])
    for job in (Train(), Evaluate()):
        with pytest.raises(UserError, match=r"rollout.tensor_parallel \(2\) .* needs 2 GPUs, and this machine has 1"):
            place(_config(1, 1, 2, transport="gloo"), job, ["3"])
    with pytest.raises(UserError, match=r"this machine has 0: lower one of them, or set sync.transport: gloo"):
        place(_config(1, 1), Train(), [])


def test_gpus_are_those_that_one_may_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-7f")
    assert gpus_here() == ["2", "GPU-7f"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_here() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus_here() == ["0", "1"]


def test_a_worker_is_told_its_gpus_and_the_config_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "gpus_here", lambda: EIGHT)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    chosen = _config(2, 2)
    children = {child.name: child for child in local_children(chosen, "127.0.0.1:1", Train())}
    told = {name: child.environment.get(gpus.VISIBLE) for name, child in children.items()}
    assert told == {"env-0": None, "rollout-0": "2", "rollout-1": "3", "train": "0,1"}
    order = "CUDA_DEVICE_ORDER"
    assert children["train"].environment[order] == "PCI_BUS_ID", "as nvidia-smi numbers them"
    monkeypatch.setenv(gpus.VISIBLE, "0,1,2,3,4,5,6,7")
    assert order not in launcher.local_children(chosen, "127.0.0.1:1", Train())[-1].environment, "as the user does"
    monkeypatch.delenv(gpus.VISIBLE)
    environment = chosen.rollout.environment | {gpus.VISIBLE: "5"}
    own = chosen.model_copy(update={"rollout": chosen.rollout.model_copy(update={"environment": environment})})
    children = {child.name: child for child in local_children(own, "127.0.0.1:1", Train())}
    assert children["rollout-1"].environment[gpus.VISIBLE] == "5"


CHATTER = """
import os, sys, time
for number in range(4000):
    os.write(1, f"line {number:06d} {'x' * 40}\\n".encode())
    if number % 400 == 0:
        time.sleep(0.02)
print("the last word", flush=True)
sys.exit(int(sys.argv[1]))
"""


async def test_a_log_stays_within_its_bound_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LOOK_AT_LOGS_SECONDS", 0.01)
    child = Child("env-0", [sys.executable, "-c", CHATTER, "0"])
    await Launcher([child], tmp_path / "logs", most_log_bytes=20_000).run()
    log = tmp_path / "logs" / "env-0.log"
    # What the child writes while the end is copied is kept as well.
    # On a busy machine it may have written several times as much before it is looked at: 212 kB in all.
    assert 20_000 <= elder(log).stat().st_size < 200_000
    assert b"\0" not in log.read_bytes() + elder(log).read_bytes(), "it goes on at the file's new beginning"
    bound(log, 20_000)
    assert log.stat().st_size <= 20_000
    assert log.read_text().endswith("the last word\n") or elder(log).read_text().endswith("the last word\n")
    lines = (elder(log).read_text() + log.read_text()).splitlines()[1:-1]  # the first is cut
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert len(numbers) > 300 and numbers == sorted(numbers)


def test_the_last_words_are_found_behind_a_cut(tmp_path: Path) -> None:
    log = tmp_path / "env-0.log"
    log.write_text("something\nerror: the disk is full\n\n" + " " * 30)
    assert bound(log, 60)
    assert log.read_text() == ""
    assert launcher._last_words(log) == "the disk is full"
    log.write_text("and then it ended\n")
    assert launcher._last_words(log) == "and then it ended"
    assert not bound(tmp_path / "none.log", 10)


TORCHRUN = """error: of an earlier start
error: the checkpoint is of another model
{summary}
dart FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 4711)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
{summary}
"""


def test_a_trainer_of_several_ranks_ends_as_its_first_failed_rank_did(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    for code in (2, -9):
        log.write_text(TORCHRUN.format(summary="=" * 60, code=code))
        assert launcher._own_code(log, 1) == code
        assert launcher._last_words(log) == "the checkpoint is of another model"
    assert launcher._own_code(log, 143) == 143, "torchrun itself was ended"
    log.write_text("error: the disk is full\n")
    assert launcher._own_code(log, 1) == 1


def test_the_last_words_of_a_large_log_cost_little(tmp_path: Path) -> None:
    log = tmp_path / "env-0.log"
    log.write_text("a line of a worker that says much\n" * 200_000 + "the last word\n\n")
    tracemalloc.start()
    try:
        assert launcher._last_words(log) == "the last word"
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20, "the coordinator's event loop waits meanwhile"


STUBBORN = """
import signal, subprocess, sys
from pathlib import Path
engine = subprocess.Popen([sys.executable, "-c", "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
engine.stdout.readline()
Path(sys.argv[1]).write_text(str(engine.pid))
sys.stdin.read()
"""  # fmt: skip  # noqa: E501


def _has_ended(there: Path) -> bool:
    """The process whose number is in the file."""
    engine = Path("/proc") / there.read_text() / "stat"
    return not engine.exists() or engine.read_text().rsplit(")", 1)[1].split()[0] == "Z"


async def ended_once_there(child: Child, folder: Path, there: Path) -> None:
    """Run the child until it has written into the file, and end the run then."""
    running = asyncio.create_task(Launcher([child], folder / "logs").run())
    while not there.exists() or not there.read_text():
        await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_nothing_of_a_group_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "TERMINATE_SECONDS", 0.2)
    there = tmp_path / "engine"
    child = Child("rollout-0", [sys.executable, "-c", STUBBORN, str(there)])
    await ended_once_there(child, tmp_path, there)
    assert _has_ended(there)


async def test_a_worker_that_is_just_being_started_when_the_run_ends_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "TERMINATE_SECONDS", 0.2)
    start, started, go_on = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*arguments, **options)
        started.set()
        await go_on.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    there = tmp_path / "engine"
    child = Child("rollout-0", [sys.executable, "-c", STUBBORN, str(there)])
    running = asyncio.create_task(Launcher([child], tmp_path / "logs").run())
    await started.wait()
    while not there.exists() or not there.read_text():
        await asyncio.sleep(0.02)
    running.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert _has_ended(there)


SLOW = """
import sys, time
from pathlib import Path
Path(sys.argv[1]).write_text("there")
sys.stdin.read()
time.sleep(float(sys.argv[2]))
Path(sys.argv[1]).write_text("gave all back")
"""


@pytest.mark.parametrize(("takes", "may_take", "left"), [(0.5, 30.0, "gave all back"), (30.0, 0.1, "there")])
async def test_each_worker_has_its_time_to_end(tmp_path: Path, takes: float, may_take: float, left: str) -> None:
    there = tmp_path / "there"
    child = Child("env-0", [sys.executable, "-c", SLOW, str(there), str(takes)], goodbye_seconds=may_take)
    await ended_once_there(child, tmp_path, there)
    assert there.read_text() == left


def test_env_workers_have_time_to_give_machines_back_before_they_end_themselves() -> None:
    config = _config(1, 1)
    children = {child.name: child for child in local_children(config, "127.0.0.1:1", Evaluate())}
    env, rollout = children["env-0"], children["rollout-0"]
    assert env.goodbye_seconds > rollout.goodbye_seconds
    assert rollout.goodbye_seconds + launcher.TERMINATE_SECONDS < ENDING_SECONDS
    ends_itself = float(env.command[env.command.index("--ending-seconds") + 1])
    assert env.goodbye_seconds + launcher.TERMINATE_SECONDS < ends_itself
    longer = config.model_copy(
        update={"environment": config.environment.model_copy(update={"timeouts": VerbTimeouts(close=400)})}
    )
    (env,) = (one for one in local_children(longer, "127.0.0.1:1", Evaluate()) if one.name == "env-0")
    assert env.goodbye_seconds == 400 and "405" in env.command


async def test_who_is_in_a_hurry_waits_for_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "TOLD_SECONDS", 0.1)
    there, hurry, said = tmp_path / "there", asyncio.Event(), []

    def say(text: str) -> None:
        said.append(text)
        hurry.set()

    child = Child("env-0", [sys.executable, "-c", SLOW, str(there), "60"], goodbye_seconds=60)
    running = asyncio.create_task(Launcher([child], tmp_path / "logs", None, hurry, say).run())
    while not there.exists() or not there.read_text():
        await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert there.read_text() == "there" and said[0].startswith("env-0 is still ending: it is given 60 s in all")
