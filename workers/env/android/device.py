"""One device: what its screen shows, and what is done to it."""

from __future__ import annotations

import asyncio
import logging
import re
import time

from dart.core.action import Action, Wait, pointer_after
from dart.core.types import Image
from dart.errors import UserError
from dart.screenshots.header import BadHeader, size_of
from dart.workers.env.android.adb import Adb, DeviceError
from dart.workers.env.android.gestures import KEYBOARD, MIDDLE, Hands, Named, failed
from dart.workers.env.android.options import SNAPSHOT, AndroidOptions
from dart.workers.env.android.tree import text_of
from dart.worlds import from_png
from dart.worlds.programs import run_here

log = logging.getLogger(__name__)
PNG = b"\x89PNG"
TICK_SECONDS = 0.1
"""Between two screenshots while the screen comes to rest."""
BOOT_TICK_SECONDS = 1.0
DUMP = "/data/local/tmp/dart_window.xml"
_SIZE = re.compile(r"(Physical|Override) size: (\d+)x(\d+)")


class Phone:
    """A device in use. Every method raises DeviceError if the device does not answer."""

    def __init__(self, adb: Adb, options: AndroidOptions) -> None:
        self.adb, self._options = adb, options
        self.size = (0, 0)
        """Width and height in pixels, held upright: what `input` counts in."""
        self._shown = (0, 0)
        """Those of the last screenshot, which says how the device is turned."""
        self._place = MIDDLE

    @property
    def name(self) -> str:
        return self.adb.device.name

    # ---- its life ----

    async def boot(self, screen: tuple[int, int]) -> None:
        """Connect it, wait until it runs, and renew it: whoever had it before may have left anything there.

        Raises UserError for another screen, or a keyboard that is missing.
        """
        await self.adb.connect()
        await self.wait()
        await self.renew()
        if sorted(self.size) != sorted(screen):
            raise UserError(self.wrong_screen(screen))

    def wrong_screen(self, screen: tuple[int, int]) -> str:
        width, height = self.size
        return (
            f"environment.viewport is {list(screen)}, but the screen of {self.name} has {width} x {height} pixels: "
            f"write viewport: [{width}, {height}], or change the device's with `adb shell wm size`"
        )

    async def wait(self) -> None:
        """Return once it is there and Android runs, within `boot_seconds`."""
        until = time.monotonic() + self._options.boot_seconds
        await self.adb.wait(self._options.boot_seconds)
        while not await self._booted():
            if time.monotonic() > until:
                raise DeviceError(f"{self.name} did not finish booting within {self._options.boot_seconds:g} s")
            await asyncio.sleep(BOOT_TICK_SECONDS)

    async def _booted(self) -> bool:
        """As `_runs`; a device that comes up may go away once more before it stays."""
        try:
            return await self._runs()
        except DeviceError:
            return False

    async def alive(self) -> bool:
        """Whether Android runs on it and its screen can be seen."""
        try:
            await self.check()
        except DeviceError as error:
            log.warning("%s", error)
            return False
        return True

    async def check(self) -> None:
        """Raises DeviceError unless Android runs on it and its screen can be seen."""
        if not await self._runs():
            raise DeviceError(f"Android does not run on {self.name}, or is still booting")
        await self.screenshot()

    async def _runs(self) -> bool:
        said = await self.adb.shell("getprop sys.boot_completed; pidof system_server")
        booted, _, server = said.output.partition("\n")
        return booted.strip() == "1" and bool(server.strip())

    async def renew(self) -> None:
        """Make it ready for the next episode, as `renew` says. Raises UserError if the keyboard is missing."""
        how, limit = self._options.renew, self._options.renew_seconds
        if how == "home":
            for package in self._options.stop:
                await self.adb.shell(f"am force-stop {package}")
            await self.home()
        elif how.startswith(SNAPSHOT):
            # The emulator's console answers KO with exit status 0.
            said = await self.adb.run("emu", "avd", "snapshot", "load", how.removeprefix(SNAPSHOT), seconds=limit)
            if b"KO" in said:
                raise DeviceError(f"environment.options.renew: {how}: {said.decode(errors='replace').strip()[-300:]}")
            await self.wait()
        else:
            device = self.adb.device
            values = {"serial": device.serial, "adb_server": device.adb_server}
            await run_here(how, values, limit, "environment.options.renew", DeviceError)
            await self.adb.connect()
            await self.wait()
        self._place = MIDDLE
        await self.measure()
        if self._options.typing == "adb_keyboard":  # what renewed it, or the last episode, may have chosen another
            await self._choose_keyboard()

    async def home(self) -> None:
        await self.adb.shell("input keyevent KEYCODE_HOME")

    async def measure(self) -> None:
        """Read its screen's size, which an override may change."""
        said = (await self.adb.shell("wm size")).output
        sizes = {kind: (int(width), int(height)) for kind, width, height in _SIZE.findall(said)}
        size = sizes.get("Override") or sizes.get("Physical")
        if size is None:
            raise DeviceError(f"{self.name} does not say how large its screen is: {said[:200]!r}")
        self.size = size

    async def _choose_keyboard(self) -> None:
        ran = await self.adb.shell(f"ime enable {KEYBOARD} && ime set {KEYBOARD}")
        if ran.status or "cannot be" in ran.output or "Unknown" in ran.output:
            raise UserError(
                f"environment.options.typing is adb_keyboard, but {self.name} does not have {KEYBOARD} "
                f"({ran.output.strip()[-200:]}): install the ADBKeyBoard app there, or write typing: input"
            )

    # ---- its screen ----

    async def screenshot(self) -> Image:
        data = await self.adb.bytes_of("screencap -p")
        data = data[max(data.find(PNG), 0) :]  # devices with two screens print a warning first
        try:
            if size_of(data) is None:
                raise BadHeader(f"is not a PNG: {data[:80]!r}")
        except BadHeader as error:
            raise DeviceError(f"{self.name}: its screenshot {error}") from None
        image = from_png(data)
        self._shown = (image.width, image.height)
        return image

    async def settled(self, still: float, most: float) -> Image:
        """The screen once it has shown nothing new for `still` seconds, or after `most` seconds.

        Nothing new, and not no change: a caret that blinks shows the same two pictures again and again.
        """
        began = changed = time.monotonic()
        image = await self.screenshot()
        seen = {image.sha256}
        while (now := time.monotonic()) - changed < still and now - began < most:
            await asyncio.sleep(min(TICK_SECONDS, still))
            image = await self.screenshot()
            if image.sha256 not in seen:
                seen.add(image.sha256)
                changed = time.monotonic()
        return image

    async def tree(self) -> str:
        """The accessibility tree as text; empty where the screen gives none, as one that never rests."""
        ran = await self.adb.shell(f"uiautomator dump {DUMP} >/dev/null && cat {DUMP}")
        return text_of(ran.output) if ran.status == 0 else ""

    # ---- actions ----

    async def carry_out(self, action: Action) -> str | Named:
        """What the device says if it could not; empty if it could. An app's name that is not known here is returned.

        Raises Refused for what a touch screen cannot do; nothing has been touched then.
        """
        options, place = self._options, self._place
        hands = Hands(self._turned(), options.typing, options.apps, options.scroll_fraction, options.max_wait_seconds)
        commands = hands.commands(action, place)
        self._place = pointer_after(action, place)
        if isinstance(commands, Named):
            return commands
        if isinstance(action, Wait):
            await asyncio.sleep(max(0.0, min(action.seconds, options.max_wait_seconds)))
        for command in commands:
            ran = await self.adb.shell(command, options.command_seconds + options.max_wait_seconds)
            if why := failed(command, ran.output, ran.status):
                return why
        return ""

    def _turned(self) -> tuple[int, int]:
        """The screen's size as it was turned in the last screenshot, which is what the policy has seen."""
        width, height = self.size
        wide, high = self._shown
        return (height, width) if (wide > high) != (width > height) and wide != high else (width, height)
