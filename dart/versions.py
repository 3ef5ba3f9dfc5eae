"""Versions of the software that a run uses."""

from __future__ import annotations

import contextlib
from importlib import metadata


def installed(*names: str) -> dict[str, str]:
    """The version of each of these distributions; those that are not installed are left out."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
