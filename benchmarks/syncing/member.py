"""One of the benchmark's processes: `python -m benchmarks.syncing.member INDEX`. Started by `benchmarks.syncing.crew`.

Commands come on standard input, a JSON line each, and are carried out side by side; answers and events go to standard
output. When standard input closes, the parent is gone or has finished with it, and the process ends at once, even
while it is still importing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Command = dict[str, Any]


class Commands:
    """The commands, read by a thread of their own from the first moment on."""

    def __init__(self) -> None:
        self.waiting: deque[Command] = deque()
        self.wake: Callable[[], object] = bool
        threading.Thread(target=self._read, daemon=True, name="commands").start()

    def _read(self) -> None:
        # Not sys.stdin: a thread that waits in it would hold its lock.
        rest = b""
        while data := os.read(0, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            self.waiting.extend(json.loads(line) for line in lines)
            self.wake()
        os._exit(0)


def say(output: int, message: dict[str, Any]) -> None:
    try:
        os.write(output, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        os._exit(0)  # the parent is gone


async def carry_out(commands: Commands, hands: Any, tell: Callable[[dict[str, Any]], None]) -> None:
    """Carry out all commands; the end of standard input ends the process."""
    from dart.errors import UserError
    from dart.workers.weights.transfer import TransferError

    async def one(command: Command) -> None:
        try:
            done = await getattr(hands, f"do_{command['do']}")(command)
        except (UserError, TransferError, RuntimeError, OSError, ValueError, ExceptionGroup) as error:
            tell({"id": command["id"], "error": f"{type(error).__name__}: {error}"})
        else:
            tell({"id": command["id"], "done": done or {}})

    loop, news = asyncio.get_running_loop(), asyncio.Event()
    commands.wake = lambda: loop.call_soon_threadsafe(news.set)
    async with asyncio.TaskGroup() as tasks:
        while True:
            news.clear()
            while commands.waiting:
                tasks.create_task(one(commands.waiting.popleft()))
            await news.wait()


def main() -> None:
    commands = Commands()
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer

    import uvloop

    from benchmarks.syncing.hands import Hands

    def tell(message: dict[str, Any]) -> None:
        say(output, message)

    uvloop.run(carry_out(commands, Hands(int(sys.argv[1]), tell), tell))


if __name__ == "__main__":
    main()
