"""Texts from worlds, policies and errors, made fit for a message: cut so that one sees it, and encodable."""

from __future__ import annotations


def cut(text: str, most: int) -> str:
    """At most about `most` characters: the first ones, with a note of how many there were."""
    return text if len(text) <= most else f"{text[:most]}\n… (cut: {most:,} of {len(text):,} characters)"


def encodable(text: str) -> str:
    """The text with "?" for what UTF-8 cannot encode: a file name that is not UTF-8 has half a surrogate pair in it."""
    return text.encode("utf-8", "replace").decode()
