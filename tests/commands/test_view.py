"""The live view: a row for each where there are few, sums where there are hundreds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.instant import settings
from benchmarks.simulation.store import NoDatabase
from dart.commands.look.status import _print_live
from dart.commands.look.view import picture
from dart.coordinator.run import Run
from dart.coordinator.start import Start
from dart.core.status import Figures, Status, WorkerStatus
from dart.core.types import Task, Termination, Trajectory
from dart.core.usage import EnvState
from dart.job import Train
from dart.rundir import RunDirectory
from dart.v1 import control_pb2 as cpb
from dart.v1 import session_pb2 as pb
from dart.wire.status import status_from_proto


def screen(folder: Path, env_workers: int, tasks: int, replicas: int = 2) -> list[str]:
    """What the terminal shows of a run in training, of so many workers and tasks; no replica: all are gone."""

    async def shown() -> str:
        run = Run(settings(), RunDirectory(folder), NoDatabase(), Train(), Start())  # type: ignore[arg-type]
        roles = {pb.ROLE_ENV: env_workers, pb.ROLE_ROLLOUT: replicas, pb.ROLE_TRAIN: min(replicas, 1)}
        for role, number in roles.items():
            for index in range(number):
                name = f"{pb.Role.Name(role).removeprefix('ROLE_').lower()}-{index}"
                worker, _ = run.fleet.admit(pb.Hello(worker_id=name, instance_id=name, role=role, world_size=1))
                run.fleet.became_ready(worker, pb.Ready(slots=4, weight_version=index))
                if role == pb.ROLE_ENV:
                    run.envs.move(worker, EnvState.IDLE, EnvState.ACTING)
        for index in range(tasks):
            task = Task("miniwob", f"task-{index:03d}", 1)
            for success in [True] * (index % 3) + [False] * (2 - index % 3):
                run.progress.trajectory_finished(
                    Trajectory("t", "g", task, "do", (), Termination.STEP_LIMIT, float(success), success, 9, 0.0, 1.0)
                )
        run.progress.phase_changed("training" if replicas else "finished")
        console = Console(width=110, record=True, file=(folder / "out").open("w"))
        console.print(picture(run.status()))
        return console.export_text()

    return asyncio.run(shown()).splitlines()


def test_what_stays_on_the_screen_has_the_tasks_and_no_address(tmp_path: Path) -> None:
    lines = screen(tmp_path, env_workers=0, tasks=3, replicas=0)
    assert [line for line in lines if "task-001" in line and "50%" in line]
    assert not [line for line in lines if "worker" in line or "dart status" in line or "version" in line]


def test_a_few_workers_and_tasks_have_a_row_each(tmp_path: Path) -> None:
    lines = screen(tmp_path, env_workers=2, tasks=3)
    assert [line for line in lines if "task-001" in line and "50%" in line]
    assert [line for line in lines if "env-1 " in line and "1/4" in line and "1 acting, 3 idle" in line]


@pytest.mark.parametrize("env_workers", [13, 200])
def test_hundreds_fit_a_screen(tmp_path: Path, env_workers: int) -> None:
    lines = screen(tmp_path, env_workers, tasks=203)
    assert len(lines) < 24, "\n".join(lines)
    everyone = next(line for line in lines if f"{env_workers} workers" in line)
    assert f"{env_workers} ready" in everyone and f"{env_workers}/{4 * env_workers}" in everyone
    assert f"{env_workers} acting, {3 * env_workers} idle" in everyone
    assert [line for line in lines if "50% to 75%" in line and " 68 " in line]
    assert [line for line in lines if "100%" in line and " 67 " in line]
    assert [line for line in lines if "rollout-1" in line], "few replicas: a row each"


def test_status_of_hundreds_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    def workers(number: int) -> list[cpb.WorkerStatus]:
        return [
            cpb.WorkerStatus(
                worker_id=f"env-{index}",
                role=pb.ROLE_ENV,
                state="ready",
                slots=4,
                busy=1,
                seconds_since_heard=index / 10,
            )
            for index in range(number)
        ]

    _print_live(status_from_proto(cpb.GetStatusResponse(run_id="r", workers=workers(200))), as_json=False)
    said = capsys.readouterr().out.splitlines()
    assert len(said) < 10 and said[-1].split() == [
        "200",
        "workers",
        "env",
        "200",
        "ready",
        "200/800",
        "19.9",
        "s",
        "ago",
    ]
    _print_live(status_from_proto(cpb.GetStatusResponse(run_id="r", workers=workers(2))), as_json=False)
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["env-1", "env", "ready", "1/4"]


HOSTILE = "[red]\x1b[2J\x07\u202eenv[/] [/nothing]\nsecond line"


def test_markup_and_control_characters_in_a_name_are_only_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = WorkerStatus(HOSTILE, "env", "ready", 4, 1, 0, 0.1, f"4 idle: {HOSTILE}")
    status = Status("run", "training", Figures(success_by_task={HOSTILE: 0.5}), workers=(worker,))
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(picture(status))
    shown = console.export_text()
    _print_live(status, as_json=False)
    for text in (shown, capsys.readouterr().out):
        assert "[red][2Jenv[/] [/nothing] second line" in text, "whatever it is called, it is shown"
        assert not set("\x1b\x07\u202e") & set(text)


def test_what_a_worker_says_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    worker = WorkerStatus("n" * 15_000_000, "env", "ready", 4, 1, 0, 0.1, "")
    _print_live(Status("run", "training", workers=(worker,)), as_json=False)
    assert len(capsys.readouterr().out) < 1000
