"""Errors that a person is shown: one message that names what is wrong, the value, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something the user can fix. The command line prints the message alone and exits with `exit_code`."""

    def __init__(self, *arguments: object, exit_code: int = 2) -> None:
        super().__init__(*arguments)
        self.exit_code = exit_code


class ProcessLost(UserError):
    """What the run needs has ended, or hangs: new processes can continue the run from its last checkpoint.

    `why`: the message without that remedy, for those who apply it themselves.
    """

    def __init__(self, why: str, *, exit_code: int = 2) -> None:
        super().__init__(f"{why}; all finished work is kept, and --resume continues from it", exit_code=exit_code)
        self.why = why


def first_of(errors: BaseException) -> BaseException:
    """The first error in nested exception groups that is not a group itself."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


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
