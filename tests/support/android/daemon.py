"""A device for the real adb program: it speaks adb's transport protocol and runs command lines in a real shell.

The shell finds the device's programs (`input`, `screencap`, …) as small scripts that hand their arguments to `Phone`.
Started as a process by `Device`; it prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

VERSION, MOST_DATA = 0x01000001, 1 << 18
BANNER = b"device::ro.product.name=fake;ro.product.model=Fake;ro.product.device=fake;features=%s\0"
HEAD = struct.Struct("<4s5I")
STDOUT, STDERR, EXIT = 1, 2, 3
PROGRAMS = (
    "getprop", "setprop", "pidof", "wm", "settings", "cat", "ime", "monkey", "am", "uiautomator", "input", "screencap",
)  # fmt: skip
SHIM = """#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\\0' $(($# + 1)) "${{0##*/}}" "$@" >&3
read -r status <&3
/bin/cat <&3
exit $status
"""
"""Bash alone: a screenshot and an action are several programs, and an interpreter takes ten times as long to start."""


class Stream:
    """One service that adb has opened."""

    def __init__(self, link: Link, here: int, there: int) -> None:
        self.link, self.here, self.there = link, here, there
        self.ready = asyncio.Event()
        self.ready.set()

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), MOST_DATA - 64):
            await self.ready.wait()
            self.ready.clear()
            await self.link.send(b"WRTE", self.here, self.there, data[at : at + MOST_DATA - 64])


class Link:
    """One connection of an adb server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, features: bytes) -> None:
        self.reader, self.writer, self.path, self.features = reader, writer, path, features
        self.streams: dict[int, Stream] = {}
        self.running: set[asyncio.Task[None]] = set()

    async def send(self, command: bytes, first: int, second: int, data: bytes = b"") -> None:
        magic = struct.unpack("<I", command)[0] ^ 0xFFFFFFFF
        self.writer.write(HEAD.pack(command, first, second, len(data), sum(data) & 0xFFFFFFFF, magic) + data)
        await self.writer.drain()

    async def messages(self) -> AsyncIterator[tuple[bytes, int, int, bytes]]:
        while True:
            try:
                head = await self.reader.readexactly(HEAD.size)
                command, first, second, length, _, _ = HEAD.unpack(head)
                yield command, first, second, await self.reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    async def serve(self) -> None:
        async for command, first, second, data in self.messages():
            if command == b"CNXN":
                await self.send(b"CNXN", VERSION, MOST_DATA, BANNER % self.features)
            elif command == b"OPEN":
                here = len(self.streams) + 1
                self.streams[here] = Stream(self, here, first)
                await self.send(b"OKAY", here, first)
                task = asyncio.create_task(self.run(self.streams[here], data.rstrip(b"\0").decode()))
                self.running.add(task)
                task.add_done_callback(self.running.discard)
            elif command == b"OKAY" and second in self.streams:
                self.streams[second].ready.set()
            elif command == b"WRTE":
                await self.send(b"OKAY", second, first)
        self.writer.close()

    async def run(self, stream: Stream, service: str) -> None:
        kind, _, line = service.partition(":")
        apart = kind.startswith("shell,v2")
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", line, env={"PATH": f"{self.path}:/usr/bin:/bin"}, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE if apart else asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, errors = await process.communicate()
        for number, said in ((STDOUT, output), (STDERR, errors or b"")):
            if said:
                await stream.write(struct.pack("<BI", number, len(said)) + said if apart else said)
        if apart:
            await stream.write(struct.pack("<BIB", EXIT, 1, (process.returncode or 0) % 256))
        await stream.ready.wait()
        await self.send(b"CLSE", stream.here, stream.there)


async def main(arguments: argparse.Namespace) -> None:
    from phone import Phone

    folder = Path(arguments.folder)
    sizes = [
        tuple(int(side) for side in size.split("x")) if size else None for size in (arguments.size, arguments.override)
    ]
    phone = Phone(sizes[0], sizes[1], folder / "events.jsonl", arguments.keyboard)

    async def program(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = int((await reader.readuntil(b"\0"))[:-1])
        words = [(await reader.readuntil(b"\0"))[:-1].decode() for _ in range(count)]
        status, said = phone.run(words)
        writer.write(f"{status}\n".encode() + said)
        await writer.drain()
        writer.close()

    async def device(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Link(reader, writer, str(folder / "bin"), b"" if arguments.old else b"shell_v2,cmd").serve()

    programs = await asyncio.start_server(program, "127.0.0.1", 0, limit=1 << 20)
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        shim = folder / "bin" / name
        shim.write_text(SHIM.format(port=programs.sockets[0].getsockname()[1]))
        shim.chmod(0o755)
    server = await asyncio.start_server(device, "127.0.0.1", arguments.port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Device:
    """The process of one device. Use it as a context manager."""

    def __init__(
        self, folder: Path, size: tuple[int, int], override: tuple[int, int] | None = None, *, old: bool = False,
        keyboard: bool = False,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, 0
        more = [*(["--old"] if old else []), *(["--keyboard"] if keyboard else [])]
        more += ["--override", f"{override[0]}x{override[1]}"] if override else []
        self.words = [sys.executable, __file__, str(folder), f"{size[0]}x{size[1]}", *more]

    def start(self) -> None:
        shutil.rmtree(self.folder / "bin", ignore_errors=True)
        self.process = subprocess.Popen([*self.words, "--port", str(self.port)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def __enter__(self) -> Device:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """As if its plug were pulled; `start` brings it back on the same port."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def serial(self) -> str:
        return f"127.0.0.1:{self.port}"

    def events(self) -> list[list[str]]:
        """The programs that were run on it, with their arguments; not those that only look."""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("size")
    parser.add_argument("--override", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--keyboard", action="store_true")
    asyncio.run(main(parser.parse_args()))
