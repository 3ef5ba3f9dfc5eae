"""What the installed software can compute on, without importing it: that takes seconds, and may be too early."""

from __future__ import annotations

from importlib import metadata


def on_cpu() -> bool:
    """Whether the installed torch lacks GPU support, and with it vLLM: its package's version says so."""
    try:
        return "+cpu" in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
