"""Named byte strings behind any fsspec URL, an object store above all.

A name is written once with the same bytes, because it is their digest: what this process knows to be there is neither
looked for nor written again. Everything that goes wrong is an OSError; a driver tries again by itself first.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator

from fsspec.core import url_to_fs

from dart.errors import UserError

# On these, a put is atomic by itself, and a rename would be a copy and a delete.
_ATOMIC_PUT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}
_TEMPORARY = "tmp"
_MOST_KNOWN = 100_000
"""Names, some 20 MB."""


class RemoteFiles:
    """`read` and `size` raise FileNotFoundError, all methods OSError. Any thread may call them."""

    def __init__(self, url: str) -> None:
        """Raises UserError where there is no driver."""
        self.url = url
        try:
            # Listings are not kept: another process adds to them.
            self._fs, self._root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"{url}: {error}: install the driver of that protocol (for s3://, the extra s3), or leave out the "
                "field that names it (run.blobs, checkpoint.upload)"
            ) from None
        except Exception as error:  # the driver's own, for example of a machine without credentials
            raise UserError(
                f"{url} cannot be used ({type(error).__name__}: {error}): check its keys in the environment "
                "(docs/stores.md)"
            ) from error
        protocol = self._fs.protocol
        self._atomic = bool(_ATOMIC_PUT & set([protocol] if isinstance(protocol, str) else protocol))
        self._known: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, what: str) -> None:
        """Write a small file. Raises UserError, with the name of the config's field."""
        try:
            self.write("written-by-dart", b"dart can write here.\n")
        except OSError as error:
            raise UserError(
                f"{what}: {self.url} cannot be written to ({error}): make the bucket, and check the endpoint, the keys "
                "and their rights in the environment (docs/stores.md)"
            ) from None

    def write(self, name: str, data: bytes) -> None:
        try:
            with as_os_error():
                self._write(f"{self._root}/{name}", data)
        except FileNotFoundError as error:  # which only a missing file may be, for those who read
            raise OSError(f"there is no such bucket: {error}") from error
        self._know(name, len(data))

    def _write(self, target: str, data: bytes) -> None:
        if self._atomic:
            self._fs.pipe_file(target, data)
            return
        temporary = f"{self._root}/{_TEMPORARY}/{secrets.token_hex(16)}"
        self._fs.makedirs(f"{self._root}/{_TEMPORARY}", exist_ok=True)
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(temporary, data)
        self._fs.mv(temporary, target)

    def read(self, name: str) -> bytes:
        with as_os_error():
            data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return data

    def size(self, name: str) -> int:
        with as_os_error():
            return int(self._fs.size(f"{self._root}/{name}"))

    def holds(self, name: str, size: int | None = None) -> bool:
        """Asks the store only where it must. With a size, the caller has the bytes, and writing them costs as little
        as asking."""
        held = self._known.get(name)
        if held is None and (size is not None and self._atomic):
            return False
        try:
            held = self.size(name) if held is None else held
        except FileNotFoundError:
            return False
        if held > 0:
            self._know(name, held)
        return held == size if size is not None else held > 0

    def _know(self, name: str, size: int) -> None:
        with self._lock:
            self._known[name] = size
            self._known.move_to_end(name)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)


@contextlib.contextmanager
def as_os_error(*passing: type[Exception]) -> Iterator[None]:
    """Raises OSError for whatever goes wrong inside; UserError and `passing` ones pass through."""
    try:
        yield
    except (OSError, UserError):
        raise
    except passing:
        raise
    except Exception as error:
        # Drivers raise what their SDK does: botocore's, gcsfs's and Azure's errors share no class.
        raise OSError(f"{type(error).__name__}: {error}") from error
