"""The pool of machines from the paper's emulator server: none is leaked, and none of somebody else's is touched."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest
from osworld.emulators import FOREIGN, EmulatorServer
from osworld.operations import killed, operate, settled

from dart.errors import UserError
from dart.workers.env.osworld import emulators
from dart.workers.env.osworld.emulators import Emulators
from dart.workers.env.osworld.journal import Journal, JournalInUse
from dart.workers.env.osworld.options import EmulatorPool
from dart.worlds import Full

TOKEN, QUOTA = "ours", 6


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as this server's boots are."""
    monkeypatch.setenv("OSWORLD_TOKEN", TOKEN)
    monkeypatch.setattr(emulators, "PAUSE_SECONDS", 0.01)


def pool_of(server: EmulatorServer, folder: Path, client: httpx.AsyncClient, boot_seconds: float = 30.0) -> Emulators:
    options = EmulatorPool(
        url=server.url, tokens=("env:OSWORLD_TOKEN",), boot_seconds=boot_seconds, reconcile_seconds=3600.0
    )
    return Emulators(options, folder, client)


async def test_a_thousand_random_operations(tmp_path: Path) -> None:
    with EmulatorServer({TOKEN: QUOTA, FOREIGN: 100}, seed=3) as server:
        foreign = {server.add_foreign() for _ in range(5)}

        async def add() -> None:
            foreign.add(server.add_foreign())

        async with httpx.AsyncClient(trust_env=False) as client:
            server.boots, server.faults, server.forbidden = (0.0, 0.08), 0.05, 0.05
            pool, held, counts = await operate(
                1000, random.Random(7), lambda: pool_of(server, tmp_path, client, boot_seconds=0.05), add, 0.03
            )
            server.boots, server.faults, server.forbidden = (0.0, 0.0), 0.0, 0.0
            await settled(pool)
            for address in held:
                await pool.give_back(address)
            await asyncio.sleep(0.3)  # orders whose answer was lost have booted by now
            await pool.reconcile()
            await asyncio.sleep(0.1)
            await pool.reconcile()
            await pool.close()
        assert server.of(TOKEN) == set(), "machines are left"
        assert server.current[TOKEN] == 0
        assert server.of(FOREIGN) == foreign, "a machine of somebody else was deleted"
        assert server.foreign_deletions == 0, "it was tried to delete a machine of somebody else"
        assert server.overlapping_deletions == 0
        print(counts)
    assert counts["Full"] > 20 and counts["MachineError"] > 20 and counts["TimeoutError"] > 20 and counts["kill"] > 5


async def test_a_boot_that_takes_longer_than_anybody_waits_is_deleted(tmp_path: Path) -> None:
    with EmulatorServer({TOKEN: 1}) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            pool = pool_of(server, tmp_path, client)
            await pool.start()
            server.boots = (0.3, 0.3)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await pool.take()
            with pytest.raises(Full, match="429"):
                await pool.take()
            while pool._orders:
                await asyncio.sleep(0.02)
            await settled(pool)
            assert server.of(TOKEN) == set() and server.current[TOKEN] == 0
            await pool.take()
            await pool.close()
        assert server.of(TOKEN) == set()


async def test_a_stranger_is_deleted_only_once_it_is_older_than_an_order(tmp_path: Path) -> None:
    with EmulatorServer({TOKEN: 5}) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            pool = pool_of(server, tmp_path, client, boot_seconds=0.2)
            await pool.start()
            lost = server.add_foreign(TOKEN)
            await pool.reconcile()
            assert server.of(TOKEN) == {lost}
            await asyncio.sleep(0.3)
            await pool.reconcile()
            assert server.of(TOKEN) == set()
            await pool.close()


async def test_a_killed_workers_machines_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    with EmulatorServer({TOKEN: 5}) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            pool = pool_of(server, tmp_path, client)
            await pool.start()
            await asyncio.gather(*(pool.take() for _ in range(3)))
            with (tmp_path / next(tmp_path.iterdir()).name).open("ab") as journal:
                journal.write(b'{"event":"orde')  # killed while it wrote
            killed(pool)
            again = pool_of(server, tmp_path, client)
            await again.start()
            assert server.of(TOKEN) == set() and again.held == set()
            await again.close()


@pytest.mark.parametrize("status", [404, 405])
async def test_an_older_server_without_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    answer = EmulatorServer._answer

    def older(self: EmulatorServer, request: object, body: dict[str, str], token: str) -> tuple[int, object]:
        if getattr(request, "command", "") == "DELETE":
            return status, "Not Found"
        return answer(self, request, body, token)  # type: ignore[arg-type]

    monkeypatch.setattr(EmulatorServer, "_answer", older)
    with EmulatorServer({TOKEN: 1}) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            pool = pool_of(server, tmp_path, client)
            await pool.start()
            await pool.give_back(await pool.take())
            assert server.of(TOKEN) == set()
            await pool.close()


async def test_what_an_open_order_makes_is_deleted_at_the_end(tmp_path: Path) -> None:
    with EmulatorServer({TOKEN: 2}) as server:
        server.boots = (0.5, 0.5)
        async with httpx.AsyncClient(trust_env=False) as client:
            pool = pool_of(server, tmp_path, client)
            await pool.start()
            await pool.take()
            order = asyncio.create_task(pool.take())
            await asyncio.sleep(0.1)
            order.cancel()
            await pool.close()
        assert server.calls.count("POST /start_emulator") == 2 and server.of(TOKEN) == set()


async def test_each_worker_has_a_token_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECOND", "second")
    with EmulatorServer({TOKEN: 1, "second": 1}) as server:
        options = EmulatorPool(url=server.url, tokens=("env:OSWORLD_TOKEN", "env:SECOND"))
        async with httpx.AsyncClient(trust_env=False) as client:
            pools = [Emulators(options, tmp_path, client) for _ in range(3)]
            await pools[0].start()
            await pools[1].start()
            with pytest.raises(UserError, match="all 2 tokens are held"):
                await pools[2].start()
            await asyncio.gather(*(pool.take() for pool in pools[:2]))
            assert len(server.of(TOKEN)) == len(server.of("second")) == 1
            await asyncio.gather(*(pool.close() for pool in pools))
        assert not server.machines


async def test_a_token_that_the_server_does_not_know(tmp_path: Path) -> None:
    with EmulatorServer({"another": 1}) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            pool = pool_of(server, tmp_path, client)
            with pytest.raises(UserError, match="does not know the token of this worker"):
                await pool.start()
            await pool.close()


def test_the_journal_is_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.ordered("a")
    journal.made("a", "one")
    journal.ordered("b")
    journal.ordered("c")
    journal.made("c", "three")
    journal.deleted("three")
    with pytest.raises(JournalInUse):
        Journal(tmp_path / "journal")
    journal.close()
    again = Journal(tmp_path / "journal")
    assert again.machines == {"one"} and set(again.orders) == {"b"}
    again.close()
