"""Ray as a contender of `benchmarks.transport`: environments as actors, which a driver asks for steps.

It stores and checks nothing; a screenshot passes through shared memory, or, in the "inlined" variants, with the answer
itself (a system setting of Ray's beyond its defaults). Run by the peers' interpreter.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import gettempdir
from typing import Any

# Before Ray is imported: no usage reports, no token in the home directory, and no workers killed because other jobs
# have filled the machine's memory.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_memory_monitor_refresh_ms="0")

import numpy as np
import ray

from benchmarks.peers import shared

STORE_BYTES = 1 << 30
CALLS_AT_ONCE, CALLS_PER_LOOK = 1000, 100


@contextmanager
def cluster(cores: int = 1, inline: bool = False) -> Iterator[None]:
    """Ray on this machine, for this program only. `cores`: a number for its scheduler, not a limit."""
    settings = {"max_direct_call_object_size": 2 * shared.SCREENSHOT_BYTES} if inline else {}
    ray.init(
        num_cpus=cores,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _node_ip_address="127.0.0.1",
        _temp_dir=f"{gettempdir()}/ray",
        _system_config=settings,
    )
    try:
        yield
    finally:
        ray.shutdown()


class Environments:
    """An actor for any number of environments, since a step takes no time."""

    def __init__(self, size: int) -> None:
        self._screenshots = shared.Screenshots(size)

    def step(self, environment: int) -> bytes:
        return self._screenshots.next()

    def step_array(self, environment: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._screenshots.next(), np.uint8)


class Policy:
    """An actor that receives a screenshot and reads it."""

    def generate(self, screenshot: Any) -> str:
        shared.touch(screenshot)
        return "Action: click(start_box='(045,120)')"


class Producer:
    """An actor that produces whole trajectories."""

    def __init__(self) -> None:
        self._ring = deque(shared.trajectories())
        self._arrays = deque(np.frombuffer(b"".join(one), np.uint8).reshape(shared.STEPS, -1) for one in self._ring)

    def trajectory(self) -> list[bytes]:
        self._ring.rotate()
        return self._ring[0]

    def trajectory_array(self) -> np.ndarray[Any, Any]:
        self._arrays.rotate()
        return self._arrays[0]


def _actors(kind: type, count: int, *arguments: Any) -> list[Any]:
    """Actors that have answered, so that their processes are known to be up."""
    remote = ray.remote(num_cpus=0)(kind)
    made = [remote.remote(*arguments) for _ in range(count)]
    ray.get([actor.__ray_ready__.remote() for actor in made])
    return made


def steps(variant: str, warm: float, seconds: float) -> None:
    """The driver has one call in flight per environment."""
    processes, form = variant.split(", ", 1)
    with cluster(inline="inlined" in form):
        actors = _actors(Environments, int(processes.split()[0]), shared.SCREENSHOT_BYTES)
        ask = [getattr(actor, "step_array" if form.startswith("arrays") else "step").remote for actor in actors]
        paths = shared.Paths()
        under_way: dict[Any, tuple[int, float]] = {}

        def begin(environment: int) -> None:
            under_way[ask[environment % len(ask)](environment)] = environment, time.perf_counter()

        tally = shared.Tally(warm, seconds)
        for environment in range(shared.ENVIRONMENTS):
            begin(environment)
        while not tally.over:
            for answer in _ready(under_way):
                environment, asked = under_way.pop(answer)
                screenshot = ray.get(answer)
                shared.touch(screenshot)
                tally.ended(asked, steps=1, trajectories=paths.step(environment, screenshot))
                begin(environment)
        tally.report()


def steps_with_policy(variant: str, warm: float, seconds: float) -> None:
    """Two calls a step, as the coordinator's: the screenshot goes to the driver, which keeps it, and to a policy actor;
    when that has answered, the environment takes its next step."""
    processes, form = variant.split(", ", 1)
    with cluster(inline="inlined" in form):
        actors = _actors(Environments, int(processes.split()[0]), shared.SCREENSHOT_BYTES)
        (policy,) = _actors(Policy, 1)
        ask = [getattr(actor, "step_array" if form.startswith("arrays") else "step").remote for actor in actors]
        paths = shared.Paths()
        under_way: dict[Any, tuple[int, float, Any]] = {}
        """The policy's calls → (environment, when they began, the environment's answer)."""

        def begin(environment: int) -> None:
            observed = ask[environment % len(ask)](environment)
            under_way[policy.generate.remote(observed)] = environment, time.perf_counter(), observed

        tally = shared.Tally(warm, seconds)
        for environment in range(shared.ENVIRONMENTS):
            begin(environment)
        while not tally.over:
            for answer in _ready(under_way):
                environment, asked, observed = under_way.pop(answer)
                ray.get(answer)
                screenshot = ray.get(observed)
                shared.touch(screenshot)
                tally.ended(asked, steps=1, trajectories=paths.step(environment, screenshot))
                begin(environment)
        tally.report()


def _ready(under_way: dict[Any, Any]) -> list[Any]:
    """Wait until one is ready; returns all that are."""
    answers = list(under_way)
    first: list[Any]
    first, rest = ray.wait(answers, num_returns=1)
    if not rest:
        return first
    return [*first, *ray.wait(rest, num_returns=len(rest), timeout=0)[0]]


def whole(variant: str, warm: float, seconds: float) -> None:
    """A call returns a whole trajectory; `AHEAD` calls are in flight, and collected in the order of submission."""
    processes, form = variant.split(", ")
    with cluster():
        actors = _actors(Producer, int(processes.split()[0]))
        ask = [getattr(actor, "trajectory_array" if form == "arrays" else "trajectory").remote for actor in actors]
        tally = shared.Tally(warm, seconds)
        turns = itertools.cycle(ask)
        under_way = deque((next(turns)(), time.perf_counter()) for _ in range(shared.AHEAD))
        while not tally.over:
            answer, asked = under_way.popleft()
            trajectory = ray.get(answer)
            for screenshot in trajectory:
                shared.touch(screenshot)
            tally.ended(asked, steps=len(trajectory), trajectories=1)
            del answer, trajectory
            under_way.append((next(turns)(), time.perf_counter()))
        tally.report()


def small(variant: str, warm: float, seconds: float) -> None:
    """Many calls in flight at once, submitted and collected a hundred at a time: faster than one by one."""
    with cluster():
        actors = _actors(Environments, int(variant.split(maxsplit=1)[0]), shared.SMALL_BYTES)
        ask = [actor.step.remote for actor in actors]

        def begin() -> tuple[list[Any], float]:
            asked = time.perf_counter()
            return [ask[number % len(ask)](number) for number in range(CALLS_PER_LOOK)], asked

        tally = shared.Tally(warm, seconds)
        under_way = deque(begin() for _ in range(CALLS_AT_ONCE // CALLS_PER_LOOK))
        while not tally.over:
            answers, asked = under_way.popleft()
            for screenshot in ray.get(answers):
                shared.touch(screenshot)
            tally.ended(asked, steps=CALLS_PER_LOOK)
            under_way.append(begin())
        tally.report()


if __name__ == "__main__":
    shared.run({"steps": steps, "steps_with_policy": steps_with_policy, "whole": whole, "small": small})
