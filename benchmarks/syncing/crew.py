"""The benchmark's processes as their parent sees them. Every wait is bounded, and no process outlives this one.

A member ends when its standard input closes, so all of them end however this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from typing import Any

START_SECONDS = 120.0
END_SECONDS = 10.0
LINE_BYTES = 1 << 20
"""The longest answer that a member may send."""
MEMBER = (sys.executable, "-m", "benchmarks.syncing.member")


class CrewError(Exception):
    """A member failed, has ended or does not answer."""


class Member:
    def __init__(self, index: int, process: asyncio.subprocess.Process) -> None:
        self._index, self._process = index, process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.events: list[dict[str, Any]] = []

    @classmethod
    async def start(cls, index: int) -> Member:
        # A session of its own: Ctrl-C reaches only the parent, which ends the others in order.
        process = await asyncio.create_subprocess_exec(
            *MEMBER, str(index), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True, limit=LINE_BYTES,
        )  # fmt: skip
        return cls(index, process)

    async def ask(self, do: str, seconds: float, **command: Any) -> dict[str, Any]:
        """Have a command carried out. Raises CrewError."""
        if self._reader.done():
            raise CrewError(f"member {self._index} has ended")
        number = next(self._numbers)
        assert self._process.stdin is not None
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(seconds):
                self._process.stdin.write(json.dumps({"id": number, "do": do, **command}).encode() + b"\n")
                await self._process.stdin.drain()
                return await answer
        except TimeoutError:
            raise CrewError(f"member {self._index} did not {do} within {seconds:.0f} s") from None
        except (ConnectionError, RuntimeError) as error:
            raise CrewError(f"member {self._index} is gone ({error})") from None
        finally:
            del self._waiting[number]

    async def end(self) -> None:
        """Close its standard input; kill it if that does not help."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        await self._reader

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            message = json.loads(line)
            if "event" in message:
                self.events.append(message)
            elif (answer := self._waiting.get(message["id"])) and not answer.done():
                if "error" in message:
                    answer.set_exception(CrewError(f"member {self._index}: {message['error']}"))
                else:
                    answer.set_result(message["done"])
        code = await self._process.wait()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(CrewError(f"member {self._index} ended with code {code}"))


class Crew:
    """The member processes; they are kept, so there are as many as were ever needed together."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    async def members(self, count: int) -> list[Member]:
        """The first `count` members; missing ones are started."""
        while len(self._members) < count:
            self._members.append(await Member.start(len(self._members)))
        asked = self._members[:count]
        await asyncio.gather(*(member.ask("look", START_SECONDS) for member in asked))
        return asked

    async def end(self) -> None:
        members, self._members = self._members, []
        await asyncio.gather(*(member.end() for member in members))

    async def renew(self) -> None:
        """After a failure: kill any that hang; the next members are new processes."""
        for member in self._members:
            member.kill()
        await self.end()
