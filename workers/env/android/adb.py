"""The `adb` program, for one device: each call is a process of its own, with a time limit.

What went wrong with the device (it is gone, offline, unauthorised, silent) is a DeviceError; what a command on the
device says of itself, its exit status included, is a result. The two cannot be told apart by adb's own exit status, so
every command ends by printing its status after a mark: an answer without the mark never reached the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from asyncio.subprocess import PIPE
from dataclasses import dataclass

from dart.errors import UserError
from dart.workers.env.android.options import Device
from dart.worlds import EnvironmentFailure
from dart.worlds.programs import end

MARK = "dart-status="
MOST_SAID = 500
"""Characters of a program's output that an error message has."""


class DeviceError(EnvironmentFailure):
    """The device did not answer, or not as a device does."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A command's end on the device. `output` has its standard output and its errors."""

    output: str
    status: int


class Adb:
    """One device, by the adb program. `seconds` is the limit of each call that names none."""

    def __init__(self, program: str, device: Device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self._program = program

    async def shell(self, command: str, seconds: float | None = None) -> Ran:
        """Run a command line in the device's own shell. Raises DeviceError."""
        # The outer shell lives to print the mark even if the command exits, or is not valid.
        line = f"sh -c {shlex.quote(command)} 2>&1; status=$?; echo; echo {MARK}$status"
        said = (await self.run("shell", line, seconds=seconds)).decode(errors="replace").replace("\r\n", "\n")
        output, found, status = said.rpartition(f"\n{MARK}")
        if not found or not status.strip().isdigit():
            raise DeviceError(f"{self.device.name}: {command[:80]!r} was cut off: {said[-MOST_SAID:]!r}")
        return Ran(output.rstrip("\n"), int(status))

    async def bytes_of(self, command: str) -> bytes:
        """What a command prints, byte by byte. Raises DeviceError."""
        return await self.run("exec-out", command)

    async def run(self, *arguments: str, seconds: float | None = None) -> bytes:
        """What adb prints when it is called for this device. Raises DeviceError if it fails or takes too long."""
        return await self._call(("-s", self.device.serial, *arguments), seconds or self.seconds)

    async def connect(self) -> None:
        """Connect a device of the network; others are there or not. Raises DeviceError."""
        if not self.device.network:
            return
        said = await self._connected()
        if said.startswith("already") and not await self._online():
            # adb keeps a connection that has broken, and calls it one.
            await self._call(("disconnect", self.device.serial), self.seconds)
            said = await self._connected()
        if "connected to" not in said:  # adb's exit status is 0 either way in many versions
            raise DeviceError(f"adb cannot connect to {self.device.name}: {said[-MOST_SAID:]}")

    async def _connected(self) -> str:
        return (await self._call(("connect", self.device.serial), self.seconds)).decode(errors="replace").strip()

    async def _online(self) -> bool:
        try:
            return (await self.run("get-state")).strip() == b"device"
        except DeviceError:
            return False

    async def wait(self, seconds: float) -> None:
        """Return once the device is there. Raises DeviceError after `seconds`."""
        await self.run("wait-for-device", seconds=seconds)

    async def start_server(self) -> str:
        """Start this machine's adb server, unless the device has another, and return adb's version.

        Done once, before several calls could start it together. Raises UserError if there is no adb program.
        """
        try:
            version = (await self._call(("version",), self.seconds)).decode(errors="replace")
            if not self.device.adb_server:
                await self._call(("start-server",), self.seconds)
        except FileNotFoundError:
            raise UserError(
                f"environment.options.adb: there is no program {self._program}: install it (`make android`, or "
                "Debian's package adb), or name its path"
            ) from None
        return version.split("\n")[0].rpartition(" ")[2].strip()

    async def _call(self, arguments: tuple[str, ...], seconds: float) -> bytes:
        host, _, port = self.device.adb_server.rpartition(":")
        words = [self._program, *(("-H", host, "-P", port) if host else ()), *arguments]
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=PIPE
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(end, process)
            try:
                async with asyncio.timeout(seconds):
                    output, errors = await process.communicate()
            except TimeoutError:
                what = " ".join(arguments)[:120]
                raise DeviceError(f"adb {what} took longer than {seconds:g} s") from None
            undo.pop_all()
        if process.returncode:
            lines = (errors or output).decode(errors="replace").strip().splitlines() or [""]
            raise DeviceError(f"{self.device.name}: adb ended with {process.returncode}: {lines[-1][-MOST_SAID:]}")
        return output
