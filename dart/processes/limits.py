"""What this machine's limits allow: open files, processes, shared memory and memory, beside what a config asks for."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from dart.config import Config
from dart.core.capacity.machine import memory_bytes
from dart.job import Job
from dart.shortage import MOST_OPEN_FILES
from dart.wire.channel import most_env_workers

ENVIRONMENT_BYTES = 10 << 20
"""The least that an environment of any world takes; a small desktop has 19 MB (docs/worlds.md)."""
_PIDS = Path("/sys/fs/cgroup/pids.max")


def problem(config: Config, job: Job) -> str | None:
    """What this machine's limits clearly do not allow, with the remedy; None if they may allow all."""
    workers, slots = job.environments(config), config.environment.slots
    if workers * slots > (most := memory_bytes() // ENVIRONMENT_BYTES):
        return (
            f"environment.slots {slots} on {workers} workers: {workers * slots} environments of at least "
            f"{ENVIRONMENT_BYTES >> 20} MB each need more than the {memory_bytes() >> 30} GB of memory here: use at "
            f"most {most // workers}, or start env workers on other machines"
        )
    if workers > (most := most_env_workers(_open_files())):
        return f"environment.workers {workers}: `ulimit -Hn` allows {most} of them to connect: raise it, or use fewer"
    return None


def notes(config: Config | None, job: Job) -> Iterator[str]:
    """For a person."""
    yield f"open files: {_open_files()}, so that {most_env_workers(_open_files())} env workers may connect"
    processes, most = resource.getrlimit(resource.RLIMIT_NPROC)[0], _PIDS.read_text().strip() if _PIDS.exists() else ""
    told = [n for n in (processes, int(most) if most.isdecimal() else -1) if n != resource.RLIM_INFINITY]
    yield f"processes and threads: {min(told) if told else 'no limit'}"
    if Path("/dev/shm").is_dir():
        yield f"shared memory (/dev/shm): {shutil.disk_usage('/dev/shm').free >> 20} MB free"
    wanted = f", and the config has {job.environments(config) * config.environment.slots}" if config else ""
    least, here = ENVIRONMENT_BYTES >> 20, memory_bytes()
    yield f"memory: {here >> 30} GB: at most {here // ENVIRONMENT_BYTES} environments of {least} MB or more{wanted}"


def _open_files() -> int:
    """The hard limit, to which every command raises its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
