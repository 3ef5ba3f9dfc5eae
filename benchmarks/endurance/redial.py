"""Workers under cut connections and killed coordinators: `python -m benchmarks.endurance.redial`.

Real: worker processes with the project's own end of a session, a coordinator process with the project's server and
fleet, gRPC between them, and a TCP proxy that cuts and holds connections at random. Simulated: what a command does (it
takes up to 20 ms). Every worker counts how often it carried out each command; the coordinator counts calls and answers.

Measured: workers that ended, commands carried out twice, calls without an answer while the coordinator was alive, and
how long a worker took to be ready again. Writes results/redial.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from benchmarks.endurance.proxy import Proxy
from dart import config
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet, InfrastructureError, Worker
from dart.coordinator.summary import machine, software, write_json
from dart.v1 import control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire.channel import OPTIONS, Dial
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.session import Key
from dart.wire.worker import WorkerOptions, serve

RESULT = Path(__file__).parents[1] / "results" / "redial.json"
ITSELF = (sys.executable, "-m", "benchmarks.endurance.redial")
SLOTS = 4
COMMAND_SECONDS = (0.0, 0.02)
CANCELLED_SHARE = 0.1
"""The share of calls whose caller gives up while the worker carries them out, and releases the environment."""
CUT_EVERY_SECONDS = (0.2, 1.0)
KILL_EVERY_SECONDS = (1.0, 3.0)
READY_WITHIN_SECONDS = 30.0


class Apart(Dial):
    """Gives each channel its own connection; otherwise channels of one process to one address share one."""

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=(*OPTIONS, ("grpc.use_local_subchannel_pool", 1)))


class Counting(WorkerRole):
    """An env worker that only counts; two commands of the same assignment must never overlap."""

    role = pb.ROLE_ENV

    def __init__(self, seed: int = 0) -> None:
        self.carried_out: Counter[tuple[int, Key]] = Counter()
        """How often each command was carried out, by epoch and command."""
        self.overtaken = 0
        self._at_work: set[tuple[str, int]] = set()
        self._chance = random.Random(seed)

    @property
    def twice(self) -> int:
        return sum(1 for times in self.carried_out.values() if times > 1)

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=SLOTS)

    async def handle(self, command: Command) -> Reply | None:
        assignment = command.assignment
        work = (assignment.assignment_id, assignment.attempt)
        self.carried_out[assignment.epoch, (*work, assignment.sequence)] += 1
        self.overtaken += work in self._at_work
        self._at_work.add(work)
        try:
            await asyncio.sleep(self._chance.uniform(*COMMAND_SECONDS))
        finally:
            self._at_work.discard(work)
        return pb.Released() if isinstance(command, pb.Release) else pb.Observed(done=True)

    async def close(self) -> None:
        self._at_work.clear()


@dataclass(slots=True)
class Calls:
    """The calls that a coordinator made, and their outcomes."""

    made: int = 0
    answered: int = 0
    given_up: int = 0
    lost: int = 0
    ready: int = 0
    """How many workers became ready."""


async def episodes(worker: Worker, calls: Calls, chance: random.Random, stop: asyncio.Event, name: str) -> None:
    """Episode after episode in one environment; some callers give up. Ends with the worker, or when `stop` is set."""
    number = 0
    with contextlib.suppress(InfrastructureError):
        while not stop.is_set():
            number += 1
            work = pb.Assignment(assignment_id=f"{name}-{number}", attempt=1)
            try:
                for _ in range(3):
                    await _one_call(worker, work, calls, chance)
            except TimeoutError:
                calls.given_up += 1
            finally:
                worker.tell(pb.Release(assignment=work))
                worker.end_assignment(work.assignment_id, 1)


async def _one_call(worker: Worker, work: pb.Assignment, calls: Calls, chance: random.Random) -> None:
    calls.made += 1
    patience = chance.uniform(0.0, 0.02) if chance.random() < CANCELLED_SHARE else None
    try:
        async with asyncio.timeout(patience):
            await worker.call(pb.Act(assignment=work))
    except InfrastructureError:
        calls.lost += 1
        raise
    calls.answered += 1


async def coordinate(port: int, seed: int) -> None:
    """Be a coordinator process: make calls until standard input closes, then say goodbye and print the counts."""
    settings = config.Server(port=port, heartbeat_seconds=0.5, lost_after_seconds=10.0)
    fleet, calls, stop = Fleet(settings.lost_after_seconds), Calls(), asyncio.Event()
    server = Server(settings)
    async with asyncio.TaskGroup() as tasks:

        def ready(worker: Worker) -> None:
            calls.ready += 1
            for slot in range(SLOTS):
                chance = random.Random(f"{seed}/{worker.id}/{slot}")
                tasks.create_task(episodes(worker, calls, chance, stop, f"{worker.id}-{slot}"))
            print("ready", flush=True)

        fleet.on_ready.append(ready)
        reaping = tasks.create_task(fleet.reap())
        service = CoordinatorService(fleet, settings, "redial", lambda hello: "{}")
        await server.start(service, control_pb2_grpc.ControlServiceServicer())
        print(f"listening {server.port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        stop.set()
        await _until(lambda: not any(worker.end.unanswered for worker in fleet.workers.values()))
        fleet.say_goodbye("over")
        await _until(lambda: not fleet.workers)
        reaping.cancel()
    await server.stop()
    print(json.dumps(asdict(calls)), flush=True)


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.05)


async def work(address: str, name: str, seed: int) -> None:
    """Be a worker process."""
    role = Counting(seed)
    options = WorkerOptions(Apart(address), name, connect_seconds=READY_WITHIN_SECONDS)
    reason = await serve(role, options, asyncio.Event())
    print(json.dumps({"reason": reason, "twice": role.twice, "overtaken": role.overtaken,
                      "commands": len(role.carried_out)}))  # fmt: skip


class Coordinator:
    """The script's handle on the coordinator's process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port = process, port

    @classmethod
    async def start(cls, port: int, seed: int) -> Coordinator:
        process = await asyncio.create_subprocess_exec(
            *ITSELF, "--coordinator", str(port), "--seed", str(seed),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        return cls(process, int(line.removeprefix("listening ")))

    async def ready(self, workers: int) -> None:
        """Wait until this many workers have become ready."""
        assert self.process.stdout is not None
        async with asyncio.timeout(READY_WITHIN_SECONDS):
            for _ in range(workers):
                await self.process.stdout.readline()

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def end(self) -> Calls:
        out, _ = await asyncio.wait_for(self.process.communicate(b""), 60)
        return Calls(**json.loads(out.decode().splitlines()[-1]))


async def start_workers(port: int, workers: int, seed: int) -> list[asyncio.subprocess.Process]:
    return [
        await asyncio.create_subprocess_exec(
            *ITSELF, "--worker", f"127.0.0.1:{port}", "--name", f"w{number}", "--seed", str(seed + number),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        for number in range(workers)
    ]  # fmt: skip


async def ended(workers: list[asyncio.subprocess.Process]) -> dict[str, int]:
    """The workers' counts after the coordinator's goodbye; `ended`: how many workers ended for another reason."""
    counts: Counter[str] = Counter(ended=0, twice=0, overtaken=0, commands=0)
    for worker in workers:
        out, err = await asyncio.wait_for(worker.communicate(), 60)
        if worker.returncode:
            counts["ended"] += 1
            print(err.decode()[-2000:], file=sys.stderr)
            continue
        counted = json.loads(out)
        counts["ended"] += counted.pop("reason") != "over"
        counts.update(counted)
    return dict(counts)


async def cuts(workers: int, count: int, seed: int) -> dict[str, object]:
    """Cut connections `count` times, one worker's or all; the coordinator keeps running."""
    chance = random.Random(seed)
    coordinator = await Coordinator.start(0, seed)
    proxy = Proxy(coordinator.port)
    await proxy.start()
    crew = await start_workers(proxy.port, workers, seed)
    await coordinator.ready(workers)
    for _ in range(count):
        await asyncio.sleep(chance.uniform(*CUT_EVERY_SECONDS))
        if chance.random() < 0.3:
            await proxy.hold(chance.uniform(0.0, 0.5))
        if chance.random() < 0.5:
            proxy.cut_all()
        else:
            proxy.cut_one(chance)
    calls = await coordinator.end()
    counts = await ended(crew)
    await proxy.stop()
    return {"workers": workers, "cuts": count, **counts, **asdict(calls)}


async def kills(workers: int, count: int, seed: int) -> dict[str, object]:
    """Kill the coordinator `count` times under load, and restart it on the same port."""
    chance = random.Random(seed)
    coordinator = await Coordinator.start(0, seed)
    crew = await start_workers(coordinator.port, workers, seed)
    await coordinator.ready(workers)
    took = []
    for number in range(count):
        await asyncio.sleep(chance.uniform(*KILL_EVERY_SECONDS))
        await coordinator.kill()
        coordinator = await Coordinator.start(coordinator.port, seed + number)
        listens = time.monotonic()
        await coordinator.ready(workers)
        took.append(time.monotonic() - listens)
    await coordinator.end()
    counts = await ended(crew)
    ready = {"median": round(statistics.median(took), 2), "longest": round(max(took), 2)} if took else {}
    return {"workers": workers, "kills": count, **counts, "seconds_until_all_are_ready": ready}


async def measure(workers: int, cut_count: int, kill_count: int, seed: int) -> dict[str, object]:
    return {
        "cuts": await cuts(workers, cut_count, seed),
        "kills": await kills(workers, kill_count, seed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--coordinator", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.coordinator is not None:
        asyncio.run(coordinate(options.coordinator, options.seed))
        os._exit(0)  # the thread that reads standard input may still be blocked
    elif options.worker:
        asyncio.run(work(options.worker, options.name, options.seed))
    else:
        counts = asyncio.run(measure(options.workers, options.cuts, options.kills, options.seed))
        write_json(RESULT, {"machine": machine(), "software": software(), "seed": options.seed, **counts})
        print(json.dumps(counts, indent=2))


if __name__ == "__main__":
    main()
