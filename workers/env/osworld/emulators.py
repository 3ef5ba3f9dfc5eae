"""Machines from the emulator server that was released with the paper (`desktop_env/docker_server` in GUI-Docker-Env).

The server gives machines no lifetime, counts them against a token's quota, and answers an order only when the machine
has booted, which takes up to 300 s; its own client gives up after 30 s, and the machine is then lost with its quota.
Here an order is a task of its own that stays open for `boot_seconds`, whoever waits for it. What becomes of it is in
the journal (`journal.py`), and every minute the server's list is compared with that:

- A machine in the journal that no environment holds is deleted.
- A machine of our token that is not in the journal comes from an order whose answer was lost. It is deleted once it has
  been listed for longer than an order can take.
- A machine of another token is never touched.

A machine is deleted until the server says 404, one request at a time: the server counts two deletions that overlap
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from dart.errors import UserError
from dart.wire.channel import read_token
from dart.workers.env.osworld.journal import Journal, JournalInUse
from dart.workers.env.osworld.machine import Address, MachineError
from dart.workers.env.osworld.options import EmulatorPool
from dart.workers.env.osworld.pools import Pool
from dart.worlds import Full
from dart.worlds.missing import at_home

log = logging.getLogger(__name__)
LIST_SECONDS = 30.0
DELETE_SECONDS = 120.0
"""The server stops the machine before it answers."""
PAUSE_SECONDS = 1.0
"""Between two attempts to delete a machine, at first; twice as long each time."""
DELETIONS = 4
"""Attempts before a deletion is left to the next comparison."""
CLOSING_SECONDS = 60.0
"""How long `close` waits for open orders."""


class _Made(BaseModel):
    emulator_id: str
    server_port: int
    vnc_port: int
    chromium_port: int
    vlc_port: int


class _Ordered(BaseModel):
    code: int
    data: _Made


class _Listed(BaseModel):
    emulator_id: str
    token: str | None = None
    duration_minutes: float = 0.0


_LIST: TypeAdapter[list[_Listed]] = TypeAdapter(list[_Listed])
_TOKENS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


class Emulators(Pool):
    """One worker's machines on one emulator server, all of one token."""

    def __init__(self, options: EmulatorPool, folder: Path, client: httpx.AsyncClient) -> None:
        self._options, self._folder, self._client = options, folder, client
        self._url = options.url.rstrip("/")
        self._host = urlsplit(self._url).hostname or ""
        self._token = ""
        self._journal: Journal
        self.held: set[str] = set()
        """Machines that an environment has."""
        self._orders: set[asyncio.Task[Address]] = set()
        self._always: asyncio.Task[None] | None = None
        self._deletions: dict[str, asyncio.Task[None]] = {}
        """By machine, so that no two deletions of it overlap."""
        self._first_seen: dict[str, float] = {}
        """When a stranger of our token was first listed, on the monotonic clock."""

    async def start(self) -> None:
        """Take a token that no other worker here holds, and delete what an earlier worker left."""
        self._token, self._journal = self._take_token()
        await self._check_token()
        with contextlib.suppress(MachineError):  # the server may be down for a moment; the list is asked for again
            await self.reconcile()
        self._always = asyncio.create_task(self._reconcile_always())

    async def take(self) -> Address:
        order = asyncio.create_task(self._order())
        self._orders.add(order)
        order.add_done_callback(self._orders.discard)
        try:
            address = await asyncio.shield(order)
        except asyncio.CancelledError:
            order.add_done_callback(self._unwanted)
            raise
        return address

    async def revert(self, address: Address) -> Address:
        """A machine has no first state to go back to, so it is deleted and another is ordered."""
        await self._delete(address.id)
        return await self.take()

    async def give_back(self, address: Address) -> None:
        await self._delete(address.id)

    async def close(self) -> None:
        """Delete all machines, and those that orders still make. If it is cancelled, the journal keeps what is left."""
        if not self._token:
            return
        if self._always is not None:
            self._always.cancel()
        if self._orders:
            log.info("waiting for %d orders of machines, to delete what they make", len(self._orders))
        for order in self._orders:
            order.add_done_callback(self._unwanted)
        always = [self._always] if self._always is not None else []
        known = [self._deletion_of(machine) for machine in tuple(self._journal.machines)]
        try:
            # At the same time: if this worker is killed meanwhile, only what was ordered last is left.
            waited = [asyncio.wait(self._orders, timeout=CLOSING_SECONDS)] if self._orders else []
            await asyncio.gather(*waited, *known, *always, return_exceptions=True)
            for order in tuple(self._orders):
                order.cancel()
            await asyncio.gather(*self._orders, *self._deletions.values(), return_exceptions=True)
        finally:
            if self._journal.machines or self._journal.orders:
                log.warning(
                    "%d machines and %d orders are left on %s: the next worker with this token deletes them",
                    len(self._journal.machines), len(self._journal.orders), self._url,
                )  # fmt: skip
            self._journal.close()

    async def reconcile(self) -> None:
        """Compare the server's list with the journal. Raises MachineError if the list cannot be read."""
        listed = await self._listed()
        now, ids = time.monotonic(), {one.emulator_id for one in listed}
        for machine in self._journal.machines - ids - self.held:
            self._journal.deleted(machine)
        strangers = {one.emulator_id for one in listed if one.token == self._token} - self._journal.machines
        self._first_seen = {machine: self._first_seen.get(machine, now) for machine in strangers}
        minutes = {one.emulator_id: one.duration_minutes for one in listed}
        old = {
            machine
            for machine, seen in self._first_seen.items()
            if max(now - seen, minutes[machine] * 60) > self._options.boot_seconds
        }
        await asyncio.gather(*map(self._delete, (self._journal.machines & ids - self.held) | old))
        for order, sent in tuple(self._journal.orders.items()):
            if time.time() - sent > 2 * self._options.boot_seconds:  # what it made was listed as a stranger since
                self._journal.failed(order)

    # ---- orders ----

    async def _order(self) -> Address:
        order = uuid.uuid4().hex
        self._journal.ordered(order)
        headers, body = self._headers(), {"token": self._token}
        try:
            answer = await self._client.post(
                f"{self._url}/start_emulator", headers=headers, json=body, timeout=self._options.boot_seconds
            )
        except (httpx.HTTPError, OSError) as error:
            # Nobody knows whether it makes a machine: `reconcile` finds it if it does.
            raise MachineError(f"{self._url}/start_emulator: {type(error).__name__}: {error}") from error
        if answer.status_code in (401, 403, 429):
            self._journal.failed(order)
            raise Full(f"{self._url} answered {answer.status_code}: {_message(answer)}")
        if answer.status_code == 500:  # the server takes the order back itself
            self._journal.failed(order)
        if answer.status_code != 200:
            raise MachineError(f"{self._url}/start_emulator answered {answer.status_code}: {_message(answer)}")
        try:
            made = _Ordered.model_validate_json(answer.content).data
        except ValidationError as error:
            raise MachineError(
                f"{self._url}/start_emulator answered {_message(answer)}, which cannot be read: {error}"
            ) from None
        self._journal.made(order, made.emulator_id)
        self.held.add(made.emulator_id)
        return Address(made.emulator_id, self._host, made.server_port, made.chromium_port, made.vnc_port, made.vlc_port)

    def _unwanted(self, order: asyncio.Task[Address]) -> None:
        """Whoever ordered it has gone: delete what it made."""
        if not order.cancelled() and order.exception() is None:
            self._deletion_of(order.result().id)

    # ---- deletions ----

    async def _delete(self, machine: str) -> None:
        """Until the server says that there is no such machine. What fails is left to `reconcile`. It goes on if whoever
        waits for it is cancelled."""
        await asyncio.shield(self._deletion_of(machine))

    def _deletion_of(self, machine: str) -> asyncio.Task[None]:
        """The one deletion of this machine that is under way, which `close` waits for; begun if there is none."""
        self.held.discard(machine)
        deletion = self._deletions.get(machine)
        if deletion is None:
            deletion = self._deletions[machine] = asyncio.create_task(self._delete_until_gone(machine))
            deletion.add_done_callback(lambda ended: self._deletion_ended(machine, ended))
        return deletion

    def _deletion_ended(self, machine: str, deletion: asyncio.Task[None]) -> None:
        del self._deletions[machine]
        if not deletion.cancelled() and (error := deletion.exception()) is not None:
            log.warning("deleting machine %s: %s: %s", machine, type(error).__name__, error)

    async def _delete_until_gone(self, machine: str) -> None:
        pause = PAUSE_SECONDS
        for _ in range(DELETIONS):
            match await self._delete_once(machine):
                case "gone":
                    self._journal.deleted(machine)
                    self._first_seen.pop(machine, None)
                    return
                case "refused":
                    break
                case "failed":
                    await asyncio.sleep(pause)
                    pause *= 2
        log.warning("machine %s could not be deleted from %s: it is tried again later", machine, self._url)

    async def _delete_once(self, machine: str) -> Literal["gone", "again", "refused", "failed"]:
        try:
            answer = await self._client.delete(
                f"{self._url}/emulators/{machine}", headers=self._headers(), timeout=DELETE_SECONDS
            )
            if answer.status_code == 405 or (answer.status_code == 404 and not _own(answer)):
                # An older server knows only this, and answers the other with a page of its framework's.
                answer = await self._client.post(
                    f"{self._url}/stop_emulator", headers=self._headers(), json={"emulator_id": machine},
                    timeout=DELETE_SECONDS,
                )  # fmt: skip
        except (httpx.HTTPError, OSError) as error:
            log.warning("deleting machine %s: %s: %s", machine, type(error).__name__, error)
            return "failed"
        if answer.status_code == 404:
            return "gone" if _own(answer) else "failed"
        if answer.status_code in (401, 403):
            log.warning("deleting machine %s is refused: %s", machine, _message(answer))
            return "refused"
        return "again" if answer.status_code == 200 else "failed"

    # ---- the server's list ----

    async def _reconcile_always(self) -> None:
        """Runs until `close` cancels it."""
        while True:
            await asyncio.sleep(self._options.reconcile_seconds)
            try:
                await self.reconcile()
            except (MachineError, OSError) as error:  # OSError: the journal's disk is full, say
                log.warning("machines are not compared with the journal: %s", error)

    async def _listed(self) -> list[_Listed]:
        try:
            answer = await self._client.get(f"{self._url}/emulators", headers=self._headers(), timeout=LIST_SECONDS)
            answer.raise_for_status()
            return _LIST.validate_json(answer.content)
        except (httpx.HTTPError, OSError, ValidationError) as error:
            raise MachineError(f"{self._url}/emulators cannot be listed: {type(error).__name__}: {error}") from error

    async def _check_token(self) -> None:
        """Raises UserError if the server says which tokens it knows, and ours is not among them."""
        try:
            answer = await self._client.get(f"{self._url}/tokens", headers=self._headers(), timeout=LIST_SECONDS)
            answer.raise_for_status()
            known = known_tokens(answer)
        except (httpx.HTTPError, OSError, ValidationError) as error:
            log.warning("%s/tokens cannot be read: %s", self._url, error)
            return
        if known and self._token not in known:
            raise UserError(unknown(self._url, "the token of this worker"))

    # ---- the token ----

    def _take_token(self) -> tuple[str, Journal]:
        folder = at_home(self._folder)
        for source in self._options.tokens:
            token = read_token(source, "environment.options.emulator.tokens")
            name = hashlib.sha256(f"{self._url} {token}".encode()).hexdigest()[:16]
            try:
                return token, Journal(folder / f"machines-{name}.jsonl")
            except JournalInUse:
                continue
        raise UserError(
            f"environment.options.emulator.tokens: all {len(self._options.tokens)} tokens are held by other env "
            "workers of this machine: name one for each worker"
        )

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}


def known_tokens(answer: httpx.Response) -> dict[str, JsonValue]:
    """What the server answers to GET /tokens, by token. Raises ValidationError."""
    return _TOKENS.validate_json(answer.content)


def unknown(url: str, token: str) -> str:
    return (
        f"environment.options.emulator.tokens: {url} does not know {token}: add it to the server's "
        "configs/config.yaml, or name another"
    )


def _own(answer: httpx.Response) -> bool:
    """Whether the server's own code answered, and not the framework under it, which has no such address."""
    try:
        return isinstance(answer.json(), dict)
    except ValueError:
        return False


def _message(answer: httpx.Response) -> str:
    return answer.text[:300]
