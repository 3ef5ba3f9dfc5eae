"""What a fault does to the worker that it happens to, through its link."""

from __future__ import annotations

import asyncio

from benchmarks.simulation.faults.garbage import garbled
from benchmarks.simulation.faults.plan import Fault
from benchmarks.simulation.links import Link
from dart.v1 import session_pb2 as pb

_FAILING = {
    Fault.REPLICA_FAILS: pb.FAILURE_CODE_ENGINE,
    Fault.ENVIRONMENTS_FAIL: pb.FAILURE_CODE_ENVIRONMENT,
    Fault.TRAINER_FAILS: pb.FAILURE_CODE_TRAINER,
}
_HANGING = {Fault.REPLICA_HANGS, Fault.ENVIRONMENTS_HANG, Fault.TRAINER_HANGS}


async def befall(link: Link, fault: Fault, seconds: float) -> None:
    """Let the fault happen; returns when it is over, or at once if the link ends it by itself."""
    trouble, now = link.trouble, asyncio.get_running_loop().time()
    match fault:
        case _ if fault in _FAILING:
            trouble.failing = _FAILING[fault]
            await asyncio.sleep(seconds)
            trouble.failing = pb.FAILURE_CODE_UNSPECIFIED
        case _ if fault in _HANGING:
            trouble.hung = True
            await asyncio.sleep(seconds)
            link.go_on()
        case Fault.DUPLICATES:
            trouble.duplicated = 0.5
            await asyncio.sleep(seconds)
            trouble.duplicated = 0.0
        case Fault.LATE:
            trouble.late, trouble.late_until = 0.5, max(trouble.late_until, now + seconds + trouble.latest_seconds)
            await asyncio.sleep(seconds)
            trouble.late = 0.0
        case Fault.STREAM_CUT | Fault.STREAM_LOST:
            link.cut(seconds)
        case Fault.WORKER_KILLED:
            link.die(seconds, f"again-{now:.3f}")
        case Fault.TRAINER_KILLED:
            link.die(1e9, "gone")  # the coordinator notices its silence and ends in order; another one resumes the run
        case Fault.GARBAGE:
            trouble.garbled = garbled
        case _:
            raise AssertionError(f"{fault} does not happen to a worker")


def twin_admitted(link: Link) -> str:
    """Let another process dial with this worker's name. Returns what went wrong; it must be refused, and change nothing
    for the live worker.

    Nothing is tried while the worker has no stream, or its heartbeats may be late: it may then count as gone.
    """
    now, live = asyncio.get_running_loop().time(), link.worker
    if live is None or not link.up or live.state == "lost" or now < link.trouble.late_until:
        return ""
    before = live.state, live.connections, live.end.oldest(now)
    twin = link.twin()
    if twin.up or not twin.rejections:
        return f"a twin of {live.id} was admitted"
    if before != (live.state, live.connections, live.end.oldest(now)):
        return f"a twin has disturbed {live.id}"
    return ""
