"""`environment.options` of the world android."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dart.core.loopback import is_loopback
from dart.worlds import WorldOptions
from dart.worlds.locks import of_this_machine
from dart.worlds.programs import checked

Family = Literal["android_world", "android", "information_retrieval"]
LOCKS = Path("~/.cache/dart/android")
SNAPSHOT = "snapshot:"
_PORT = re.compile(r"[\w.\-\[\]:]+:\d{1,5}")


class Device(BaseModel):
    """One device, and what is beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    serial: str = Field(min_length=1, pattern=r"^[\w.\-:\[\]]+$")
    """As `adb devices` lists it, or host:port, which is connected first."""
    android_world: str = ""
    """The address of the AndroidWorld server that prepares and grades tasks on this device."""
    adb_server: str = ""
    """host:port of the adb server that knows the device; empty: the one on this machine."""

    @property
    def network(self) -> bool:
        """Whether it has to be connected: the serial is host:port."""
        return bool(_PORT.fullmatch(self.serial))

    @property
    def emulator_here(self) -> bool:
        """Whether it is an emulator whose console is on this machine, where `adb emu` looks for it."""
        own = self.adb_server in ("", "127.0.0.1:5037", "localhost:5037")
        return own and re.fullmatch(r"emulator-\d+", self.serial) is not None

    @property
    def key(self) -> str:
        """What tells it from any other device that this machine can reach."""
        return f"{self.adb_server or 'local'}/{self.serial}"

    @property
    def lock(self) -> str:
        """The same, and where others may share the folder of the locks: only one on the network is theirs, too."""
        beyond = self.adb_server or (self.serial if self.network else "")
        return self.key if beyond and not is_loopback(beyond.rpartition(":")[0]) else of_this_machine(self.key)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.serial} of adb server {self.adb_server}" if self.adb_server else self.serial

    @field_validator("android_world")
    @classmethod
    def _url(cls, url: str) -> str:
        if url and not (url.startswith(("http://", "https://")) and urlsplit(url).hostname):
            raise ValueError(
                f"android_world {url!r} is not an address: write http://HOST:PORT, as in http://127.0.0.1:5000"
            )
        return url.rstrip("/")

    @field_validator("adb_server")
    @classmethod
    def _host_and_port(cls, server: str) -> str:
        if server and not _PORT.fullmatch(server):
            raise ValueError(f"adb_server {server!r} is not HOST:PORT: write it as in 10.0.0.5:5037")
        return server


class AndroidOptions(WorldOptions):
    """`environment.options` where `environment.kind` is android (docs/android.md)."""

    devices: tuple[Device, ...] = Field(
        description="One for each environment: a serial as `adb devices` lists it, or host:port, which is connected "
        "first. As a mapping it may also have `android_world`, the address of the AndroidWorld server of that device, "
        "and `adb_server`, the host:port of the adb server that knows it.",
        min_length=1,
    )
    tasks_folder: Path | None = Field(
        None,
        description="A folder of tasks of your own, a YAML or JSON file for each. Without it every device needs "
        "`android_world`.",
    )
    task_family: Family = Field("android_world", description="Which of AndroidWorld's suites its servers run.")
    adb: str = Field("adb", description="The adb program: a name on the PATH, or a path.")
    apps: Mapping[str, str] = Field(
        default_factory=dict,
        description="Names by which the policy may open apps → package, or package/activity. Other names are left to "
        "the AndroidWorld server; a package's own name always works.",
    )
    typing: Literal["input", "adb_keyboard"] = Field(
        "input",
        description="How text is entered: `adb shell input text`, which knows ASCII alone, or the ADBKeyBoard app, "
        "which you install on the devices and which knows every character.",
    )
    accessibility_tree: bool = Field(
        False, description="Whether observations have the accessibility tree (`uiautomator dump`, a second or more)."
    )
    renew: str = Field(
        "home",
        description="What follows an episode's tear-down: `home` force-stops the packages in `stop` and presses home; "
        "`snapshot:NAME` loads that snapshot of an emulator of this machine; anything else is a command, run on the "
        "env worker's machine without a shell, in which {serial} and {adb_server} stand for the device's.",
    )
    stop: tuple[str, ...] = Field((), description="Packages that `renew: home` force-stops.")
    settle_seconds: float = Field(
        0.5, ge=0.0, description="The screenshot is taken once the screen has shown nothing new for so long…"
    )
    max_settle_seconds: float = Field(6.0, ge=0.0, description="…or after this long, if it does not come to rest.")
    max_wait_seconds: float = Field(
        5.0, ge=0.0, description="The longest `wait`, long press or drag that is carried out."
    )
    scroll_fraction: float = Field(
        0.1, gt=0.0, le=1.0, description="How far one notch of `scroll` moves the finger, as a fraction of the screen."
    )
    command_seconds: float = Field(30.0, gt=0, description="How long one adb command may take.")
    server_seconds: float = Field(
        240.0, gt=0, description="How long AndroidWorld's server may take to prepare or to grade a task."
    )
    boot_seconds: float = Field(300.0, gt=0, description="How long a device may take to come up and answer.")
    renew_seconds: float = Field(300.0, gt=0, description="How long `renew` may take.")
    locks_folder: Path = Field(
        LOCKS, description="Where the env workers of this machine lock the devices that they use."
    )

    @field_validator("devices", mode="before")
    @classmethod
    def _written_short(cls, raw: object) -> object:
        """A text is a serial."""
        if isinstance(raw, list | tuple):
            return [{"serial": one} if isinstance(one, str) else one for one in raw]
        return raw

    @field_validator("stop")
    @classmethod
    def _packages(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [one for one in stop if not re.fullmatch(r"[\w.]+", one)]:
            raise ValueError(f"{wrong[0]!r} is not a package name: write it as in com.android.chrome")
        return stop

    @field_validator("renew")
    @classmethod
    def _readable(cls, renew: str) -> str:
        return checked("renew", renew, "home, snapshot:NAME or a command", nothing=SNAPSHOT)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        keys = [device.key for device in self.devices]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"devices: {twice[0]} is named twice: one environment holds a device, so name it once")
        servers = [device.android_world for device in self.devices]
        if self.tasks_folder is not None and any(servers):
            raise ValueError("tasks_folder and android_world are two sources of tasks: leave one of them out")
        if self.tasks_folder is None:
            if without := [device.serial for device in self.devices if not device.android_world]:
                raise ValueError(
                    f"devices: {without[0]} has no android_world and there is no tasks_folder, so there are no tasks: "
                    "give each device the address of its AndroidWorld server, or name a folder of tasks"
                )
            if shared := sorted({url for url in servers if servers.count(url) > 1}):
                raise ValueError(f"devices: {shared[0]} serves two devices: an AndroidWorld server has one device")
        if self.renew.startswith(SNAPSHOT) and (others := [one for one in self.devices if not one.emulator_here]):
            load = f"adb -s emulator-5554 emu avd snapshot load {self.renew.removeprefix(SNAPSHOT)}"
            raise ValueError(
                f"renew {self.renew!r} works only for emulators of this machine, such as emulator-5554, and "
                f"{others[0].name} is elsewhere: write a command that does it on the emulator's host, such as a script "
                f"that chooses the host by {{adb_server}} and runs there: {load}"
            )
        if self.max_settle_seconds < self.settle_seconds:
            raise ValueError(
                f"max_settle_seconds {self.max_settle_seconds:g} is less than settle_seconds {self.settle_seconds:g}: "
                "it is the longest wait, so make it at least that"
            )
        return self
