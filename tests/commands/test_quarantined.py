"""Environments and tasks that get no work for a while, as `dart status`, `dart why` and the live view show them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.instant import settings
from benchmarks.simulation.store import NoDatabase
from dart.commands.look import status, why
from dart.commands.look.view import picture
from dart.coordinator.run import Run
from dart.coordinator.start import Start
from dart.core.curation.quarantine import CERTAIN
from dart.core.status import Status
from dart.job import Train
from dart.rundir import RunDirectory
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import SLOTS
from dart.wire.status import status_from_proto, status_to_proto

WORDS = "environment 2 is quarantined for 20 s, because its episodes fail and others do not"


def told(folder: Path) -> Status:
    async def shown() -> Status:
        run = Run(settings(), RunDirectory(folder), NoDatabase(), Train(), Start())  # type: ignore[arg-type]
        worker, _ = run.fleet.admit(
            pb.Hello(worker_id="env-0", instance_id="i", role=pb.ROLE_ENV, world_size=1, capabilities=[SLOTS])
        )
        run.fleet.became_ready(worker, pb.Ready(slots=8))
        slots = pb.Slots(count=4, granted=4, booting=2, quarantined=1, reason=WORDS)
        run.fleet.receive(worker, pb.SessionRequest(slots=slots))
        for _ in range(CERTAIN):
            run.data.quarantine.failed(
                "\x1b[2Jbroken", "env-0: no such page", time.monotonic(), worker="env-0", several=False, certain=True
            )
            run.data.quarantine.finished("another")
        return run.status()

    return asyncio.run(shown())


def test_all_three_show_what_is_quarantined_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = status_to_proto(told(tmp_path))
    status._print_live(status_from_proto(seen), as_json=False)
    why._print_live(status_from_proto(seen), as_json=False)
    with (tmp_path / "out").open("w") as file:
        console = Console(width=150, record=True, file=file)
        console.print(picture(status_from_proto(seen)))
    printed = capsys.readouterr().out.split("nothing is stalled")
    for text in (*printed, console.export_text()):
        lines = [line.strip(" │") for line in text.splitlines()]
        (task,) = [line for line in lines if line.startswith("quarantined for 0")]
        assert task.endswith("more: task [2Jbroken: env-0: no such page"), "no control characters"
        assert f"quarantined: environments of env-0: {WORDS}" in lines
    (row,) = [line for line in printed[0].splitlines() if line.split()[:2] == ["env-0", "env"]]
    assert f"2 booting, 4 idle, 1 missing, 1 quarantined; {WORDS}" in row


def test_programs_read_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = status_to_proto(told(tmp_path))
    status._print_live(status_from_proto(seen), as_json=True)
    why._print_live(status_from_proto(seen), as_json=True)
    for line in capsys.readouterr().out.splitlines():
        tasks, environments = json.loads(line)["quarantined"]
        assert (tasks["kind"], tasks["reason"]) == ("task", "env-0: no such page")
        assert 0 < tasks["seconds_left"] <= 300
        assert (environments["kind"], environments["name"], environments["reason"]) == ("environments", "env-0", WORDS)
