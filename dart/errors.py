"""Errors that are told to a person: one message that names what is wrong, the value, and the remedy."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The command line prints the message alone and exits with `exit_code`."""

    def __init__(self, *arguments: object, exit_code: int = 2) -> None:
        super().__init__(*arguments)
        self.exit_code = exit_code


def first_of(errors: BaseException) -> BaseException:
    """The first error in nested exception groups that is not a group itself."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors
