"""OSWorld's tasks, server and evaluators as published, end to end, on tasks that need no network, account or download.

    DART_OSWORLD_SERVER, DART_OSWORLD_PYTHON   as in support/osworld/desktop.py
    DART_OSWORLD_EVALUATORS                    what `python -m dart.workers.env.osworld install-evaluators` made
    DART_OSWORLD_TASKS                         evaluation_examples/examples of OSWorld
    DART_OSWORLD_DRAFTS                        if it is set, tasks whose programs are not known to work are run, too
    DART_OSWORLD_RESULTS                       a JSON file in which what each control gave is written, if it is set;
                                               what it says of tasks that are not run is kept

The machine is support/osworld/guest.py, which says what must be installed; it is made new for each episode, by the
world's own `renew`. Chromium runs under Chrome's name. Each task is run three times, as its file says:

- Nothing is done, and the episode ends with DONE: 0.
- The task is done by a program (support/osworld/published.py), and the episode ends with DONE: 1.
- The episode ends with FAIL: 1 on infeasible tasks, 0 on all others, there after the task was done.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from osworld.guest import HEIGHT, WIDTH, Guest, guest, needs_guest
from osworld.published import DRAFTS, FEASIBLE, INFEASIBLE, WINDOW

from dart.core.action import Action, Code, Finish, Observe
from dart.core.types import Task
from dart.errors import UserError
from dart.workers.env.osworld.episodes import OSWorldEnv
from dart.workers.env.osworld.machine import MachineError
from dart.workers.env.osworld.world import OSWorld
from dart.worlds import Verdict

EVALUATORS, TASKS = os.environ.get("DART_OSWORLD_EVALUATORS", ""), os.environ.get("DART_OSWORLD_TASKS", "")
RESULTS = os.environ.get("DART_OSWORLD_RESULTS", "")
pytestmark = [
    needs_guest,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not EVALUATORS or not TASKS, reason="DART_OSWORLD_EVALUATORS or DART_OSWORLD_TASKS is not set"),
]
ORACLES = {**FEASIBLE, **(DRAFTS if os.environ.get("DART_OSWORLD_DRAFTS") else {})}
PACKAGES = ("chromium", "gimp", "gnome-terminal", "libreoffice-impress", "vlc")
GSETTING = "os/a4d98375-215b-4a4d-aee9-3d4370fccc41"


@dataclass
class Controls:
    """The rewards of one task's episodes. `raised`: what OSWorld's evaluator raised after no action, which counts as
    0."""

    task: str
    feasible: bool
    no_action: float = -1.0
    oracle: float = -1.0
    fail: float = -1.0
    raised: str = ""
    seconds: float = 0.0
    passed: bool = False


@dataclass
class Place:
    env: OSWorldEnv
    guest: Guest

    async def episode(self, name: str, last: Action, *before: Action) -> Verdict:
        seen = await self.env.reset(Task("osworld", name))
        assert seen.instruction and (seen.image.width, seen.image.height) == (WIDTH, HEIGHT)
        for action in before:
            assert not (await self.env.act(action)).last_action_error
        verdict = await self.env.judge(last, False)
        assert verdict.reward or await self.env.probe()
        return verdict


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Guest, str]]:
    with guest(tmp_path_factory.mktemp("guest") / "one") as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(machine: tuple[Guest, str], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    running, revert = machine
    world = OSWorld()
    options = world.Options.model_validate(
        {
            "tasks_folder": TASKS, "evaluators": EVALUATORS, "state_folder": str(tmp_path_factory.mktemp("state")),
            "static": {"hosts": [running.host], "renew": revert}, "start_seconds": 1, "settle_seconds": 0.5,
            "evaluator_processes": 1,
        }
    )  # fmt: skip
    try:
        await world.start(options, (WIDTH, HEIGHT))
        env = await world.lease()
        assert isinstance(env, OSWorldEnv)
        yield Place(env, running)
    finally:
        await world.close()


@pytest.mark.parametrize("name", [*ORACLES, *INFEASIBLE])
async def test_published_task(place: Place, name: str) -> None:
    got, began = Controls(name, name in ORACLES), time.monotonic()
    nothing = await place.episode(name, Finish())
    got.no_action, got.raised = nothing.reward, str(nothing.evidence["evaluator_error"])
    if got.feasible:
        does_it = Code("python", WINDOW + ORACLES[name])
        got.oracle = (await place.episode(name, Finish(), does_it)).reward
        got.fail = (await place.episode(name, Finish("infeasible"), does_it)).reward
    else:
        got.oracle = got.fail = (await place.episode(name, Finish("infeasible"))).reward
    got.seconds = round(time.monotonic() - began, 1)
    rewards = (got.no_action, got.oracle, got.fail)
    got.passed = rewards == (0.0, 1.0, 0.0 if got.feasible else 1.0)
    if RESULTS:
        write_report(Path(RESULTS), got)
    assert got.passed, rewards


async def test_the_step_limit_is_no_refusal(place: Place) -> None:
    assert (await place.episode(INFEASIBLE[0], Observe())).reward == 0.0


async def test_a_task_that_needs_an_account_has_no_result(place: Place) -> None:
    with pytest.raises(UserError, match=r"set-up step googledrive is not supported"):
        await place.env.reset(Task("osworld", "multi_apps/0c825995-5b70-4526-b663-113f4c999dd2"))


async def test_a_machine_that_dies_before_the_verdict_has_no_reward(place: Place) -> None:
    """Killed after the task was done, and while it was not: OSWorld's evaluator alone would say 0 both times."""
    for before in ((Code("python", WINDOW + FEASIBLE[GSETTING]),), ()):
        await place.env.reset(Task("osworld", GSETTING))
        for action in before:
            await place.env.act(action)
        place.guest.kill()
        with pytest.raises(MachineError):
            await place.env.judge(Finish(), False)
        assert not await place.env.probe()
        assert await place.env.renew()
        assert await place.env.probe()


def write_report(path: Path, got: Controls) -> None:
    """What the controls gave, and on what."""
    asked = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *PACKAGES]
    versions = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    before = json.loads(path.read_text(encoding="utf-8"))["tasks"] if path.exists() else []
    tasks = {one["task"]: one for one in (*before, asdict(got))}
    passed = [one["feasible"] for one in tasks.values() if one["passed"]]
    report = {
        "what": "OSWorld's tasks as published, on its published server and evaluators, on one Debian machine; written "
        "by tests/workers/env/osworld/test_osworld_published_tasks.py",
        "packages": dict(line.split(" ", 1) for line in versions.splitlines()),
        "passed_feasible": sum(passed),
        "passed_infeasible": len(passed) - sum(passed),
        "tasks": [tasks[name] for name in sorted(tasks)],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
