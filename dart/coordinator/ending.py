"""How a run ends that was interrupted, and its last checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from dart.errors import UserError, ungrouped


class Interrupted(Exception):
    """The run was stopped from outside; it can be resumed."""


async def saved_in_time(
    save: Coroutine[Any, Any, object], watch: Coroutine[Any, Any, None], hurry: asyncio.Event, seconds: float
) -> str:
    """Wait for `save` until it fails, `hurry` is set, or the time is up. Returns why there is no checkpoint, or "".

    watch: notices meanwhile if the trainer is gone, which makes `save` fail.
    """
    try:
        with ungrouped(UserError, OSError):
            async with asyncio.TaskGroup() as tasks:
                saving, hurried = tasks.create_task(save), tasks.create_task(hurry.wait())
                watching = tasks.create_task(watch)
                await asyncio.wait({saving, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                saved = saving.done()
                for each in (saving, hurried, watching):
                    each.cancel()
    except (UserError, OSError) as error:
        return str(error)
    if saved:
        return ""
    if hurry.is_set():
        return "Ctrl-C did not wait for it"
    return f"it took longer than checkpoint.interrupt_seconds ({seconds:g} s)"
