"""Where machines come from. `StaticHosts` are machines that are running already; `emulators` orders them."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from abc import ABC, abstractmethod
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import httpx

from dart.workers.env.osworld.machine import Address, MachineError
from dart.workers.env.osworld.options import Host, StaticPool
from dart.worlds import Full
from dart.worlds.locks import Locks


class Pool(ABC):
    """Machines, each taken by one environment at a time."""

    fresh = True
    """Whether what `take` gives is in its first state."""

    async def start(self) -> None:
        """Raises UserError if the options cannot work."""
        return

    @abstractmethod
    async def take(self) -> Address:
        """A machine that nobody else has. Raises Full if there is none now."""

    @abstractmethod
    async def revert(self, address: Address) -> Address:
        """A machine in its first state instead of this one, or the same, reverted. Raises MachineError and Full; the
        machine is still taken then, unless `give_back` says otherwise."""

    @abstractmethod
    async def give_back(self, address: Address) -> None:
        """Its environment does not need it any more. Never raises."""

    async def close(self) -> None:
        """Give back everything."""
        return


class StaticHosts(Pool):
    """The machines that the user names, used by whoever had them before.

    `locks_folder`: where the env workers of this machine, which are all told of the same hosts, lock those that they
    use.
    """

    fresh = False

    def __init__(self, options: StaticPool, locks_folder: Path, client: httpx.AsyncClient) -> None:
        self._options, self._client = options, client
        self._locks = Locks(locks_folder)
        self._waiting = [_address(host) for host in options.hosts]

    async def take(self) -> Address:
        found = next((address for address in self._waiting if self._locks.take(address.id)), None)
        if found is None:
            raise Full(
                f"all {len(self._options.hosts)} hosts in environment.options.static.hosts are in use: name more of "
                "them, or have fewer environment.slots"
            )
        self._waiting.remove(found)
        return found

    async def revert(self, address: Address) -> Address:
        how = self._options.renew
        if how == "none":
            return address
        try:
            async with asyncio.timeout(self._options.renew_seconds):
                await (self._ask(how, address) if how.startswith(("http://", "https://")) else _run(how, address))
        except TimeoutError:
            raise MachineError(
                f"environment.options.static.renew took longer than {self._options.renew_seconds:g} s"
            ) from None
        return address

    async def give_back(self, address: Address) -> None:
        self._locks.give_back(address.id)
        self._waiting.append(address)

    async def close(self) -> None:
        self._locks.close()

    async def _ask(self, url: str, address: Address) -> None:
        asked = {"host": address.host, "server": address.server}
        try:
            answer = await self._client.post(url, json=asked, timeout=self._options.renew_seconds)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise MachineError(f"environment.options.static.renew {url} failed: {error}") from error


async def _run(command: str, address: Address) -> None:
    words = [
        word.replace("{host}", address.host).replace("{server}", str(address.server)) for word in shlex.split(command)
    ]
    try:
        process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
    except OSError as error:
        raise MachineError(f"environment.options.static.renew: {words[0]} cannot be started: {error}") from error
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(_end, process)
        _, said = await process.communicate()
        undo.pop_all()
    if process.returncode:
        words_said = said.decode(errors="replace").strip()[-500:]
        raise MachineError(f"environment.options.static.renew ended with {process.returncode}: {words_said}")


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _address(host: Host) -> Address:
    return Address(f"{host.host}:{host.server}", host.host, host.server, host.chromium, host.vnc, host.vlc)
