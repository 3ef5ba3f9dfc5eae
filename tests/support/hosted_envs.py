"""The real env worker's role (`dart.workers.env.role`, with its `places`) on the virtual clock, as a simulated worker.

Real: the role, how it leases, bounds, renews and replaces environments, and its `Slots`. Simulated: the world that it
hosts, and the stream, which delivers every message at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from benchmarks.simulation.workers import SimulatedWorker
from dart import config
from dart.coordinator.fleet.sessions import Fleet
from dart.v1 import session_pb2 as pb
from dart.wire.role import Command, CommandError, Reply
from dart.workers.env.role import EnvRole

NOT_COMMANDS = ("bye", "heartbeat", "welcome", "reject")


class HostedEnvs(SimulatedWorker):
    """Make one with `start`."""

    role = pb.ROLE_ENV
    capabilities = EnvRole.capabilities
    shares_blobs = False

    def __init__(self, fleet: Fleet, name: str, hosts: EnvRole, ready: pb.Ready) -> None:
        self._hosts = hosts
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(fleet, name, ready.slots, longest_seconds=ready.longest_seconds)
        self._begin(hosts.run(self._say))

    @classmethod
    async def start(cls, fleet: Fleet, name: str, environment: config.Environment) -> HostedEnvs:
        hosts = EnvRole()
        ready = await hosts.prepare(config.EnvWorkerConfig(environment=environment).model_dump_json())
        return cls(fleet, name, hosts, ready)

    def carry_out(self, message: pb.SessionResponse) -> None:
        body = message.WhichOneof("body")
        if body is not None and body not in NOT_COMMANDS:
            self._begin(self._carry_out(getattr(message, body)))

    async def close(self) -> None:
        """Cancel what is under way, and close the world."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hosts.close()

    async def _carry_out(self, command: Command) -> None:
        reply: Reply | pb.Failure | None
        try:
            reply = await self._hosts.handle(command)
        except CommandError as error:
            reply = pb.Failure(code=error.code, message=str(error))
        if reply is not None:
            self.answer(command, 0.0, **{reply.DESCRIPTOR.name.lower(): reply})

    def _say(self, slots: pb.Slots) -> None:
        self._loop.call_soon(self._reply, pb.SessionRequest(slots=slots))

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
