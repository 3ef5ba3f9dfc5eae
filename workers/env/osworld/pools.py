"""Where machines come from. `StaticHosts` are machines that are running already; `emulators` orders them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path

import httpx

from dart.core.loopback import is_loopback
from dart.workers.env.osworld.machine import Address, MachineError
from dart.workers.env.osworld.options import Host, StaticPool
from dart.worlds import Full
from dart.worlds.locks import Locks, of_this_machine
from dart.worlds.programs import run_here

RENEW = "environment.options.static.renew"


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
        if how.startswith(("http://", "https://")):
            await self._ask(how, address)
        elif how != "none":
            values = {"host": address.host, "server": str(address.server)}
            await run_here(how, values, self._options.renew_seconds, RENEW, MachineError)
        return address

    async def give_back(self, address: Address) -> None:
        self._locks.give_back(address.id)
        self._waiting.append(address)

    async def close(self) -> None:
        self._locks.close()

    async def _ask(self, url: str, address: Address) -> None:
        asked, seconds = {"host": address.host, "server": address.server}, self._options.renew_seconds
        try:
            async with asyncio.timeout(seconds):
                answer = await self._client.post(url, json=asked, timeout=seconds)
                answer.raise_for_status()
        except TimeoutError:
            raise MachineError(f"{RENEW} took longer than {seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise MachineError(f"{RENEW} {url} failed: {error}") from error


def _address(host: Host) -> Address:
    name = f"{host.host}:{host.server}"
    known_as = of_this_machine(name) if is_loopback(host.host) else name
    return Address(known_as, host.host, host.server, host.chromium, host.vnc, host.vlc)
