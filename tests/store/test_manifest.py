"""A sealed folder is whole; every byte that goes astray is noticed and named, also in folders without a manifest."""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dart import failpoints, manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "v000007"
    made.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (made / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"12345678")
    with zipfile.ZipFile(made / "trainer_state.pt", "w") as archive:
        archive.writestr("data", "state" * 100)
    (made / "config.json").write_text("{}")
    return made


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def test_what_was_sealed_is_whole(folder: Path) -> None:
    manifest.seal(folder)
    assert manifest.problem(folder) is None
    manifest.seal(folder)
    assert manifest.problem(folder) is None, "sealing again does not count the manifest"


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda f: cut(f / "model.safetensors"), r"model\.safetensors has \d+ bytes of \d+"),
        (lambda f: flip(f / "model.safetensors"), r"model\.safetensors has other bytes than were written"),
        (lambda f: flip(f / "trainer_state.pt"), r"trainer_state\.pt has other bytes than were written"),
        (lambda f: (f / "trainer_state.pt").unlink(), r"trainer_state\.pt is not there"),
        (lambda f: cut(f / manifest.NAME), None),
        (lambda f: (f / manifest.NAME).write_text("{}"), r"its manifest\.json is broken"),
        (lambda f: (f / manifest.NAME).write_bytes(b"\xff"), r"its manifest\.json is broken"),
        (lambda f: (f / manifest.NAME).write_text('{"files": {"x": 3}}'), r"its manifest\.json is broken"),
        (lambda f: f.rename(f.with_name("elsewhere")), "the folder is not there"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(folder: Path, harm: Callable[[Path], object], told: str | None) -> None:
    manifest.seal(folder)
    harm(folder)
    why = manifest.problem(folder)
    if told is None:
        assert why is None, "a line's end is no part of the list"
    else:
        assert why is not None
        assert re.search(told, why)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.pt"])
def test_without_a_manifest_a_cut_file_is_noticed(folder: Path, name: str) -> None:
    assert manifest.problem(folder) is None
    cut(folder / name)
    assert manifest.problem(folder) == f"{name} is cut short"


def test_without_a_manifest_weights_must_be_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert manifest.problem(folder) == "it has no weights"


def test_a_folder_that_was_moved_aside_gets_its_name_again(folder: Path) -> None:
    folder.rename(manifest.aside(folder))
    manifest.put_back(folder.parent)
    assert (folder / "config.json").exists()
    other = folder.parent / f".{folder.name}.999.old"
    other.mkdir()
    manifest.put_back(folder.parent)
    assert other.exists(), "the name is taken"


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is forced onto the disk, by the name that it has at that moment, and what is renamed, in their order."""
    made: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        number = os.fstat(descriptor).st_ino
        (path,) = [path for path in (tmp_path, *tmp_path.rglob("*")) if path.stat().st_ino == number]
        made.append(f"sync {path.relative_to(tmp_path)}")

    def renamed(path: Path, target: Path) -> Path:
        made.append(f"{path.relative_to(tmp_path)} becomes {target.relative_to(tmp_path)}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    return made


def write(folder: Path) -> None:
    with manifest.written(folder) as into:
        (into / "tokenizer" / "words").mkdir(parents=True)
        (into / "model.safetensors").write_text("weights")
        (into / "tokenizer" / "words" / "a.txt").write_text("a")


def test_a_written_folder_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, done: list[str]) -> None:
    """A power failure leaves what was synced: the files, the directories that name them, then the new name."""
    new, old = f".v1.{os.getpid()}.tmp", f".v1.{os.getpid()}.old"
    sealed = [
        {f"sync {new}/model.safetensors", f"sync {new}/tokenizer/words/a.txt"},
        {f"sync {new}/manifest.json"},
        {f"sync {new}", f"sync {new}/tokenizer", f"sync {new}/tokenizer/words"},
    ]

    def steps() -> list[set[str]]:
        return [set(done[:2]), set(done[2:3]), set(done[3:6])]

    write(tmp_path / "v1")
    assert steps() == sealed
    assert done[6:] == [f"{new} becomes v1", "sync ."]
    done.clear()
    write(tmp_path / "v1")
    assert steps() == sealed
    assert done[6:] == [f"v1 becomes {old}", f"{new} becomes v1", "sync ."], "the old one is there until then"
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_a_disk_that_fails_between_the_two_renames_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "v1")
    monkeypatch.setattr(failpoints, "_all", failpoints.armed("folder-aside=fail:EIO"))
    with pytest.raises(OSError, match="folder-aside"):
        write(tmp_path / "v1")
    assert manifest.problem(tmp_path / "v1") is None
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_the_entries_of_new_folders_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[Path] = []
    monkeypatch.setattr(manifest, "to_disk", forced.append)
    with manifest.written(tmp_path / "run" / "checkpoints" / "v000001") as folder:
        (folder / "w").write_text("1")
    assert forced[:2] == [tmp_path, tmp_path / "run"], "the entries of run and of checkpoints"
    assert forced[-1] == tmp_path / "run" / "checkpoints", "the checkpoint's own, when it is in its place"
    forced.clear()
    with manifest.written(tmp_path / "run" / "checkpoints" / "v000002") as folder:
        (folder / "w").write_text("1")
    assert tmp_path not in forced and tmp_path / "run" not in forced, "they are there already"


def test_what_cannot_be_removed_is_told_and_what_is_gone_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlink = os.unlink

    def refused(path: str, *, dir_fd: int | None = None) -> None:
        if path == "config.json":
            raise PermissionError(13, "Permission denied")
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refused)
    manifest.remove(folder)
    assert [file.name for file in folder.iterdir()] == ["config.json"], "all that can be is removed"
    assert "config.json cannot be removed, and takes up space: [Errno 13]" in caplog.text
    monkeypatch.undo()
    caplog.clear()
    for _ in range(2):
        manifest.remove(folder)
    assert not folder.exists() and not caplog.text
