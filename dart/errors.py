"""Errors that are told to a person: one message that names what is wrong, the value, and the remedy."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The command line prints the message alone and exits with 2."""
