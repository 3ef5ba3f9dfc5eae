"""A folder that can be verified: `manifest.json`, written last, names its files with their sizes and SHA-256.

Used for checkpoints: the trainer writes one through `written`, and `problem` checks it before a run resumes from it.
A folder from before there were manifests is checked as far as its files allow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from dart.failpoints import failpoint

NAME = "manifest.json"
_ASIDE, _UNFINISHED = ".old", ".tmp"
_THREADS = 4
"""Files hashed at once: hashing releases the interpreter lock."""
log = logging.getLogger(__name__)
_OWN: set[Path] = set()
"""The hidden folders that this process is using now."""


def seal(folder: Path) -> None:
    """Force every file in the folder onto the disk, then their manifest, then the folder and all folders in it."""
    files = _files(folder)
    for file in files:
        to_disk(file)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(file_digest, files)
        listed = {
            str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": digest}
            for file, digest in zip(files, digests, strict=True)
        }
    manifest = folder / NAME
    manifest.write_text(json.dumps({"files": listed}, indent=1) + "\n", encoding="utf-8")
    to_disk(manifest)
    for directory in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        to_disk(directory)


def problem(folder: Path) -> str | None:
    """How the folder differs from what was sealed; None if it is intact. Reads every byte of it."""
    if not folder.is_dir():
        return "the folder is not there"
    try:
        return _problem(folder)
    except OSError as error:
        return f"it cannot be read ({error})"


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """Write a sealed folder: into the one that this gives, which takes `folder`'s place when the block has ended.

    A reader sees the old folder or the new one, never a part, also after a power failure. Its parent is for such
    folders alone, and one process alone writes there; what an earlier one left there is removed.
    """
    _make(folder.parent)
    remove_left(folder.parent)
    temporary, previous = folder.parent / f".{folder.name}.{os.getpid()}{_UNFINISHED}", aside(folder)
    _OWN.update((temporary, previous))
    try:
        temporary.mkdir()
        yield temporary
        failpoint("folder-written")
        seal(temporary)
        failpoint("folder-sealed")
        if folder.exists():
            folder.rename(previous)
            failpoint("folder-aside")
        temporary.rename(folder)
        to_disk(folder.parent)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        if previous.exists() and not folder.exists():  # the disk failed in between: what was there stays
            previous.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        _OWN.difference_update((temporary, previous))


def remove_left(parent: Path) -> None:
    """Remove the hidden folders of a process that was killed while it wrote: unfinished ones, and those set aside."""
    for left in (*parent.glob(f".*{_UNFINISHED}"), *parent.glob(f".*{_ASIDE}")):
        if left not in _OWN:
            shutil.rmtree(left, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove what `written` made, or what is left of it. What cannot be removed is logged."""

    def failed(_: object, path: str, found: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(found[1], FileNotFoundError):
            log.warning("%s cannot be removed, and takes up space: %s", path, found[1])

    shutil.rmtree(folder, onerror=failed)


def _make(folder: Path) -> None:
    """Make a folder and those above it, such that a power failure does not take them away with what is in them."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        to_disk(folder.parent)


def aside(folder: Path) -> Path:
    """Where a sealed folder waits while another takes its place."""
    return folder.parent / f".{folder.name}.{os.getpid()}{_ASIDE}"


def put_back(parent: Path) -> None:
    """Restore folders that were moved aside, if the process was killed before their replacements were in place."""
    for waiting in parent.glob(f".*{_ASIDE}"):
        folder = parent / waiting.name[1 : -len(_ASIDE)].rpartition(".")[0]
        if not folder.exists():
            waiting.rename(folder)


def to_disk(path: Path) -> None:
    """A file's bytes, or a directory's entries, survive a power failure from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _problem(folder: Path) -> str | None:
    try:
        listed = json.loads((folder / NAME).read_text(encoding="utf-8"))["files"]
        wanted = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except FileNotFoundError:
        return _unsealed_problem(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {NAME} is broken ({error!r})"
    for name, (size, _) in wanted.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is not there"
        if (found := file.stat().st_size) != size:
            return f"{name} has {found} bytes of {size}"
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, digest in zip(wanted, pool.map(file_digest, [folder / name for name in wanted]), strict=True):
            if digest != wanted[name][1]:
                return f"{name} has other bytes than were written"
    return None


def _unsealed_problem(folder: Path) -> str | None:
    """What can be seen without a manifest: weights that are cut short, and PyTorch files, which end with an index."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return "it has no weights"
    for file in weights:
        if not _whole_safetensors(file):
            return f"{file.name} is cut short"
    for file in sorted(folder.glob("*.pt")):
        if not zipfile.is_zipfile(file):
            return f"{file.name} is cut short"
    return None


def _whole_safetensors(file: Path) -> bool:
    """The header says where the last tensor ends. A header that is broken itself is taken for a cut one."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            return False
        try:
            tensors = json.loads(opened.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return file.stat().st_size == 8 + length + max(ends, default=0)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != NAME)


def file_digest(file: Path) -> str:
    """The sha256 of the file's content, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
