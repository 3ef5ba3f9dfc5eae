"""Random operations on a pool of ordered machines, for the imitation of the emulator server and the published one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from dart.workers.env.osworld.emulators import Emulators
from dart.workers.env.osworld.machine import Address, MachineError
from dart.worlds import Full

OPERATIONS = ("take", "give_up", "give_back", "revert", "twice", "kill", "reconcile", "foreign")
WEIGHTS = (30, 10, 25, 10, 5, 2, 10, 1)


def killed(pool: Emulators) -> None:
    """What SIGKILL leaves: no task runs any more, and the system has released the lock."""
    assert pool._always is not None
    for task in (*pool._orders, *pool._deletions.values(), pool._always):
        task.cancel()
    pool._journal.close()


async def settled(pool: Emulators) -> None:
    """Let the background work of deletions end."""
    while pool._deletions:
        await asyncio.gather(*pool._deletions.values(), return_exceptions=True)


async def operate(
    number: int,
    chance: random.Random,
    pool_again: Callable[[], Emulators],
    foreign: Callable[[], Awaitable[None]],
    patience: float,
) -> tuple[Emulators, list[Address], Counter[str]]:
    """Do `number` operations; `pool_again` makes a pool on the same journal, `foreign` orders a machine for somebody
    else. Whoever gives up an order does so within `patience` seconds. Returns the pool, what is held, and how often
    each operation and exception came."""
    held: list[Address] = []
    counts: Counter[str] = Counter()
    pool = pool_again()
    await pool.start()
    for _ in range(number):
        operation = chance.choices(OPERATIONS, WEIGHTS)[0]
        counts[operation] += 1
        try:
            match operation:
                case "take":
                    held.append(await pool.take())
                case "give_up":  # whoever ordered goes away before the machine is there
                    async with asyncio.timeout(chance.uniform(0, patience)):
                        held.append(await pool.take())
                case "give_back" if held:
                    await pool.give_back(held.pop(chance.randrange(len(held))))
                case "revert" if held:
                    held.append(await pool.revert(held.pop()))
                case "twice" if held:
                    address = held.pop()
                    await asyncio.gather(pool.give_back(address), pool.give_back(address))
                case "kill":
                    killed(pool)
                    held.clear()
                    pool = pool_again()
                    await pool.start()
                case "reconcile":
                    await pool.reconcile()
                case "foreign":
                    await foreign()
        except (Full, MachineError, TimeoutError) as error:
            counts[type(error).__name__] += 1
        assert len({address.id for address in held}) == len(held), "a machine was given out twice"
        assert {address.id for address in held} <= pool.held
    return pool, held, counts
