"""Settings of a process: its garbage, the signals that end it, that it ends with its parent, and its environment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import getpass
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping

ENDING_SECONDS = 20.0
"""A process whose parent is gone ends itself after this long, whatever it is doing, unless it was told another time."""

OF_LAUNCHERS = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "FORK_LAUNCHED",
})  # fmt: skip
OF_LAUNCHERS_PREFIXES = (
    "TORCHELASTIC_", "PET_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DEEPSPEED_", "MEGATRON_LM_", "PMI_",
    "PMIX_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "VLLM_DP_",
)  # fmt: skip
"""With these, torchrun, Accelerate, MPI and vLLM tell the processes that they start who they are. A process that is
told so by mistake waits for others that never come, or sends its weights from another machine."""


def of_launchers(environment: Mapping[str, str]) -> list[str]:
    """The variables by which another launcher tells a process its place among others."""
    return [name for name in environment if name in OF_LAUNCHERS or name.startswith(OF_LAUNCHERS_PREFIXES)]


def own_environment(more: Mapping[str, str]) -> dict[str, str]:
    """For a process that dart starts: this one's variables without those of other launchers, and `more`."""
    left_out = {*of_launchers(os.environ)}
    return {name: value for name, value in os.environ.items() if name not in left_out} | dict(more)


def name_user(environment: MutableMapping[str, str]) -> None:
    """A container's user may have no name. Torch and vLLM ask for one when they are imported, to name folders by it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environment["USER"] = f"user-{os.getuid()}"


def collect_seldom() -> None:
    """Collect garbage cycles rarely, and never among the objects that exist now.

    Trajectories are many small records that live for minutes and are in no cycles. Going through them as often as
    Python does by itself takes a sixth of the coordinator's time, and a pass over those of thousands of environments
    holds every step up for a second. So old objects are hardly ever looked at, and new ones by the five thousand, which
    takes 13 ms: by fifty thousand it is ten times that, and every step behind it waits.
    """
    gc.collect()  # else what an earlier run in this process has left would be kept for good
    gc.freeze()
    gc.set_threshold(5_000, 10_000, 1_000)


def ending_signals() -> list[signal.Signals]:
    """The signals that mean "stop cleanly": Ctrl-C, SIGTERM, and a closing terminal.

    The last two only where they were not ignored when the process started, as under nohup.
    """
    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    return [signal.SIGINT, *heeded]


@contextlib.contextmanager
def interruptible(loop: asyncio.AbstractEventLoop, interrupt: Callable[[bool], None]) -> Iterator[None]:
    """Within, the signals that mean "stop cleanly" call `interrupt` on the loop, with True for Ctrl-C.

    Afterwards Ctrl-C raises KeyboardInterrupt, the others end the process, and nothing holds what `interrupt` belongs
    to.
    """
    numbers = ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number == signal.SIGINT)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def watch_parent(loop: asyncio.AbstractEventLoop, stop: Callable[[], None], seconds: float = ENDING_SECONDS) -> None:
    """Call `stop` on the loop when standard input, a pipe from the parent, closes: then the parent is gone. The process
    ends `seconds` later at the latest."""

    def watch() -> None:
        # Not sys.stdin: a thread that waits in it holds its lock, and the interpreter aborts if it exits meanwhile.
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(stop)
        time.sleep(seconds)  # a timer would be another thread, of which the machine may have none
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
