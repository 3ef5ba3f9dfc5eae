"""Point 12: `SubmitTasks` takes only tasks that the run could have drawn itself, all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
import pytest

from dart.coordinator.service.control import ControlService
from dart.core.curation.submitted import MOST_PENDING, NotWanted, Submissions
from dart.core.types import Task
from dart.errors import UserError
from dart.v1 import control_pb2 as cpb
from dart.v1 import trajectory_pb2 as tpb

RUN = Submissions("miniwob", ("click-color", "enter-text"), (1_000_000, 1_010_000))
GOOD = Task("miniwob", "click-color", 17)


@pytest.mark.parametrize("seed", [0, 17, 999_999, 1_010_000, 2**63 - 1])
def test_a_task_of_the_run_is_taken(seed: int) -> None:
    RUN.check([GOOD, Task("miniwob", "enter-text", seed)], 0)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Task("osworld", "click-color"), r"^tasks\[1\]\.suite 'osworld' is not this run's: write miniwob$"),
        (
            Task("miniwob", "click-colour"),
            r"^tasks\[1\]\.name 'click-colour' is not trained on in this run: choose",
        ),
        (Task("miniwob", "click-color", 2**63), r"^tasks\[1\]\.seed 9223372036854775808 is out of range: choose"),
        (Task("miniwob", "click-color", -1), r"^tasks\[1\]\.seed -1 is out of range"),
        (Task("miniwob", "click-color", 1_000_000), r"^tasks\[1\]\.seed 1000000 is held out for evaluation \("),
        (Task("miniwob", "click-color", 1_009_999), r"^tasks\[1\]\.seed 1009999 is held out"),
    ],
)
def test_any_other_task_is_refused_by_field_value_and_remedy(task: Task, why: str) -> None:
    with pytest.raises(NotWanted, match=why):
        RUN.check([GOOD, task], 0)


def test_a_task_with_one_instance_has_no_other_seed() -> None:
    run = Submissions("osworld", ("os/1",), (1_000_000, 1_010_000), single=("os/1",))
    run.check([Task("osworld", "os/1", 0)], 0)
    with pytest.raises(NotWanted, match=r"seed 7: os/1 has one instance alone: choose seed 0"):
        run.check([Task("osworld", "os/1", 7)], 0)


def test_no_more_than_a_bound_may_wait() -> None:
    RUN.check([GOOD], MOST_PENDING - 1)
    with pytest.raises(NotWanted, match="2 beside 9,999 that still wait are more than 10,000: submit the rest when"):
        RUN.check([GOOD, GOOD], MOST_PENDING - 1)


class Aborted(Exception):
    pass


class Context:
    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return ()

    async def abort(self, code: grpc.StatusCode, why: str) -> NoReturn:
        raise Aborted(f"{code.name}: {why}")


class Levers:
    def __init__(self) -> None:
        self.queue: list[Task] = []

    async def submit(self, tasks: Sequence[Task]) -> None:
        RUN.check(tasks, len(self.queue))
        self.queue += tasks

    def pause(self, paused: bool) -> None:
        raise UserError("the run is starting: it takes pause while it trains")


def service(levers: Levers) -> ControlService:
    unused: Any = None
    return ControlService(levers, unused, unused)  # type: ignore[arg-type]


def request(*tasks: dict[str, object]) -> cpb.SubmitTasksRequest:
    usual: dict[str, object] = {"suite": "miniwob", "name": "click-color", "seed": 17}
    return cpb.SubmitTasksRequest(tasks=[tpb.Task(**usual | task) for task in tasks])  # type: ignore[arg-type]


async def test_the_service_takes_all_tasks_or_none() -> None:
    levers = Levers()
    accepted = await service(levers).SubmitTasks(request({}, {"seed": 3, "id": "miniwob/click-color#3"}), Context())
    assert accepted.accepted == 2 and [task.seed for task in levers.queue] == [17, 3]
    with pytest.raises(Aborted, match=r"^INVALID_ARGUMENT: tasks\[2\]\.seed 1000003 is held out"):
        await service(levers).SubmitTasks(request({}, {}, {"seed": 1_000_003}), Context())
    assert len(levers.queue) == 2


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (request({"seed": 2**63}), r"Task\.seed is 9223372036854775808, and must be from 0 to"),
        (request({"name": "x" * 100_000}), r"Task\.name is 'xxx.*\(100,000 characters\), and must be 1 to 512"),
        (request({"suite": ""}), r"Task\.suite is '', and must be 1 to 128"),
        (
            request({"id": "miniwob/click-color#18"}),
            r"tasks\[0\]\.id 'miniwob/click-color#18' is another task: leave it",
        ),
        (request(*[{}] * 10_001), r"SubmitTasksRequest\.tasks is 10,001 entries"),
    ],
)
async def test_what_breaks_a_rule_is_one_invalid_argument(asked: cpb.SubmitTasksRequest, why: str) -> None:
    levers = Levers()
    with pytest.raises(Aborted, match=rf"^INVALID_ARGUMENT: .*{why}") as refused:
        await service(levers).SubmitTasks(asked, Context())
    assert not levers.queue and len(str(refused.value)) < 500


async def test_the_fields_of_all_requests_are_bounded() -> None:
    with pytest.raises(Aborted, match=r"INVALID_ARGUMENT: ListTrajectoriesRequest\.task_name is 'xxx"):
        await service(Levers()).ListTrajectories(cpb.ListTrajectoriesRequest(task_name="x" * 1000), Context())
    with pytest.raises(Aborted, match=r"INVALID_ARGUMENT: GetTrajectoryRequest\.id is ''"):
        await service(Levers()).GetTrajectory(cpb.GetTrajectoryRequest(), Context())


async def test_a_phase_that_cannot_obey_is_still_a_failed_precondition() -> None:
    with pytest.raises(Aborted, match="FAILED_PRECONDITION: the run is starting"):
        await service(Levers()).Pause(cpb.PauseRequest(), Context())
