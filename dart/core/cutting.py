"""Long texts cut so that one sees it."""

from __future__ import annotations


def cut(text: str, most: int) -> str:
    """At most about `most` characters: the first ones, with a note of how many there were."""
    return text if len(text) <= most else f"{text[:most]}\n… (cut: {most:,} of {len(text):,} characters)"
