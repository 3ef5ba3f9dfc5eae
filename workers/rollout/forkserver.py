"""Starts vLLM's engine process by fork from a clean copy of this process, instead of importing everything again.

Importing torch and vLLM takes longer than the rest of an engine's start. On a GPU, and if `prepare` was not
called, vLLM's own way is used (a new interpreter that imports again). On a CPU, `prepare` is called before this process
has threads, an event loop or gRPC, none of which survive a fork: it imports vLLM and forks a copy that only waits.
`engine_starter` then makes vLLM's engine process a fork of that copy.

The copy is the standard library's fork server (`multiprocessing.forkserver`), forked where the standard library would
start a new interpreter. This uses a few of its internals, checked for Python 3.11 to 3.13. The copy ends when its owner
does.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, context, forkserver, resource_tracker
from pathlib import Path
from typing import Any

from dart.core.capacity import devices
from dart.workers.rollout import environment
from dart.workers.weights.owner import own_engines


def prepare() -> bool:
    """Import vLLM and fork the copy; True when there is one. Call once, first thing in the process."""
    own_engines()
    environment.apply()
    if not devices.on_cpu() or not sys.platform.startswith("linux") or sys.version_info >= (3, 14):
        return False
    import vllm.model_executor.models.qwen3_vl
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    if _threads() == 1:
        _start_copy()
    return _copy_runs()


@contextmanager
def engine_starter() -> Iterator[None]:
    """Inside, processes that vLLM's engine client starts are forks of the copy, where there is one."""
    if not _copy_runs():
        yield
        return
    from vllm.v1.engine import utils

    original = utils.get_mp_context
    utils.get_mp_context = _Context
    try:
        yield
    finally:
        utils.get_mp_context = original


class _Process(context.ForkServerProcess):
    """Takes the current environment variables along: those of the copy are as old as the copy."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


def _copy_runs() -> bool:
    return _server()._forkserver_pid is not None


def _server() -> Any:
    return forkserver._forkserver


def _start_copy() -> None:
    """`ForkServer.ensure_running`, with a fork instead of a new interpreter."""
    resource_tracker.ensure_running()
    server = _server()
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        listener.listen()
        alive_read, alive_write = os.pipe()
        copy = os.fork()
        if copy == 0:
            os.close(alive_write)
            try:
                forkserver.main(listener.detach(), alive_read, [])
            finally:
                os._exit(0)  # None of the owner's exit handlers may run here.
        os.close(alive_read)
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_write
    server._forkserver_pid = copy


def _threads() -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
