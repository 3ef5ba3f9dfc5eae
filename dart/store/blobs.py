"""Screenshots by the SHA-256 of their bytes, in a directory or behind any fsspec URL.

Invariants: a blob is whole or absent (a temporary name, then a rename; an object store's put); a digest that is already
held is not written again; `get` returns bytes that hash to the digest or raises. Layout: `ab/abcdef…`.

Once `put` returns, the blob outlives the process. A local blob is not forced onto the disk, so a power failure may lose
the newest ones; `get` then reports it, and putting the blob again repairs it. Env workers with access to the directory
write their screenshots there themselves (`dart.screenshots.shared`).

The plain methods block and may be called from any thread; the ones ending in `_async` do the same in a small pool of
threads, with one hop however many blobs there are.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from fsspec.core import url_to_fs

from dart.core.types import Image
from dart.errors import UserError
from dart.screenshots.directory import ScreenshotDirectory, file_name

T = TypeVar("T")

# On these, a put is atomic by itself, and a rename would be a copy and a delete.
_ATOMIC_PUT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}
_TEMPORARY = "tmp"


class BlobError(UserError):
    """A blob is not available."""


class BlobMissing(BlobError):
    """No blob of this digest is in the store."""


class BlobCorrupt(BlobError):
    """The bytes do not match the digest."""


class _Files(Protocol):
    """Named byte strings. `read` and `size` raise FileNotFoundError. `holds` also keeps them from being removed
    soon."""

    def write(self, name: str, data: bytes) -> None: ...

    def read(self, name: str) -> bytes: ...

    def size(self, name: str) -> int: ...

    def holds(self, name: str, size: int | None = None) -> bool: ...


class _RemoteFiles:
    """Any store that fsspec has a driver for."""

    def __init__(self, url: str) -> None:
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"blob URL {url}: {error}: install the driver of that protocol, or use a directory"
            ) from None
        protocol = self._fs.protocol
        self._atomic = bool(_ATOMIC_PUT & set([protocol] if isinstance(protocol, str) else protocol))

    def write(self, name: str, data: bytes) -> None:
        target = f"{self._root}/{name}"
        if self._atomic:
            self._fs.pipe_file(target, data)
            return
        temporary = f"{self._root}/{_TEMPORARY}/{secrets.token_hex(16)}"
        self._fs.makedirs(f"{self._root}/{_TEMPORARY}", exist_ok=True)
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(temporary, data)
        self._fs.mv(temporary, target)

    def read(self, name: str) -> bytes:
        data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return data

    def size(self, name: str) -> int:
        return int(self._fs.size(f"{self._root}/{name}"))

    def holds(self, name: str, size: int | None = None) -> bool:
        try:
            held = self.size(name)
        except FileNotFoundError:
            return False
        return held == size if size is not None else held > 0


class BlobStore:
    """`where` is a directory or an fsspec URL, for example s3://bucket/blobs."""

    def __init__(self, where: str | Path, threads: int = 4) -> None:
        self.where = str(where)
        local = self.where.removeprefix("file://")
        self.directory = None if "://" in local else ScreenshotDirectory(Path(local))
        """The directory where other processes may see it, if any."""
        if self.directory:
            self.directory.prepare()
        self._files: _Files = self.directory or _RemoteFiles(local)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="blobs")

    def close(self) -> None:
        """Waits for the pool's current work."""
        self._pool.shutdown()

    def put(self, image: Image) -> None:
        """Stores an image's bytes. Without bytes (`data` empty) the blob must already be held, else BlobMissing is
        raised."""
        name = file_name(image.sha256)
        if not image.data:
            if not self._files.holds(name):
                raise self._missing(image.sha256)
            return
        # Checked even if the digest is held: wrong bytes would be passed on from memory under it.
        if hashlib.sha256(image.data).digest() != image.sha256:
            raise _other_bytes(image)
        if self._files.holds(name, len(image.data)):
            return  # a power failure may leave another length: then it is written again
        self._files.write(name, image.data)

    def put_many(self, images: Iterable[Image]) -> None:
        """Stores each digest once, however often it comes; bytes win over an image without. Raises as `put`."""
        unique: dict[bytes, Image] = {}
        for image in images:
            other = unique.get(image.sha256)
            if other is not None and image.data and other.data and image.data != other.data:
                raise _other_bytes(image)
            if image.data or other is None:
                unique[image.sha256] = image
        for image in unique.values():
            self.put(image)

    def get(self, digest: bytes) -> bytes:
        """The bytes of a digest. Raises BlobMissing, BlobCorrupt."""
        try:
            data = self._files.read(file_name(digest))
        except FileNotFoundError:
            raise self._missing(digest) from None
        if hashlib.sha256(data).digest() != digest:
            raise BlobCorrupt(
                f"blob {digest.hex()} in {self.where} is corrupt ({len(data)} bytes with another SHA-256): "
                "restore it from a copy, or delete it and do without its trajectories"
            )
        return data

    def get_many(self, digests: Iterable[bytes]) -> Mapping[bytes, bytes]:
        """Digest → bytes. Raises what `get` raises."""
        return {digest: self.get(digest) for digest in set(digests)}

    def has(self, digest: bytes) -> bool:
        return self._held(digest) is not None

    def size(self, digest: bytes) -> int:
        """Bytes of a blob. Raises BlobMissing."""
        held = self._held(digest)
        if held is None:
            raise self._missing(digest)
        return held

    async def put_async(self, image: Image) -> None:
        await self._in_pool(lambda: self.put(image))

    async def put_many_async(self, images: Iterable[Image]) -> None:
        await self._in_pool(lambda: self.put_many(images))

    async def get_async(self, digest: bytes) -> bytes:
        return await self._in_pool(lambda: self.get(digest))

    async def get_many_async(self, digests: Iterable[bytes]) -> Mapping[bytes, bytes]:
        return await self._in_pool(lambda: self.get_many(digests))

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _held(self, digest: bytes) -> int | None:
        try:
            return self._files.size(file_name(digest))
        except FileNotFoundError:
            return None

    def _missing(self, digest: bytes) -> BlobMissing:
        return BlobMissing(
            f"blob {digest.hex()} is not in {self.where}: name the directory or URL that the run wrote its blobs to"
        )


def _other_bytes(image: Image) -> BlobCorrupt:
    return BlobCorrupt(f"image {image.sha256.hex()}: its {len(image.data)} bytes have another SHA-256: send it again")
