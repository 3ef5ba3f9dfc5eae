"""The world `android`: what the env worker sees of it. Imports without adb or httpx."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel

from dart.errors import UserError
from dart.workers.env.android.gestures import ACTIONS
from dart.workers.env.android.options import AndroidOptions, Device
from dart.workers.env.android.tasks import Folder, OwnTasks
from dart.worlds import Env, Full, Timeouts, World
from dart.worlds.closing import close_all
from dart.worlds.locks import Locks
from dart.worlds.missing import package, problem

if TYPE_CHECKING:
    import httpx

    from dart.workers.env.android.device import Phone
    from dart.workers.env.android.environment import AndroidEnv, Tasks

_httpx = partial(package, "httpx", extra="android")


class Android(World):
    """The devices that the options name, an environment for each."""

    Options = AndroidOptions
    actions = ACTIONS
    timeouts = Timeouts(lease=900, reset=900, act=240, judge=600, probe=120, renew=900)

    def __init__(self) -> None:
        self._resources = AsyncExitStack()
        self._options: AndroidOptions
        self._screen = (0, 0)
        self._version = ""
        self._locks: Locks
        self._folder: Folder | None = None
        self._client: httpx.AsyncClient | None = None
        self._waiting: list[Device] = []
        """Devices that no environment of ours has; one that failed goes to the end."""
        self._leased: dict[AndroidEnv, Device] = {}

    @classmethod
    def check_tasks(cls, options: BaseModel, names: Collection[str]) -> None:
        """That the folder, or the AndroidWorld server if it can be asked from here, has the tasks."""
        assert isinstance(options, AndroidOptions)
        if options.tasks_folder is not None:
            Folder(options.tasks_folder).check(names)
        elif _httpx() is None:
            from dart.workers.env.android.reachable import check_names

            check_names(options, names)

    @classmethod
    def checks(cls, options: BaseModel) -> Mapping[str, Callable[[], str | None]]:
        return cls.checks_with_screen(options, None)

    @classmethod
    def checks_with_screen(
        cls, options: BaseModel, screen: tuple[int, int] | None
    ) -> Mapping[str, Callable[[], str | None]]:
        assert isinstance(options, AndroidOptions)
        from dart.workers.env.android import reachable

        checks: dict[str, Callable[[], str | None]] = {
            "adb": lambda: reachable.adb(options),
            "android devices": lambda: reachable.devices(options, screen) if reachable.adb(options) is None else None,
        }
        if (folder := options.tasks_folder) is not None:
            checks["android tasks"] = lambda: problem(lambda: Folder(folder))
        else:
            checks["httpx"] = _httpx
            checks["android_world servers"] = lambda: reachable.servers(options) if _httpx() is None else None
        return checks

    @property
    def versions(self) -> Mapping[str, str]:
        return {"adb": self._version} if self._version else {}

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        """Raises UserError without adb or, where it is needed, httpx."""
        assert isinstance(options, AndroidOptions)
        from dart.workers.env.android.adb import Adb

        self._options, self._screen = options, screen
        self._locks, self._waiting = Locks(options.locks_folder), list(options.devices)
        if options.tasks_folder is not None:
            self._folder = Folder(options.tasks_folder)
        elif (missing := _httpx()) is not None:
            raise UserError(missing)
        else:
            import httpx

            # No proxies from the environment: servers are on a network of one's own. A connection for each request:
            # after an error 500 the server closes the connection, which a next request may notice too late.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            client = httpx.AsyncClient(trust_env=False, limits=limits)
            self._client = await self._resources.enter_async_context(client)
        for device in {device.adb_server: device for device in options.devices}.values():
            self._version = await Adb(options.adb, device, options.command_seconds).start_server()

    async def lease(self) -> Env:
        """The next device that nobody has. Raises Full, DeviceError, and UserError for a wrong screen."""
        from dart.workers.env.android.adb import Adb
        from dart.workers.env.android.device import Phone
        from dart.workers.env.android.environment import AndroidEnv

        device = next((one for one in self._waiting if self._locks.take(one.lock)), None)
        if device is None:
            raise Full(
                f"all {len(self._options.devices)} devices in environment.options.devices are in use: name more of "
                "them, or have fewer environment.slots"
            )
        self._waiting.remove(device)
        async with AsyncExitStack() as undo:
            undo.callback(self._give_back, device)
            phone = Phone(Adb(self._options.adb, device, self._options.command_seconds), self._options)
            await phone.boot(self._screen)
            env = AndroidEnv(self._options, self._screen, phone, self._tasks(phone))
            undo.pop_all()
        self._leased[env] = device
        return env

    async def dispose(self, env: Env) -> None:
        device = next(held for one, held in self._leased.items() if one is env)
        self._leased = {one: held for one, held in self._leased.items() if one is not env}
        try:
            await env.close()
        finally:
            self._give_back(device)

    async def close(self) -> None:
        await close_all(self.dispose(env) for env in list(self._leased))
        await self._resources.aclose()

    def _give_back(self, device: Device) -> None:
        self._locks.give_back(device.lock)
        self._waiting.append(device)

    def _tasks(self, phone: Phone) -> Tasks:
        if self._folder is not None:
            return OwnTasks(phone, self._folder)
        from dart.workers.env.android.benchmark import Benchmark

        assert self._client is not None
        url, options = phone.adb.device.android_world, self._options
        return Benchmark(url, options.task_family, options.server_seconds, self._client)
