"""Texts that PostgreSQL keeps as SQLite does: any character, ordered by their code points.

PostgreSQL has no NUL in a text, and a policy may write one. There it is stored as ESC 0, and ESC itself as ESC 1.
Without a collation, the order of ids would be that of the server's language. SQLite has neither problem, and nothing
is done there: SQLAlchemy then calls nothing for each value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Dialect, types

_ESCAPES = str.maketrans({"\0": "\x1b0", "\x1b": "\x1b1"})


def escaped(value: object) -> object:
    """The value as PostgreSQL stores it; anything but a text is returned as it is."""
    return value.translate(_ESCAPES) if isinstance(value, str) and ("\0" in value or "\x1b" in value) else value


def unescaped(text: str | None) -> str | None:
    if text is None or "\x1b" not in text:
        return text
    return text.replace("\x1b0", "\0").replace("\x1b1", "\x1b")


class Text(types.TypeDecorator[str]):
    """`sqlalchemy.Text`, and on PostgreSQL with these escapes and the collation "C"."""

    impl = types.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> types.TypeEngine[Any]:
        return types.Text(collation="C") if dialect.name == "postgresql" else types.Text()

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any] | None:
        return escaped if dialect.name == "postgresql" else None

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any] | None:
        return unescaped if dialect.name == "postgresql" else None
