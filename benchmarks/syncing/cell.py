"""One cell of the benchmark: a size, a number of replicas, a schedule and a mode; several updates under load.

The coordinator's parts are assembled as in `dart.coordinator.run.Run`, without environments and training.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.syncing.crew import Crew, CrewError, Member
from benchmarks.syncing.plan import Scene, tensor_list
from benchmarks.syncing.watch import Load, Pause, Rotation, Served, served_within
from dart import config
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet, InfrastructureError, Worker
from dart.coordinator.service.journal import Journal
from dart.coordinator.training.ranks import TrainerRanks
from dart.coordinator.training.syncing import WeightSync
from dart.core.fleet.replicas import Replicas
from dart.core.progress import Progress
from dart.errors import UserError
from dart.screenshots.stored import StoredScreenshots
from dart.store.database import Database, sqlite_url
from dart.v1 import control_pb2_grpc
from dart.wire.channel import free_port
from dart.workers.weights.transfer import BUCKET_BYTES

TOKENS = 32
"""Average number of tokens per request."""
CLIENTS_PER_SLOT = 1.25
LINK_TIMES = 3
SLOWEST_BYTES_PER_SECOND = 20e6
"""A transfer slower than this counts as hung."""
PROCESS_BYTES = 150e6
"""Memory that a process takes in addition to its tensors."""
PARTS = ("pause", "waiting", "transfer", "join", "receive", "load", "rest")


def memory_needed(size: int, replicas: int, staged: int) -> float:
    """The tensors of the trainer and of each replica, copies staged in `staged` replicas, and the buckets of all."""
    return size * (1 + replicas + staged) + BUCKET_BYTES * 2 * staged + PROCESS_BYTES * (1 + replicas)


class CellError(Exception):
    """The cell could not be measured; the crew is in an unknown state."""


@dataclass(frozen=True, slots=True)
class Setting:
    bytes: int
    replicas: int
    schedule: str
    mode: str

    @property
    def memory(self) -> float:
        """The most bytes that it needs."""
        return memory_needed(self.bytes, self.replicas, self.replicas if self.schedule == "all" else 1)


@dataclass(frozen=True, slots=True)
class How:
    """The settings that all cells share."""

    repeats: int
    slots: int
    request_seconds: float
    before_seconds: float
    transport: str

    @property
    def after_seconds(self) -> float:
        """How long until every request that was in flight at an update has its answer."""
        return 1.5 * self.request_seconds + 0.2


@dataclass(frozen=True, slots=True)
class Update:
    version: int
    before: tuple[float, float]
    """The span just before it, in which nothing is updated."""
    published: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that was observed in a cell."""

    updates: list[Update]
    pauses: list[Pause]
    served: list[Served]
    times: dict[tuple[str, int], dict[str, float]]
    """(replica, version) → the phases as the replica timed them."""
    ahead: dict[tuple[str, int], tuple[float, float]]
    """The spans in which a replica received while it served."""
    failed_requests: int
    failed_transfers: int
    link_seconds: list[float]
    same_contents: bool


async def measure(crew: Crew, setting: Setting, how: How) -> dict[str, Any]:
    """The cell's row of results. Raises CellError."""
    size = sum(spec.bytes for spec in tensor_list(setting.bytes))
    try:
        members = await crew.members(1 + setting.replicas)
        for member in members:
            member.events.clear()
        link = await plain_link(members[0], members[1], size, how.transport)
        seen = await _session(members, setting, how)
        link += await plain_link(members[0], members[1], size, how.transport)
    except (CrewError, InfrastructureError, UserError, TimeoutError, ExceptionGroup) as errors:
        raise CellError("; ".join(dict.fromkeys(reasons(errors)))) from None
    seen.link_seconds.extend(link)
    return _row(setting, how, size, seen)


async def plain_link(sender: Member, receiver: Member, size: int, transport: str) -> list[float]:
    """Seconds that torch.distributed alone takes to send `size` bytes in one piece, from memory already allocated."""
    limit = 60 + (1 + LINK_TIMES) * _slowest(size)
    send = {"bytes": size, "times": 1 + LINK_TIMES, "transport": transport, "port": free_port(),
            "timeout_seconds": limit}  # fmt: skip
    async with asyncio.TaskGroup() as ends:
        sending = ends.create_task(sender.ask("link", limit, rank=0, **send))
        receiving = ends.create_task(receiver.ask("link", limit, rank=1, **send))
    pairs = zip(sending.result()["spans"], receiving.result()["spans"], strict=True)
    return [ended - began for (began, _), (_, ended) in list(pairs)[1:]]


async def _session(members: Sequence[Member], setting: Setting, how: How) -> Seen:
    """The updates of a cell, from the workers' Hello to their goodbye."""
    transfer_limit = 60 + setting.replicas * _slowest(setting.bytes)
    limit = 120 + (1 + how.repeats) * (how.before_seconds + how.after_seconds + setting.replicas * transfer_limit)
    scene = Scene(setting.bytes, how.slots, how.request_seconds / TOKENS, how.transport, transfer_limit)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with await Database.open(sqlite_url(folder / "run.db"), folder / "blobs") as database:
            await database.start_run("benchmark", "weight-sync", {}, started=time.time())
            return await asyncio.wait_for(_updates(members, setting, how, scene, database, folder, limit), limit)


async def _updates(
    members: Sequence[Member], setting: Setting, how: How, scene: Scene, database: Database, folder: Path, limit: float
) -> Seen:
    fleet = Fleet(60.0)
    together = setting.schedule == "all"
    replicas: Replicas[Worker] = Replicas(time.monotonic(), together=together)
    policy, ranks = (
        RolloutPool(fleet, StoredScreenshots(None), replicas),
        TrainerRanks(fleet, 1, StoredScreenshots(None)),
    )
    journal = Journal(folder / "metrics.jsonl")
    sync_settings = config.Sync(transport=scene.transport, mode=setting.mode, timeout_seconds=scene.timeout_seconds)
    sync = WeightSync(sync_settings, replicas, ranks, database, Progress(1), journal)
    rotation, load = Rotation(policy), Load(policy, TOKENS)
    all_here = _when_ready(fleet, len(members))
    server_settings = config.Server(heartbeat_seconds=5.0, lost_after_seconds=60.0)
    server = Server(server_settings)
    sessions = CoordinatorService(fleet, server_settings, "benchmark", lambda hello: scene.to_json())
    await server.start(sessions, control_pb2_grpc.ControlServiceServicer())
    updates: list[Update] = []
    lost: list[str] = []
    clients = round(CLIENTS_PER_SLOT * how.slots * setting.replicas)
    try:
        async with asyncio.TaskGroup() as tasks:
            for name, role, member in zip(_names(setting), _roles(setting), members, strict=True):
                tasks.create_task(member.ask("serve", limit, role=role, name=name, address=server.address))
            await all_here.wait()
            fleet.on_lost.append(lambda worker: None if worker.said_goodbye else lost.append(worker.id))
            work = [sync.run(), fleet.reap(), journal.write_events(database), *map(load.client, range(clients))]
            background = [tasks.create_task(each) for each in work]
            await asyncio.sleep(how.after_seconds)
            for number in range(1, 2 + how.repeats):
                began = time.monotonic()
                await asyncio.sleep(how.before_seconds)
                before = began, time.monotonic()
                trained = await ranks.update(number, [])
                await database.add_version(trained.weight_version, number, {}, time.time())
                updates.append(Update(trained.weight_version, before, time.monotonic()))
                sync.staged(trained.weight_version, trained.tensors)
                await sync.settled()
                await asyncio.sleep(how.after_seconds)
                if lost:
                    raise CrewError(f"the coordinator lost {', '.join(lost)}")
            for task in background:
                task.cancel()
            fleet.say_goodbye("done")
    finally:
        await server.stop()
        journal.close()
    return _seen(members, updates, rotation, load, folder)


def _seen(members: Sequence[Member], updates: list[Update], rotation: Rotation, load: Load, folder: Path) -> Seen:
    """What the members and the journal report, combined."""
    events = [event for member in members for event in member.events]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Seen(
        updates=updates,
        pauses=rotation.pauses,
        served=[
            Served(event["who"], *stretch)
            for event in events
            if event["event"] == "served"
            for stretch in event["stretches"]
        ],
        times={(event["who"], event["version"]): event["times"] for event in events if event["event"] == "updated"},
        ahead={(e["who"], e["version"]): e["ahead"] for e in events if e["event"] == "updated" and e["ahead"]},
        failed_requests=load.failed,
        failed_transfers=sum(json.loads(line)["event"] == "sync_failed" for line in lines),
        link_seconds=[],
        same_contents=len({event["checksum"] for event in events if event["event"] == "held"}) == 1,
    )


def _when_ready(fleet: Fleet, count: int) -> asyncio.Event:
    all_here = asyncio.Event()
    fleet.on_ready.append(
        lambda _: all_here.set() if sum(w.state == "ready" for w in fleet.workers.values()) == count else None
    )
    return all_here


def _names(setting: Setting) -> list[str]:
    return ["train", *(f"replica-{number}" for number in range(setting.replicas))]


def _roles(setting: Setting) -> list[str]:
    return ["train", *["rollout"] * setting.replicas]


# ---- results ----


def _row(setting: Setting, how: How, size: int, seen: Seen) -> dict[str, Any]:
    """Medians over the replicas' pauses in all updates but the first, in which groups are joined."""
    by_update = [_pauses_of(seen, number) for number in range(len(seen.updates))]
    first, later = by_update[0], [pause for pauses in by_update[1:] for pause in pauses]
    if any(len(pauses) != setting.replicas for pauses in by_update) or not seen.same_contents:
        counts = [len(pauses) for pauses in by_update]
        raise CellError(f"pauses by update {counts}; contents equal: {seen.same_contents}")
    link = statistics.median(seen.link_seconds)
    seconds = {part: _median(_parts(seen, pause)[part] for pause in later) for part in PARTS}
    names = set(_names(setting)[1:])
    last = max(pause.back for pause in seen.pauses)  # Requests in flight at the end of the cell are ended, too.
    return {
        "bytes": size,
        "replicas": setting.replicas,
        "schedule": setting.schedule,
        "mode": setting.mode,
        "pauses": len(later),
        "seconds": seconds | {"longest_pause": round(max(pause.back - pause.out for pause in later), 4)},
        "first_update_seconds": {part: _median(_parts(seen, pause)[part] for pause in first) for part in PARTS},
        "all_serve_seconds": _median(_until_all_serve(seen, number) for number in range(1, len(by_update))),
        "link": {
            "seconds": round(link, 4),
            "megabytes_per_second": round(size / link / 1e6, 1),
            "spread_seconds": [round(min(seen.link_seconds), 4), round(max(seen.link_seconds), 4)],
        },
        "over_link": {
            "pause": round(seconds["pause"] / link, 2),
            "pause_without_waiting": round((seconds["pause"] - seconds["waiting"]) / link, 2),
            "transfer": round(seconds["transfer"] / link, 2),
        },
        "requests_per_second_before": round(_rate_before(seen, names) / how.request_seconds, 1),
        "others_throughput": _others(seen, names, by_update) if setting.schedule == "rolling" else None,
        "received_ahead": _received_ahead(seen, names, link) if setting.schedule == "rolling" else None,
        "requests_thrown_away": sum(one.thrown_away and one.ended <= last for one in seen.served),
        "failed_requests": seen.failed_requests,
        "failed_transfers": seen.failed_transfers,
    }


def _pauses_of(seen: Seen, number: int) -> list[Pause]:
    """The pauses of the update with this index."""
    ends = [update.published for update in seen.updates[1:]] + [float("inf")]
    return [pause for pause in seen.pauses if seen.updates[number].published <= pause.out < ends[number]]


def _parts(seen: Seen, pause: Pause) -> dict[str, float]:
    """A pause as the coordinator saw it, split into the parts that the replica reports.

    `waiting`: until no request is left; the coordinator waits for that before it lets the replica load. `rest` is
    messages in flight and, if all are updated at once, receiving and the wait for the other replicas.
    """
    version = max(update.version for update in seen.updates if update.published <= pause.out)
    moments = seen.times[pause.replica, version]
    _, received = seen.ahead.get((pause.replica, version), (0.0, 0.0))
    waiting, transfer = moments["idle"] - max(pause.out, received), moments["loaded"] - moments["idle"]
    whole = pause.back - pause.out
    return {
        "pause": whole,
        "waiting": waiting,
        "transfer": transfer,
        "join": moments["joined"] - moments["idle"],
        "receive": moments["received"] - moments["joined"],
        "load": moments["loaded"] - moments["received"],
        "rest": whole - waiting - transfer,
    }


def _until_all_serve(seen: Seen, number: int) -> float:
    return max(pause.back for pause in _pauses_of(seen, number)) - seen.updates[number].published


def _rate_before(seen: Seen, names: set[str]) -> float:
    """Seconds of sleep served per second, before the updates."""
    spans = [update.before for update in seen.updates]
    return sum(served_within(seen.served, names, *span) for span in spans) / sum(end - start for start, end in spans)


def _others(seen: Seen, names: set[str], by_update: list[list[Pause]]) -> float | None:
    """What the other replicas served during each pause, relative to before; without the first update."""
    if len(names) == 1:
        return None
    made = expected = 0.0
    for update, pauses in list(zip(seen.updates, by_update, strict=True))[1:]:
        start, end = update.before
        for pause in pauses:
            others = names - {pause.replica}
            made += served_within(seen.served, others, pause.out, pause.back)
            rate = served_within(seen.served, others, start, end) / (end - start)
            expected += rate * (pause.back - pause.out)
    return round(made / expected, 4)


def _received_ahead(seen: Seen, names: set[str], link: float) -> dict[str, float] | None:
    """How long receiving while serving took, and what all replicas served meanwhile relative to before."""
    spans = [span for (_, version), span in seen.ahead.items() if version > seen.updates[0].version]
    if not spans:
        return None
    taken = sum(end - began for began, end in spans)
    throughput = sum(served_within(seen.served, names, *span) for span in spans) / (taken * _rate_before(seen, names))
    seconds = _median(end - began for began, end in spans)
    return {"seconds": seconds, "over_link": round(seconds / link, 2), "throughput": round(throughput, 4)}


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def _slowest(size: int) -> float:
    return size / SLOWEST_BYTES_PER_SECOND


def reasons(error: BaseException) -> list[str]:
    """The message of every exception in a group."""
    if isinstance(error, BaseExceptionGroup):
        return [reason for inside in error.exceptions for reason in reasons(inside)]
    return [str(error) or type(error).__name__]
