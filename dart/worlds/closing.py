"""How a world closes its environments."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable

log = logging.getLogger(__name__)


async def close_all(closing: Iterable[Awaitable[None]]) -> None:
    """Await all of them at once, even if some fail, which is logged: one that hangs or fails holds up its own alone."""
    for error in await asyncio.gather(*closing, return_exceptions=True):
        if isinstance(error, Exception):
            log.warning("an environment did not close: %s: %s", type(error).__name__, error)
