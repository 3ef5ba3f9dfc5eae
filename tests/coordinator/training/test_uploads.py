"""Copies of checkpoints: complete or not there, as many as are kept, and a resumed run finds them."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from dart import manifest
from dart.cli import main
from dart.coordinator.service.journal import Journal
from dart.coordinator.start import starting_point
from dart.coordinator.training.uploads import Uploads
from dart.core.types import Image
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.screenshots.directory import file_name
from dart.store.blobs import BlobStore, BlobUnreachable, BlobUnreadable
from dart.store.elsewhere import copies as copies_module
from dart.store.elsewhere.copies import Stopped, copies, copy_in, copy_out, incomplete_copies
from dart.store.records import CheckpointRecord


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3_url") if request.param == "s3" else f"file://{tmp_path}/copies"


def checkpoint(run: Path, version: int) -> Path:
    folder = run / "checkpoints" / f"v{version:06d}"
    with manifest.written(folder) as new:
        (new / "model.safetensors").write_bytes(bytes([version]) * 100_000)
        (new / "parts").mkdir()
        (new / "parts" / "trainer_state.pt").write_bytes(b"state")
        (new / "trainer_state.pt").write_bytes(b"state")
    return folder


def events(run: Path) -> str:
    return (run / "metrics.jsonl").read_text()


async def test_the_newest_are_kept_and_come_back(tmp_path: Path, url: str) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    uploads = Uploads(f"{url}/run", 2, journal)
    for version in (1, 2, 3):
        await uploads.copy(checkpoint(tmp_path, version))
    journal.flush_lines()
    assert events(tmp_path).count("checkpoint_uploaded") == 3
    assert copies(f"{url}/run") == ["v000002", "v000003"]
    copy_in(f"{url}/run/v000003", tmp_path / "back")
    assert manifest.problem(tmp_path / "back") is None
    assert (tmp_path / "back" / "parts" / "trainer_state.pt").read_bytes() == b"state"
    journal.close()


@pytest.mark.parametrize(("start", "left"), [(2, ["v000002", "v000003"]), (0, ["v000003", "v000009"])])
async def test_copies_of_what_a_resumed_run_has_abandoned_go_first(
    tmp_path: Path, url: str, start: int, left: list[str]
) -> None:
    """The run went on at v2 because what came after it was damaged, or with its initial weights."""
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    before, after = Uploads(f"{url}/run", 3, journal), Uploads(f"{url}/run", 2, journal, start)
    for version in (2, 8, 9):
        await before.copy(checkpoint(tmp_path, version))
    await after.copy(checkpoint(tmp_path, 3))
    assert copies(f"{url}/run") == left
    for version in (4, 8):
        await after.copy(checkpoint(tmp_path, version))
    assert copies(f"{url}/run") == ["v000004", "v000008"]
    journal.close()


async def test_a_copy_that_broke_off_takes_no_copys_place(tmp_path: Path, url: str) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    uploads = Uploads(f"{url}/run", 2, journal)
    await uploads.copy(checkpoint(tmp_path, 1))
    (tmp_path / "part").write_bytes(b"x")
    with copies_module._at(f"{url}/run") as (fs, root):
        fs.makedirs(f"{root}/v000002", exist_ok=True)
        fs.put_file(str(tmp_path / "part"), f"{root}/v000002/part")
    assert copies(f"{url}/run") == ["v000001", "v000002"]
    await uploads.copy(checkpoint(tmp_path, 3))
    assert copies(f"{url}/run") == ["v000001", "v000003"]
    journal.close()


async def test_a_damaged_checkpoint_is_not_copied_and_the_run_goes_on(tmp_path: Path, url: str) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    damaged = checkpoint(tmp_path, 1)
    (damaged / "model.safetensors").write_bytes(b"short")
    await Uploads(f"{url}/run", 2, journal).copy(damaged)
    journal.flush_lines()
    assert "checkpoint_upload_failed" in events(tmp_path) and "5 bytes of 100000" in events(tmp_path)
    assert copies(f"{url}/run") == []
    journal.close()


async def test_a_resumed_run_takes_the_copy_of_a_checkpoint_that_is_lost(tmp_path: Path, url: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    journal = Journal(run.metrics, 1)
    async with await run.open_to_work(create=True) as database:
        await database.start_run("run", "run", {}, started=1.0)
        folder = checkpoint(run.path, 5)
        await Uploads(f"{url}/key", 2, journal).copy(folder)
        await database.add_checkpoint(CheckpointRecord(str(folder), 5, time.time(), None))
        shutil.rmtree(folder)
        with pytest.raises(UserError, match="the folder is not there"):
            await starting_point(database, run)
        start = await starting_point(database, run, copies=f"{url}/key")
        assert (start.version, start.checkpoint) == (5, folder)
        assert manifest.problem(folder) is None
    journal.close()


async def test_a_resumed_run_passes_over_a_copy_that_is_damaged(tmp_path: Path, url: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    journal = Journal(run.metrics, 1)
    uploads = Uploads(f"{url}/key", 2, journal)
    async with await run.open_to_work(create=True) as database:
        await database.start_run("run", "run", {}, started=1.0)
        for version in (4, 6):
            folder = checkpoint(run.path, version)
            await uploads.copy(folder)
            await database.add_checkpoint(CheckpointRecord(str(folder), version, float(version), None))
        shutil.rmtree(folder)
        with copies_module._at(f"{url}/key/{folder.name}") as (fs, root):
            fs.pipe_file(f"{root}/model.safetensors", bytes([6]) * 99_999)
        start = await starting_point(database, run, copies=f"{url}/key")
    assert start.version == 4
    (broken,) = start.broken
    assert (broken.folder, broken.version) == (folder, 6)
    assert broken.why.startswith(f"the folder is not there, and {url}/key/v000006 is damaged: model.safetensors has")
    assert [path.name for path in run.checkpoints.iterdir()] == ["v000004"], "nothing that is half made"
    journal.close()


async def test_a_copy_of_which_the_store_kept_less_is_no_copy(tmp_path: Path, moody: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    moody.setattr(Moody, "size", lambda self, path: len(self.cat_file(path)) - path.endswith("model.safetensors"))
    await Uploads("moody://bucket/run", 2, journal).copy(checkpoint(tmp_path, 1))
    journal.flush_lines()
    assert "checkpoint_upload_failed" in events(tmp_path) and "has 99999 bytes of 100000" in events(tmp_path)
    assert incomplete_copies("moody://bucket/run") == {"v000001"}
    journal.close()


async def test_export_takes_a_copy_by_its_url(tmp_path: Path, url: str) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    await Uploads(f"{url}/run", 2, journal).copy(checkpoint(tmp_path, 7))
    journal.close()
    home = tmp_path / "home"
    for hidden in (".config.old", ".cache.tmp", ".v1.7.tmp"):
        (home / hidden).mkdir(parents=True)
    told = exported(f"{url}/run/v000007", home / "out")
    assert told.exit_code == 0, told.output
    assert files(home / "out") == ["model.safetensors"]
    refused = exported(f"{url}/run/v000008", home / "other")
    assert refused.exit_code == 2 and "is not a complete copy of a checkpoint" in refused.output
    names = sorted(path.name for path in home.iterdir())
    assert names == [".cache.tmp", ".config.old", ".v1.7.tmp", "out"], "nothing beside OUT is touched"


def exported(run: str | Path, out: Path) -> Result:
    return CliRunner().invoke(main, ["export", str(run), str(out)])


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def saved(path: Path) -> Path:
    """A run with a checkpoint."""
    run = RunDirectory(path)
    run.path.mkdir()
    async with await run.open_to_work(create=True) as database:
        await database.start_run("run", "run", {}, started=1.0)
        await database.add_checkpoint(CheckpointRecord(str(checkpoint(path, 5)), 5, 1.0, None))
    return path


def test_export_makes_all_of_out_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = asyncio.run(saved(tmp_path / "run")), tmp_path / "home" / "out"
    assert exported(run, out).exit_code == 0 and files(out) == ["model.safetensors"]
    again = exported(run, out)
    assert again.exit_code == 2 and f"OUT {out} already exists" in again.output

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    refused = exported(run, out.with_name("other"))
    assert refused.exit_code == 2 and "cannot be made ([Errno 28] No space left on device): name a" in refused.output
    assert [path.name for path in out.parent.iterdir()] == ["out"]


class SdkError(Exception):
    """Like gcsfs.HttpError and azure.core's: of no class that a caller could know."""


class Moody(MemoryFileSystem):
    """A store whose driver raises its SDK's own errors while `down`."""

    protocol = "moody"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    down = False
    refuses = False
    """It cannot even be made: there are no credentials."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        if self.refuses:
            raise SdkError("no credentials")

    def _open(self, *arguments: object, **options: object) -> object:
        self._asked()
        return super()._open(*arguments, **options)

    def cat_file(self, *arguments: object, **options: object) -> object:
        self._asked()
        return super().cat_file(*arguments, **options)

    def info(self, *arguments: object, **options: object) -> object:
        self._asked()
        return super().info(*arguments, **options)

    def exists(self, *arguments: object, **options: object) -> object:
        self._asked()
        return super().exists(*arguments, **options)

    def _asked(self) -> None:
        if self.down:
            raise SdkError("429: slow down")


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    register_implementation("moody", Moody, clobber=True)
    yield monkeypatch
    Moody.store.clear()


@pytest.mark.parametrize(("mood", "why"), [("down", "SdkError: 429: slow down"), ("refuses", "no credentials")])
async def test_a_copy_that_any_driver_fails_is_told_and_the_next_one_is_made(
    tmp_path: Path, moody: pytest.MonkeyPatch, mood: str, why: str
) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    uploads = Uploads("moody://bucket/run", 2, journal)
    moody.setattr(Moody, mood, True)
    await uploads.copy(checkpoint(tmp_path, 1))
    journal.flush_lines()
    assert "checkpoint_upload_failed" in events(tmp_path) and why in events(tmp_path)
    with pytest.raises(UserError, match=f"v000001 cannot be copied .*{why}"):
        copy_in("moody://bucket/run/v000001", tmp_path / "back")
    moody.setattr(Moody, mood, False)
    await uploads.copy(checkpoint(tmp_path, 2))
    assert copies("moody://bucket/run") == ["v000002"]
    journal.close()


def test_a_copy_that_is_stopped_is_no_failure_of_the_store(tmp_path: Path, moody: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        copy_out(checkpoint(tmp_path, 1), "moody://bucket/run", stop)


def test_screenshots_that_any_driver_fails_to_keep_are_unreachable(moody: pytest.MonkeyPatch) -> None:
    store = BlobStore("moody://bucket/blobs")
    image = Image.of(b"png", "image/png", 1, 1)
    moody.setattr(Moody, "down", True)
    for call in (lambda: store.put(image), lambda: store.get(image.sha256), lambda: store.has(image.sha256)):
        with pytest.raises(BlobUnreachable, match="SdkError: 429: slow down"):
            call()
    moody.setattr(Moody, "refuses", True)
    with pytest.raises(UserError, match=r"moody://bucket/blobs cannot be used \(SdkError: no credentials\)"):
        BlobStore("moody://bucket/blobs")


async def test_an_object_store_that_is_away_is_waited_for(moody: pytest.MonkeyPatch) -> None:
    """If it has answered before; until then its URL or its keys may be wrong."""
    moody.setattr("dart.store.blobs._AWAY_SECONDS", 0.01)
    store, image = BlobStore("moody://bucket/blobs"), Image.of(b"png", "image/png", 1, 1)
    store.patience.seconds = 60.0
    moody.setattr(Moody, "down", True)
    with pytest.raises(BlobUnreachable):
        store.put(image)
    moody.setattr(Moody, "down", False)
    store.put(image)
    told: asyncio.Queue[tuple[float, bool]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    store.patience.told = lambda seconds, over: loop.call_soon_threadsafe(told.put_nowait, (seconds, over)) and None
    moody.setattr(Moody, "down", True)
    reading = asyncio.create_task(store.get_many_async([image.sha256]))
    while (await told.get())[0] < 0.05:
        assert not reading.done()
    moody.setattr(Moody, "down", False)
    assert await reading == {image.sha256: b"png"}
    while not (await told.get())[1]:
        pass
    moody.setattr(Moody, "down", True)
    reading = asyncio.create_task(store.get_many_async([image.sha256]))
    await told.get()
    store.patience.seconds = 0.05  # the run ends
    with pytest.raises(BlobUnreachable, match="slow down"):
        await reading
    many = [Image.of(b"%d" % number, "image/png", 1, 1) for number in range(100)]
    with moody.context() as patch, pytest.raises(BlobUnreachable):
        patch.setattr(store._ends, "wait", lambda seconds: pytest.fail("the outage has been waited for already"))
        await store.put_many_async(many)
    store.patience.seconds = 3600.0
    reading = asyncio.create_task(store.get_many_async([image.sha256]))
    await asyncio.sleep(0.05)
    store.close()
    with pytest.raises(BlobUnreachable):
        await reading


class Spotted:
    """Files of which one cannot be read, whoever asks how often."""

    def __init__(self, bad: str) -> None:
        self.bad = bad

    def read(self, name: str) -> bytes:
        if name == self.bad:
            raise OSError("InvalidObjectState: it is archived")
        return b"png"


async def test_one_screenshot_that_the_store_does_not_give_is_not_waited_for(moody: pytest.MonkeyPatch) -> None:
    """While the store gives others."""
    moody.setattr("dart.store.blobs._AWAY_SECONDS", 0.01)
    store = BlobStore("moody://bucket/blobs")
    store.patience.seconds = 3600.0
    good, bad = Image.of(b"png", "image/png", 1, 1), Image.of(b"gif", "image/gif", 1, 1)
    store.put(good)
    moody.setattr(store, "_files", Spotted(file_name(bad.sha256)))
    reading = asyncio.create_task(store.get_async(bad.sha256))
    async with asyncio.timeout(60):
        while not reading.done():
            assert await store.get_async(good.sha256) == b"png"
    with pytest.raises(BlobUnreadable, match=r"answers, but not for this screenshot .*archived"):
        await reading
    store.close()
