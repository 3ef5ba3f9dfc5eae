"""Regular files of a run's directory, whoever wrote it: what stands in place of one may be a FIFO, a device, a folder,
a link to somebody's secret, or a file without end.

Nothing here waits for another process, follows a link below the given folder, or reads more than is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


def is_regular(file: Path) -> bool:
    """Whether a regular file, and no link to one, is there."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except (OSError, ValueError):
        return False


def open_regular(root: Path, name: str) -> int:
    """The descriptor of the file `name` (its path below `root`), to be read. Raises FileNotFoundError where there is
    none, and OSError for what is no regular file, or is reached by a link."""
    *folders, last = Path(name).parts
    with contextlib.ExitStack() as held:
        folder = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
        held.callback(os.close, folder)
        for part in folders:
            folder = os.open(part, _FOLDER, dir_fd=folder)
            held.callback(os.close, folder)
        # Looked at first: to open a device may already do something.
        if not stat.S_ISREG(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _irregular(root / name)
        descriptor = os.open(last, _FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(root / name)
    return descriptor


def read_regular(root: Path, name: str, most: int) -> bytes:
    """Its bytes. Raises as `open_regular`, and OSError where there are more than `most`."""
    with os.fdopen(open_regular(root, name), "rb", buffering=0) as file:
        size, data = os.fstat(file.fileno()).st_size, b""
        if size <= most:
            data = _read(file.fileno(), most + 1)
    if size > most or len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(root / name))
    return data


def _read(descriptor: int, most: int) -> bytes:
    parts: list[bytes] = []
    while most and (part := os.read(descriptor, min(most, 1 << 20))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def _irregular(file: Path) -> OSError:
    return OSError(errno.EINVAL, "it is no regular file", str(file))
