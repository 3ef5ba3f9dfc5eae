"""Screenshots by the SHA-256 of their bytes, in a directory or behind any fsspec URL.

Invariants: a blob is whole or absent (a temporary name, then a rename; an object store's put); a digest that is already
held is not written again; `get` returns bytes that hash to the digest or raises. Layout: `ab/abcdef…`.

Once `put` returns, the blob outlives the process. A local blob is not forced onto the disk, so a power failure may lose
the newest ones; `get` then reports it, and putting the blob again repairs it. Env workers with access to the directory
write their screenshots there themselves (`dart.screenshots.shared`).

The plain methods block and may be called from any thread; the ones ending in `_async` do the same in a small pool of
threads: with one hop however many blobs there are, or many requests at once for an object store.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from dart.core.types import Image
from dart.errors import UserError
from dart.screenshots.directory import ScreenshotDirectory, file_name
from dart.shortage import ready_threads, shortage
from dart.store.elsewhere.remote import RemoteFiles
from dart.store.patience import Patience

T = TypeVar("T")


class BlobError(UserError):
    """A blob is not available."""


class BlobMissing(BlobError):
    """No blob of this digest is in the store."""


class BlobUnreachable(BlobError):
    """The object store does not answer, or refuses."""


class BlobUnreadable(BlobError):
    """The object store fails for this blob alone."""


class BlobCorrupt(BlobError):
    """The bytes do not match the digest."""


class _Files(Protocol):
    """Named byte strings. `read` and `size` raise FileNotFoundError. `holds` also keeps them from being removed
    soon."""

    def write(self, name: str, data: bytes) -> None: ...

    def read(self, name: str) -> bytes: ...

    def size(self, name: str) -> int: ...

    def holds(self, name: str, size: int | None = None) -> bool: ...


_THREADS, _THREADS_OF_REMOTE = 4, 32
"""A request to an object store takes tens of milliseconds, most of them waiting."""
_AWAY_SECONDS = 1.0
"""Between two tries of an object store that fails. Its driver has tried several times by itself."""
_TRIES_BESIDE_OTHERS = 3
"""Tries before a request is given up, if others are answered meanwhile."""


def files_at(where: str | Path) -> ScreenshotDirectory | RemoteFiles:
    """The files of a directory, or behind a URL. Raises UserError where there is no driver."""
    local = str(where).removeprefix("file://")
    return RemoteFiles(local) if "://" in local else ScreenshotDirectory(Path(local))


class BlobStore:
    """`where` is a directory or an fsspec URL, for example s3://bucket/blobs."""

    def __init__(self, where: str | Path) -> None:
        self.where = str(where)
        files = files_at(where)
        self.directory = files if isinstance(files, ScreenshotDirectory) else None
        """The directory where other processes may see it, if any."""
        if self.directory:
            self.directory.prepare()
        self._files: _Files = files
        self.patience = Patience(0.0, "the object store of run.blobs, which fails")
        """With an object store that has answered before, and with what the machine is short of."""
        self._answers = 0
        self._away_since: float | None = None
        """When the first request failed that none has been answered since (monotonic seconds)."""
        self._told = False
        self._lock = threading.Lock()
        self._ends = threading.Event()
        threads = _THREADS if self.directory else _THREADS_OF_REMOTE
        self._pool = ready_threads(threads, "blobs")

    async def check(self, what: str) -> None:
        """Raises UserError, with the name of the config's field, where an object store takes nothing."""
        if isinstance(files := self._files, RemoteFiles):
            await self._in_pool(lambda: files.check(what))
            self._answered()

    def close(self) -> None:
        """Waits for the pool's current work, but not for an object store that is away."""
        self._ends.set()
        self._pool.shutdown()

    def put(self, image: Image) -> None:
        """Stores an image's bytes. Without bytes (`data` empty) the blob must already be held, else BlobMissing is
        raised. Raises BlobError, and OSError where a directory fails."""
        self._asked(lambda: self._put(image))

    def _put(self, image: Image) -> None:
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
        for image in self._unique(images):
            self.put(image)

    @staticmethod
    def _unique(images: Iterable[Image]) -> list[Image]:
        unique: dict[bytes, Image] = {}
        for image in images:
            other = unique.get(image.sha256)
            if other is not None and image.data and other.data and image.data != other.data:
                raise _other_bytes(image)
            if image.data or other is None:
                unique[image.sha256] = image
        return list(unique.values())

    def get(self, digest: bytes) -> bytes:
        """The bytes of a digest. Raises BlobError, and OSError where a directory fails."""
        try:
            data = self._asked(lambda: self._files.read(file_name(digest)))
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
        """Bytes of a blob. Raises BlobError, and OSError where a directory fails."""
        held = self._held(digest)
        if held is None:
            raise self._missing(digest)
        return held

    async def put_async(self, image: Image) -> None:
        await self._in_pool(lambda: self.put(image))

    async def put_many_async(self, images: Iterable[Image]) -> None:
        if self.directory:
            await self._in_pool(lambda: self.put_many(images))
        else:
            await _all(self.put_async(image) for image in self._unique(images))

    async def get_async(self, digest: bytes) -> bytes:
        return await self._in_pool(lambda: self.get(digest))

    async def get_many_async(self, digests: Iterable[bytes]) -> Mapping[bytes, bytes]:
        if self.directory:
            return await self._in_pool(lambda: self.get_many(digests))
        wanted = list(set(digests))
        return dict(zip(wanted, await _all(map(self.get_async, wanted)), strict=True))

    async def damaged(self, digests: Iterable[bytes]) -> set[bytes]:
        """Those that a directory no longer holds as they were: gone, empty, changed, or not a file, as a power failure
        or a failing disk leaves them. What is left of them is set aside, so that they can be put again.

        Not of an object store, which sees to that itself.
        """
        directory = self.directory
        return await self._in_pool(lambda: set(filter(self._is_damaged, digests))) if directory else set()

    def _is_damaged(self, digest: bytes) -> bool:
        try:
            self.get(digest)
        except (BlobError, OSError):
            assert self.directory is not None, "only a directory is looked through"
            self.directory.set_aside(file_name(digest))
            return True
        return False

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _held(self, digest: bytes) -> int | None:
        try:
            return self._asked(lambda: self._files.size(file_name(digest)))
        except FileNotFoundError:
            return None

    def _asked(self, call: Callable[[], T]) -> T:
        """What `call` returns. It is made again, as `patience` has it, where an object store fails or the machine is
        short of something.

        Raises FileNotFoundError, BlobUnreachable, BlobUnreadable, and OSError where a directory fails.
        """
        before = self._answers
        for tries in itertools.count(1):
            try:
                result = call()
            except FileNotFoundError:
                self._answered()
                raise
            except OSError as error:
                short = shortage(error)
                if self.directory:
                    if not short or not self._waits(before, short):
                        raise
                elif not short and tries >= _TRIES_BESIDE_OTHERS and self._answers > before:
                    raise BlobUnreadable(
                        f"the object store {self.where} answers, but not for this screenshot ({error})"
                    ) from error
                elif not self._waits(before, short):
                    raise BlobUnreachable(
                        f"the object store {self.where} failed ({error}): check it and its keys"
                    ) from error
                self._ends.wait(_AWAY_SECONDS)
            else:
                self._answered()
                return result
        raise AssertionError("it is asked until it answers, or is given up")

    def _waits(self, before: int, short: str) -> bool:
        """Whether a request that has failed is made again. The wait is that of all requests together: it began with
        the first that failed. `before`: how many had been answered when this one began. `short`: of what the machine
        is short, if that is why."""
        with self._lock:
            if self._away_since is None:
                self._away_since = time.monotonic()
            waited = time.monotonic() - self._away_since
            known = self._answers or short
            if self._ends.is_set() or not known or waited >= self.patience.seconds:
                self.patience.end()
                return False
            alone = self._answers == before
            self._told |= alone
        if alone:
            self.patience.tell(waited, over=False, short=short)
        return True

    def _answered(self) -> None:
        """The store is there."""
        with self._lock:
            self._answers += 1
            since, self._away_since = self._away_since, None
            told, self._told = self._told, False
        if told and since is not None:
            self.patience.tell(time.monotonic() - since, over=True)

    def _missing(self, digest: bytes) -> BlobMissing:
        return BlobMissing(
            f"blob {digest.hex()} is not in {self.where}: name the directory or URL that the run wrote its blobs to"
        )


async def _all(requests: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """The results, when every request is over. Raises what the first failed one raised."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _other_bytes(image: Image) -> BlobCorrupt:
    return BlobCorrupt(f"image {image.sha256.hex()}: its {len(image.data)} bytes have another SHA-256: send it again")
