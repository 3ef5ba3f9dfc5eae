"""Errors that a person is shown: one message that names what is wrong, the value, and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

MAY_PASS, USER_ERROR, INTERRUPTED = 1, 2, 130
"""Exit codes of dart's commands: for a failure after which the same command may succeed, for something that the user
can fix, and for a run that was told to end early."""
NOT_READY = 4
"""Exit code of a worker that gave up starting. However long that took, it has not worked."""


class UserError(Exception):
    """Something the user can fix. The command line prints the message alone and exits with `exit_code`."""

    def __init__(self, *arguments: object, exit_code: int = USER_ERROR) -> None:
        super().__init__(*arguments)
        self.exit_code = exit_code


class ProcessLost(UserError):
    """What the run needs has ended, or hangs: new processes can continue the run from what it has kept.

    `why`: the message without the remedy, for those who apply it themselves.
    """

    def __init__(self, why: str, remedy: str = "", *, exit_code: int = USER_ERROR) -> None:
        super().__init__(f"{why}; all finished work is kept; {remedy}" if remedy else why, exit_code=exit_code)
        self.why = why


def unwritable(error: OSError, remedy: str) -> str:
    """Why something cannot be written, and the remedy; that for a full disk is room on it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "make room on its disk, or choose another"
    return f"({error.strerror}): {remedy}"


def first_of(errors: BaseException) -> BaseException:
    """The first error in nested exception groups that is not a group itself."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def first_line(error: Exception) -> str:
    """What the error says, for a sentence about it: its first line, of which at most 300 characters; or its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


@contextmanager
def ungrouped(*kinds: type[BaseException]) -> Iterator[None]:
    """Errors of these kinds leave as the first of them, without the group that a TaskGroup puts them in.

    A group that has other errors too leaves whole. An `except*` clause cannot do this: what it raises is put in a group
    again by Python 3.11.2, which Debian 12 has, and not by 3.11.7.
    """
    try:
        yield
    except BaseExceptionGroup as errors:
        found, others = errors.split(kinds)
        if found is None or others is not None:
            raise
        raise first_of(found) from None
