"""What the storm counts as wrong, and the failpoints that it arms."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import TASK, trajectory

from benchmarks.endurance.processes import CoordinatorProcess, WorkerProcess
from benchmarks.endurance.proxy import Proxy
from benchmarks.endurance.storm import FAILPOINTS, Storm, _results, too_low
from benchmarks.endurance.witness import Witness
from dart.failpoints import VARIABLE, armed
from dart.store.database import Database, sqlite_url
from dart.v1 import session_pb2 as pb

DART = Path(__file__).parents[2] / "dart"


@pytest.mark.parametrize(
    ("faulted", "calm", "wrong"),
    [
        ((6000, 0.92), (6000, 0.92), False),
        ((6000, 0.95), (6000, 0.92), False),
        ((6000, 0.89), (6000, 0.92), False),
        ((6000, 0.86), (6000, 0.92), True),
        ((6000, 0.875), (6000, 0.92), True),  # 4.5 points, but the interval reaches beyond 5
        ((30, 0.92), (30, 0.92), True),  # so few say nothing
        ((0, 0.0), (0, 0.0), True),
    ],
)
def test_success_that_may_be_more_than_five_points_lower_is_wrong(
    faulted: tuple[int, float], calm: tuple[int, float], wrong: bool
) -> None:
    assert bool(too_low(faulted, calm, 5.0)[1]) == wrong


@pytest.mark.parametrize("successes", [(True, True), (False, True)])
async def test_the_results_compare_the_last_third_with_the_run_without_faults(
    tmp_path: Path, successes: tuple[bool, bool]
) -> None:
    storms = []
    for name, success in zip(("faults", "calm"), successes, strict=True):
        async with await Database.open(sqlite_url(tmp_path / f"{name}.db"), tmp_path / name) as database:
            await database.start_run(name, name, {}, started=1.0)
            await database.open_group("g", TASK, 60, 1.0)
            for number in range(60):
                await database.add_trajectory(replace(trajectory(f"t{number}", "g"), success=success))
        workers = CoordinatorProcess("coordinator", tmp_path), list[WorkerProcess]()
        storms.append(Storm(random.Random(0), *workers, Proxy(1), Witness(tmp_path / f"{name}.db"), 1))
    found = _results(storms[0], [storms[0].coordinator], storms[1], 1.0, 0, 5.0)
    assert found["trajectories"] == 60
    assert found["wrong"] == (
        [] if successes[0] else ["success under faults is 100.0 ± 0.0 points lower, of at most 5"]
    )


async def test_a_process_has_its_failpoints_for_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    async def begin(*_: object, env: dict[str, str], **__: object) -> None:
        begun.append(env[VARIABLE])
        if len(begun) == 2:
            raise asyncio.CancelledError
        raise FileNotFoundError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    worker = WorkerProcess("env-0", tmp_path, failpoints="before-Observed=fail:EIO")
    with pytest.raises(FileNotFoundError):
        await worker.keep()
    with pytest.raises(asyncio.CancelledError):
        await worker.keep()
    assert begun == ["before-Observed=fail:EIO", ""]


def test_the_storm_arms_only_failpoints_that_there_are() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in DART.rglob("*.py"))
    known = set(re.findall(r'failpoint\("([^"]+)"\)', code))
    replies = {f"before-{field.message_type.name}" for field in pb.SessionRequest.DESCRIPTOR.fields}
    for text in (text for one in FAILPOINTS.values() for text in one):
        (failpoint,) = armed(text)
        assert failpoint.name in known | replies
