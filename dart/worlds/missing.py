"""What this machine lacks for a world, and how to get it: parts of `Plug.checks` and of `World.start`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from dart.errors import UserError


def problem(check: Callable[[], object]) -> str | None:
    """What the UserError of a check says; None if it raises none."""
    try:
        check()
    except UserError as error:
        return str(error)
    return None


def package(*modules: str, extra: str) -> str | None:
    """The first of these modules that is not installed, and the extra of dart's that has them all; None if all are
    there. Nothing is imported."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return f"the package {module} is not installed: run `pip install 'dart-gui-rl[{extra}]'`"
    return None


def at_home(folder: Path) -> Path:
    """The folder with the user's home for `~`. Raises UserError where nothing says what that is."""
    try:
        return folder.expanduser()
    except RuntimeError:
        raise UserError(
            f"{folder}: the home folder of this user is not known: set HOME to a folder that it may write, or name "
            "another folder in environment.options"
        ) from None
