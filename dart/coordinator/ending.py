"""The last checkpoint of a run that was interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from dart.errors import UserError


async def saved_in_time(
    save: Coroutine[Any, Any, object], watch: Coroutine[Any, Any, None], hurry: asyncio.Event, seconds: float
) -> str:
    """Wait for `save` until it fails, `hurry` is set, or the time is up. Returns why there is no checkpoint, or "".

    watch: notices meanwhile if the trainer is gone, which makes `save` fail.
    """
    saving, *others = [asyncio.ensure_future(each) for each in (save, watch, hurry.wait())]
    try:
        await asyncio.wait({saving, others[-1]}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if saving.done():
            await saving
            return ""
    except (UserError, OSError) as error:
        return str(error)
    finally:
        for each in (saving, *others):
            each.cancel()
        await asyncio.gather(saving, *others, return_exceptions=True)
    return (
        "Ctrl-C did not wait for it"
        if hurry.is_set()
        else (f"it took longer than checkpoint.interrupt_seconds ({seconds:g} s)")
    )
