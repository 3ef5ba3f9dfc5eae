"""Copies of sealed folders, such as checkpoints, behind any fsspec URL.

Invariant: a copy is complete exactly when it has its `manifest.json`, which is copied last and removed first. A folder
is read whole and compared with its manifest before it is copied, and again after it came back.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from dart import manifest
from dart.errors import UserError
from dart.store.elsewhere.remote import as_os_error

_BLOCK_BYTES = 16 << 20


class Stopped(Exception):
    """The caller has asked to stop copying."""


def copy_out(folder: Path, url: str, stop: threading.Event) -> int:
    """Copy the folder to `url`/its name. Returns the bytes copied. Raises OSError, Stopped.

    Blocks until it is done, or until the end of a block after `stop` is set.
    """
    if why := manifest.problem(folder):
        raise OSError(f"{folder} is not copied, because {why}")
    with _at(url) as (fs, root):
        target = f"{root}/{folder.name}"
        _remove(fs, target)  # a copy of an abandoned checkpoint of the same version
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return sum(
            _put(fs, file, f"{target}/{file.relative_to(folder)}", stop)
            for file in sorted(files, key=lambda file: file.name == manifest.NAME)
        )


def copy_in(url: str, folder: Path) -> None:
    """Make `folder` from the copy at `url`; nothing is there if it fails. Raises UserError."""
    try:
        with _at(url) as (fs, root):
            if not fs.exists(f"{root}/{manifest.NAME}"):
                raise UserError(
                    f"{url} is not a complete copy of a checkpoint: it has no {manifest.NAME}: use another version"
                )
            with manifest.written(folder) as new:
                for name in fs.find(root):
                    inside = new / str(name).removeprefix(f"{root}/")
                    inside.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(name, str(inside))
                if why := manifest.problem(new):
                    raise UserError(f"{url} is damaged: {why}: use another version")
    except OSError as error:
        raise UserError(
            f"{url} cannot be copied to {folder} ({error}): check the store, its keys and the disk"
        ) from None


def copies(url: str) -> list[str]:
    """The names of the checkpoints below `url`, complete or not, in order. Raises OSError.

    Anything else there is let be: the run's screenshots may be in the same folder.
    """
    with _at(url) as (fs, root):
        try:
            names = [str(name).rstrip("/").rpartition("/")[2] for name in fs.ls(root, detail=False)]
        except FileNotFoundError:
            return []
    return sorted(name for name in names if re.fullmatch(r"v\d{6,}", name))


def incomplete_copies(url: str) -> set[str]:
    """The names of those copies that broke off, or are being made. Raises OSError."""
    broken = set()
    with _at(url) as (fs, root):
        for name in copies(url):
            try:
                fs.info(f"{root}/{name}/{manifest.NAME}")  # `exists` takes any trouble for a no
            except FileNotFoundError:
                broken.add(name)
    return broken


def remove_copy(url: str) -> None:
    """Raises OSError."""
    with _at(url) as (fs, root):
        _remove(fs, root)


def _remove(fs: AbstractFileSystem, folder: str) -> None:
    for name in (f"{folder}/{manifest.NAME}", folder):
        with contextlib.suppress(FileNotFoundError):
            fs.rm(name, recursive=True)


def _put(fs: AbstractFileSystem, file: Path, target: str, stop: threading.Event) -> int:
    if stop.is_set():
        raise Stopped
    fs.makedirs(target.rpartition("/")[0], exist_ok=True)
    with file.open("rb") as source, fs.open(target, "wb", block_size=_BLOCK_BYTES) as out:
        while block := source.read(_BLOCK_BYTES):
            if stop.is_set():
                raise Stopped
            out.write(block)
    size = file.stat().st_size
    if (there := int(fs.size(target))) != size:
        raise OSError(f"{target} has {there} bytes of {size}")
    return size


@contextlib.contextmanager
def _at(url: str) -> Iterator[tuple[AbstractFileSystem, str]]:
    """The file system and the path in it. Raises OSError, and UserError where there is no driver."""
    with as_os_error(Stopped):
        try:
            fs, root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url}: {error}: install the driver of that protocol (for s3://, the extra s3)") from None
        yield fs, root.rstrip("/")
