"""Tasks by name: what is said of a name that no task has."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from dart.errors import UserError


def no_task(where: object, name: str, names: Collection[str]) -> UserError:
    """The error that `where`, a world or a folder, has no task of this name. It tells the closest of their `names`."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else f"there are for example {', '.join(list(names)[:3])}"
    return UserError(f"environment.tasks.names: {where} has no task {name!r}: {hint}")
