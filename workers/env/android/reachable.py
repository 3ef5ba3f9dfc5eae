"""Whether adb, devices and AndroidWorld's servers are there, for `dart doctor`. Changes nothing on them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dart.errors import UserError
from dart.workers.env.android.adb import Adb, DeviceError
from dart.workers.env.android.device import Phone
from dart.workers.env.android.options import AndroidOptions, Device
from dart.workers.env.reachable import silent

SECONDS = 10.0
T = TypeVar("T")


def adb(options: AndroidOptions) -> str | None:
    """How to get an adb program; None if there is one."""
    if shutil.which(options.adb) is None:
        return (
            f"environment.options.adb: there is no program {options.adb}: install it (`make android`, or Debian's "
            "package adb), or name its path"
        )
    return None


def devices(options: AndroidOptions, screen: tuple[int, int] | None) -> str | None:
    """Which devices do not answer, or have another screen than `screen`; None if all is well."""
    wrong = [said for said in _finished(_devices(options, screen)) if said]
    return "; ".join(wrong) or None


async def _devices(options: AndroidOptions, screen: tuple[int, int] | None) -> list[str]:
    for device in {device.adb_server: device for device in options.devices}.values():
        try:
            await Adb(options.adb, device, SECONDS).start_server()
        except (DeviceError, UserError) as error:
            return [str(error)]
    return list(await asyncio.gather(*(_device(options, device, screen) for device in options.devices)))


async def _device(options: AndroidOptions, device: Device, screen: tuple[int, int] | None) -> str:
    phone = Phone(Adb(options.adb, device, SECONDS), options)
    try:
        await phone.adb.connect()
        await phone.check()
        await phone.measure()
    except DeviceError as error:
        return f"environment.options.devices: {error}: start the device, allow debugging there, or leave it out"
    return phone.wrong_screen(screen) if screen is not None and sorted(phone.size) != sorted(screen) else ""


def servers(options: AndroidOptions) -> str | None:
    """Which AndroidWorld servers do not answer; None if all do."""
    wrong = silent([f"{device.android_world}/health" for device in options.devices])
    if not wrong:
        return None
    return (
        f"environment.options.devices: {'; '.join(wrong)}: start AndroidWorld's server there (docs/android.md), or "
        "correct the address"
    )


def check_names(options: AndroidOptions, names: Collection[str]) -> None:
    """Raises UserError if the first server that answers has no task of such a name. If none answers, nothing is known.

    The server lists the tasks of its suite of this moment. Only android_world, with which it starts, has them all, and
    another suite must not be made here, because an episode may be running.
    """
    if options.task_family != "android_world":
        return
    urls = [device.android_world for device in options.devices]
    with ThreadPoolExecutor(16) as pool:
        answers = [(url, known) for url, known in zip(urls, pool.map(_listed, urls), strict=True) if known]
    if not answers:
        return
    url, known = answers[0]
    if strange := sorted(set(names) - known):
        raise UserError(
            f"environment.tasks.names: the AndroidWorld server {url} has no task {', '.join(strange)}: it has "
            f"{len(known)}, such as {', '.join(sorted(known)[:3])} (if it last ran another family of tasks, restart it)"
        )


def _listed(url: str) -> set[str]:
    import httpx

    from dart.workers.env.android.benchmark import Tasks

    try:
        answer = httpx.get(f"{url}/suite/task_list", params={"max_index": -1}, timeout=SECONDS, trust_env=False)
        return set(Tasks.model_validate_json(answer.content).task_list)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
        return set()


def _finished(work: Coroutine[None, None, T]) -> T:
    """The result, on a thread of its own: the caller may be in an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
