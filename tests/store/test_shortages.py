"""What the machine is short of for a while is waited for, and named: open files, room on the disk, threads, memory."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner
from run_processes.short import no_descriptors
from run_processes.told import events
from store_samples import image

from dart import shortage
from dart.cli import main
from dart.commands import worker
from dart.commands.running import check_before, workers_come
from dart.config import load
from dart.coordinator.service.housekeeping import Waits
from dart.coordinator.service.journal import Journal
from dart.core.culprits import Scene, explain
from dart.core.status import Stall, Status
from dart.core.watchdog import Kind, Limits, Overdue, Pulse, Watchdog
from dart.errors import UserError
from dart.job import Train
from dart.processes import launcher, limits
from dart.processes.launcher import Child, Launcher
from dart.screenshots.directory import ScreenshotDirectory
from dart.store import blobs, engine, patience
from dart.store.database import Database, sqlite_url
from dart.store.engine import DatabaseFailed
from dart.wire.channel import Dial
from dart.wire.worker import WorkerOptions
from dart.workers.env.role import EnvRole


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((blobs, "_AWAY_SECONDS"), (engine, "_AWAY_SECONDS"), (patience, "PAUSE_SECONDS")):
        monkeypatch.setattr(module, name, 0.01)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.EMFILE, ""), "too many open files: the limit of this process is"),
        (OSError(errno.ENFILE, ""), "too many open files on this machine"),
        (OSError(errno.ENOSPC, "", "/runs/a"), "the disk of /runs/a is full"),
        (OSError(errno.EDQUOT, ""), "the quota on the disk is used up"),
        (OSError(errno.EAGAIN, ""), "no more threads or processes"),
        (RuntimeError("can't start new thread"), "no more threads or processes"),
        (MemoryError(), "too little memory"),
        (OSError(errno.ENOMEM, ""), "too little memory"),
        (OSError(errno.EACCES, ""), None),
        (RuntimeError("another"), None),
    ],
)
def test_an_error_names_what_there_is_too_little_of(error: Exception, named: str | None) -> None:
    told = shortage.shortage(error)
    assert told.startswith(named) if named else told == ""


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (
            "[FATAL] pipe: Too many open files (24)",
            "too many open files: the limit of this process is",
        ),
        ("fork: Resource temporarily unavailable", "no more threads or processes"),
        ("RuntimeError: can't start new thread", "no more threads or processes"),
        ("mmap failed: Cannot allocate memory", "too little memory"),
        ("Too many open files in system", "too many open files on this machine"),
        ("I am no browser", None),
    ],
)
def test_what_a_program_prints_names_what_there_is_too_little_of(said: str, named: str | None) -> None:
    told = shortage.of_program(RuntimeError("it died"), said)
    assert told.startswith(named) if named else told == ""
    assert shortage.of_program(MemoryError(), said).startswith("too little memory")


@pytest.mark.parametrize(
    ("limit", "named"),
    [("-n 64", "only 64 files open: raise `ulimit -n`"), ("-v 4194304", "only 4 GiB of address space")],
)
def test_a_limit_that_large_programs_do_not_start_under_is_named(limit: str, named: str) -> None:
    program = f"ulimit {limit} && exec {sys.executable} -c 'from dart.shortage import tight; print(tight())'"
    assert named in subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
async def test_a_screenshot_waits_for_what_the_machine_is_short_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store, told, write, failing = blobs.BlobStore(tmp_path), list[tuple[str, bool]](), ScreenshotDirectory.write, [3]
    store.patience.seconds = 60.0
    store.patience.told = lambda seconds, over: told.append((store.patience.short, over))

    def fails(self: ScreenshotDirectory, name: str, data: bytes) -> None:
        if failing[0]:
            failing[0] -= 1
            raise OSError(number, os.strerror(number), name)
        write(self, name, data)

    monkeypatch.setattr(ScreenshotDirectory, "write", fails)
    await store.put_async(image("screen"))
    assert store.has(image("screen").sha256)
    assert [over for _, over in told] == [False, False, False, True]
    assert told[0][0] and store.patience.waits_for == ""
    failing[0], store.patience.seconds = 1, 0.0
    with pytest.raises(OSError, match=os.strerror(number)):
        await store.put_async(image("another screen"))
    store.close()


async def test_a_directory_that_fails_otherwise_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = blobs.BlobStore(tmp_path)
    store.patience.seconds = 60.0

    def fails(*_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ScreenshotDirectory, "write", fails)
    with pytest.raises(PermissionError):
        await store.put_async(image("screen"))
    store.close()


async def test_a_database_without_a_descriptor_waits_for_one_and_names_the_limit(tmp_path: Path) -> None:
    """SQLite itself says no more than "unable to open database file"."""
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run", "run", {}, started=1.0)
        told: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        database.patience.told = lambda seconds, over: (
            loop.call_soon_threadsafe(told.put_nowait, "over" if over else database.patience.waits_for) and None
        )
        database._reader._engine.dispose()  # its readers are opened as they are needed, hours after the start
        with no_descriptors():
            reading = asyncio.create_task(database.group_count())
            why = await told.get()
            assert "too many open files" in why and "ulimit -n" in why
            assert not reading.done()
        assert await reading == 0
        while await told.get() != "over":
            pass
        assert database.patience.waits_for == ""


@pytest.mark.parametrize(
    ("code", "text", "named"),
    [
        (sqlite3.SQLITE_FULL, "database or disk is full", r"is full: make room"),
        (sqlite3.SQLITE_NOMEM, "out of memory", "too little memory"),
    ],
)
async def test_a_transaction_waits_for_what_the_machine_is_short_of(
    tmp_path: Path, code: int, text: str, named: str
) -> None:
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run", "run", {}, started=1.0)
        failing = [2]

        def work(connection: Any) -> int:
            if failing[0]:
                failing[0] -= 1
                error = sqlite3.OperationalError(text)
                error.sqlite_errorcode = code
                raise engine.OperationalError("", None, error)
            return 7

        assert await database.write(work) == 7
        failing[0], database.patience.seconds = 1, 0.0
        with pytest.raises(DatabaseFailed, match=named):
            await database.write(work)


async def test_a_database_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    database = await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs")
    await database.start_run("run", "run", {}, started=1.0)
    database._reader._engine.dispose()
    (tmp_path / "run.db").rename(tmp_path / "elsewhere.db")
    (tmp_path / "run.db").mkdir()
    with pytest.raises(DatabaseFailed, match="unable to open database file"):
        await database.group_count()
    await database.close()


async def test_no_line_of_the_journal_is_lost_on_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run", "run", {}, started=1.0)
        journal = Journal(tmp_path / "metrics.jsonl")
        database.patience.told = Waits(journal, database.patience, "database_locked", "database_unlocked", "{}").told
        file, failing = journal._file, [3]

        class Full:
            def write(self, lines: bytearray) -> int:
                if failing[0]:
                    failing[0] -= 1
                    file.write(lines[:5])  # as much as there was room for
                    return 5
                if len(failing) == 1:
                    failing.append(0)
                    raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
                return file.write(lines) or 0

        journal._file = Full()  # type: ignore[assignment]
        journal.event("update", update=1)
        await journal.flush(database)
        journal._file = file
        await asyncio.sleep(0)
        await journal.flush(database)
        journal.close()
    assert [event["update"] for event in events(tmp_path / "metrics.jsonl", "update")] == [1]
    (short,) = events(tmp_path / "metrics.jsonl", "machine_short")
    assert short["why"] == "the disk of metrics.jsonl is full: make room there"
    assert len(events(tmp_path / "metrics.jsonl", "machine_recovered")) == 1


def test_a_store_that_waits_is_a_stall_that_names_what_is_short() -> None:
    watchdog = Watchdog(Limits(), 0.0)
    assert watchdog.look(Pulse("training", unstored=5.0), 10.0) == []
    assert watchdog.look(Pulse("training", unstored=25.0, sampling=True, busy=True), 1000.0) == [
        Overdue(Kind.STORE, 25.0)
    ], "whatever else waits, waits for that"
    stall = explain(Overdue(Kind.STORE, 25.0), Scene(Status("run", "training"), unstored="too many open files: …"))
    assert (stall.waits_for, stall.culprit) == ("too many open files: …", "the coordinator's machine")


async def test_a_pool_needs_no_further_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = shortage.ready_threads(3, "pool")

    def none_left(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", none_left)
    loop = asyncio.get_running_loop()
    assert await asyncio.gather(*[loop.run_in_executor(pool, pow, 2, n) for n in range(9)]) == [2**n for n in range(9)]
    with pytest.raises(RuntimeError, match="can't start new thread"):
        shortage.ready_threads(3, "another")
    pool.shutdown()


def test_every_command_raises_its_limit_of_open_files() -> None:
    code = (
        "import resource, sys; from dart.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "main(['runs', '--help'], standalone_mode=False)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE); sys.exit(soft != min(hard, 1 << 20))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_a_process_that_ends_for_a_shortage_says_so_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_left(*_: object, **__: object) -> NoReturn:
        raise ExceptionGroup("", [RuntimeError("can't start new thread")])

    monkeypatch.setattr("dart.commands.worker.run_worker", none_left)
    with pytest.raises(SystemExit) as ended:
        main(["worker", "--role", "env", "--coordinator", "127.0.0.1:1"], standalone_mode=False)
    assert ended.value.code == 1, "it may be started again"
    assert capsys.readouterr().err.startswith("error: no more threads or processes may be started")


async def test_a_worker_that_cannot_be_started_for_a_moment_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failing = asyncio.create_subprocess_exec, [2]

    async def short(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        if failing[0]:
            failing[0] -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", short)
    monkeypatch.setattr(launcher, "pause_seconds", lambda restarts: 0.0)
    await Launcher([Child("env-0", [sys.executable, "-c", ""])], tmp_path).run()
    failing[0] = 100
    with pytest.raises(UserError, match=r"^env-0 cannot be started: no more threads or processes may be started"):
        await Launcher([Child("env-0", [sys.executable, "-c", ""])], tmp_path).run()


async def test_a_worker_needs_no_further_thread_for_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serves(*_: object) -> str:
        def none_left(*_: object) -> NoReturn:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as short:
            short.setattr(threading, "_start_new_thread", none_left)
            await asyncio.gather(*[asyncio.to_thread(pow, 2, n) for n in range(99)])
        return "served"

    monkeypatch.setattr(worker, "serve", serves)
    assert await worker._serve(EnvRole(), WorkerOptions(Dial("127.0.0.1:1"), "w"), None) == "served"


async def test_a_worker_does_not_begin_where_grpc_would_crash_for_want_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, left = threading._start_new_thread, [min(32, (os.cpu_count() or 1) + 4) + 3]

    def few_left(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        return start(*arguments)

    async def serves(*_: object) -> NoReturn:
        raise AssertionError("it dialled")

    monkeypatch.setattr(worker, "serve", serves)
    with monkeypatch.context() as short, pytest.raises(RuntimeError, match="can't start new thread"):
        short.setattr(threading, "_start_new_thread", few_left)
        await worker._serve(EnvRole(), WorkerOptions(Dial("127.0.0.1:1"), "w"), None)


def test_environments_without_end_are_refused_by_the_memory_that_they_need() -> None:
    demo = Path(__file__).parents[2] / "configs" / "ladder_demo.yaml"
    assert limits.problem(load(demo), Train()) is None
    for workers, slots in ((1, 100_000), (1_000, 100)):
        why = limits.problem(load(demo, [f"environment.workers={workers}", f"environment.slots={slots}"]), Train())
        assert why is not None and "100000 environments of at least 10 MB each need more than the" in why
        with pytest.raises(UserError, match=rf"environment\.slots {slots} on {workers} workers"):
            check_before(load(demo, [f"environment.workers={workers}", f"environment.slots={slots}"]), Train())


def test_doctor_says_what_the_machine_allows() -> None:
    told = CliRunner().invoke(main, ["doctor"]).output
    for what in ("open files: ", "processes and threads: ", "memory: "):
        assert f"allows   {what}" in told


async def test_a_run_whose_own_workers_never_come_ends_and_says_for_whom_it_waited() -> None:
    stall = Stall("start", "the start of the run", "1 of 1 env workers (env-0 dialled in but is still preparing)", 30.0,
                  "env", advice="look at its log")  # fmt: skip
    answers = [Status("run", "starting"), Status("run", "starting", stalls=(stall,))]
    with pytest.raises(UserError, match=r"has not begun for 30 s: it waits for 1 of 1 env workers.*look at its log"):
        await workers_come(lambda: answers.pop(0), 0.001)
    await workers_come(lambda: Status("run", "training"), 0.001)


def test_spare_descriptors_are_there_where_no_others_are(tmp_path: Path) -> None:
    spare = shortage.Spare()
    spare.hold(4)
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            (tmp_path / "end").write_text("why")
        spare.release()
        (tmp_path / "end").write_text("why")
