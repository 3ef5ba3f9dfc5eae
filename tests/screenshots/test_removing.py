"""Screenshots are removed while others store them: what has just been stored is there, whoever else was at work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_samples import image

from dart.failpoints import VARIABLE
from dart.screenshots import directory as module
from dart.screenshots.directory import SHARDS, ScreenshotDirectory, StoredFile, file_name
from dart.screenshots.shared import SharedScreenshots

LONG_AGO = 1_000_000.0


@pytest.fixture
def directory(tmp_path: Path) -> ScreenshotDirectory:
    made = ScreenshotDirectory(tmp_path)
    made.prepare()
    made.mark()
    return made


def path_of(directory: ScreenshotDirectory, digest: bytes) -> Path:
    return directory.root / file_name(digest)


def age(directory: ScreenshotDirectory, digest: bytes) -> None:
    os.utime(path_of(directory, digest), (LONG_AGO, LONG_AGO))


def everything(directory: ScreenshotDirectory) -> list[StoredFile]:
    return [file for shard in range(SHARDS) for file in directory.files(shard)]


def test_what_lies_there_is_listed(directory: ScreenshotDirectory) -> None:
    pictures = [image(f"picture {number}", size=50 + number) for number in range(40)]
    for one in pictures:
        directory.write(file_name(one.sha256), one.data)
    assert {(file.digest, file.bytes) for file in everything(directory)} == {
        (one.sha256, len(one.data)) for one in pictures
    }
    assert all(abs(file.touched - time.time()) < 60 for file in everything(directory))


def test_a_file_that_is_no_screenshot_is_not_listed_whatever_it_is_called(directory: ScreenshotDirectory) -> None:
    (directory.root / "ab").mkdir(exist_ok=True)
    for name in ("abcd", "notes.txt"):
        (directory.root / "ab" / name).touch()
    assert directory.files(0xAB) == []


def test_only_what_was_not_stored_lately_is_removed(directory: ScreenshotDirectory) -> None:
    one, writer = image("one"), SharedScreenshots(directory)
    writer.put(one)
    assert directory.remove(one.sha256, time.time() - 60) == 0
    age(directory, one.sha256)
    writer.put(one)
    assert directory.remove(one.sha256, time.time() - 60) == 0, "storing it again has touched it"
    age(directory, one.sha256)
    assert directory.remove(one.sha256, time.time() - 60) == len(one.data)
    assert directory.remove(one.sha256, time.time()) == 0, "there is none"
    assert everything(directory) == []
    assert list((directory.root / "removed").iterdir()) == []


@pytest.mark.parametrize("when", ["before it is set aside", "after it was set aside"])
def test_a_writer_at_the_same_moment_wins(
    directory: ScreenshotDirectory, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, writer = image("one"), SharedScreenshots(directory)
    writer.put(one)
    age(directory, one.sha256)
    rename = ScreenshotDirectory._rename

    def store_first(source: str, target: str) -> None:
        monkeypatch.setattr(ScreenshotDirectory, "_rename", staticmethod(rename))
        writer.put(one)
        rename(source, target)

    if when.startswith("before"):
        monkeypatch.setattr(ScreenshotDirectory, "_rename", staticmethod(store_first))
    else:
        monkeypatch.setattr(module, "failpoint", lambda name: writer.put(one) if name == "screenshot-aside" else None)
    assert directory.remove(one.sha256, time.time() - 60) == (0 if when.startswith("before") else len(one.data))
    assert directory.read(file_name(one.sha256)) == one.data
    assert list((directory.root / "removed").iterdir()) == []


def test_a_file_removed_while_the_system_touches_it_is_written_again(
    directory: ScreenshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, writer = image("one"), SharedScreenshots(directory)
    writer.put(one)
    age(directory, one.sha256)
    touch = os.utime

    def remove_before_touching(path: str) -> None:
        found = os.open(path, os.O_RDONLY)
        assert directory.remove(one.sha256, time.time() - 60) == len(one.data)
        touch(found)
        os.close(found)

    monkeypatch.setattr(os, "utime", remove_before_touching)
    writer.put(one)
    assert directory.read(file_name(one.sha256)) == one.data


def test_writers_and_removers_by_the_hundred(directory: ScreenshotDirectory) -> None:
    pictures, writer = [image(f"picture {number}") for number in range(4)], SharedScreenshots(directory)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(150):
            for one in pictures:
                writer.put(one)
                age(directory, one.sha256)
            begin = threading.Barrier(3)

            def remove() -> None:
                begin.wait()  # noqa: B023 - the round's own
                for one in pictures:
                    directory.remove(one.sha256, time.time() - 60)

            def put() -> None:
                begin.wait()  # noqa: B023 - the round's own
                for one in pictures:
                    assert writer.put(one).data == b""

            for done in [pool.submit(remove), pool.submit(put), pool.submit(put)]:
                done.result()
            for one in pictures:
                assert directory.read(file_name(one.sha256)) == one.data


def test_what_a_killed_process_had_set_aside_is_put_back(directory: ScreenshotDirectory) -> None:
    one = image("one")
    directory.write(file_name(one.sha256), one.data)
    age(directory, one.sha256)
    code = (
        "import sys; from pathlib import Path; from dart.screenshots.directory import ScreenshotDirectory;"
        "ScreenshotDirectory(Path(sys.argv[1])).remove(bytes.fromhex(sys.argv[2]), 2e6)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(directory.root), one.sha256.hex()],
        env={**os.environ, VARIABLE: "screenshot-aside"}, check=False,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL
    assert not path_of(directory, one.sha256).exists()
    assert directory.put_back() == 1
    assert directory.read(file_name(one.sha256)) == one.data
    assert directory.put_back() == 0
