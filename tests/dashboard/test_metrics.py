"""/metrics: what Prometheus reads of live runs, checked by its own parser and by promtool where that is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from dashboards.made import execute, small_run
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from dart.core.progress import Counts
from dart.core.status import Figures, Quarantined, Stall, Status, TimeSpent, Usage, WorkerStatus
from dart.dashboard.app import make_dashboard
from dart.dashboard.library import Library
from dart.dashboard.metrics import MOST_TASKS, exposition
from dart.rundir import RunDirectory
from dart.v1 import control_pb2 as cpb
from dart.v1 import control_pb2_grpc
from dart.wire.status import status_to_proto

ROOT = Path(__file__).parents[2]


def status(run: str = "r1", **changes: object) -> Status:
    figures = Figures(
        Counts(updates=7, trajectories=70, env_steps=500, fates={"trained": 60, "dropped: stale": 10},
               prompt_tokens=4000, cached_tokens=1000),
        Usage(env_utilisation=0.5, rollout_utilisation=0.75, trainer_utilisation=0.25),
        0.4, {"a": 0.3, 'odd "name"\n\\': 0.5}, 100.0,
    )  # fmt: skip
    workers = (
        WorkerStatus("env-0", "env", "ready", 8, 3, 0, 0.5, ""),
        WorkerStatus("rollout-0", "rollout", "ready", 16, 4, 6, 0.1, ""),
        WorkerStatus("rollout-1", "rollout", "syncing", 16, 0, 7, 0.1, ""),
    )
    early = Stall("learning", "nothing is learnt yet", "no reward", 9.0, "all fail", deliberate=True)
    told: dict[str, object] = {
        "figures": figures, "workers": workers, "env_time": TimeSpent({"acting": 60.0, "idle": 40.0}),
        "quiet": {"step": 2.0}, "stalls": (early, Stall("update", "update 8", "the trainer", 700.0, "train")),
        "quarantined": (Quarantined("task", "a", 10.0, "it failed"),),
    }  # fmt: skip
    return Status(run, "training", **{**told, **changes})  # type: ignore[arg-type]


def values(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_prometheus_reads_what_the_status_says() -> None:
    found = values(exposition([status(), status("r2", workers=())]))
    assert found["dart_updates", "r1"] == found["dart_updates", "r2"] == 7
    assert found["dart_fates", "dropped: stale", "r1"] == 10
    assert found["dart_environments_slot_seconds_total", "r1", "acting"] == 60
    assert found["dart_task_success_ratio", "r1", 'odd "name"\n\\'] == 0.5
    assert found["dart_utilisation_ratio", "replicas", "r1"] == 0.75
    assert found["dart_prefix_cached_ratio", "r1"] == 0.25
    assert found["dart_workers", "rollout", "r1", "syncing"] == 1
    assert found["dart_worker_slots", "rollout", "r1"] == 32 and found["dart_worker_busy", "env", "r1"] == 3
    assert found["dart_replica_weight_version", "rollout-1", "r1"] == 7
    assert found["dart_stalled_seconds", "train", "update", "r1"] == 700
    assert ("dart_stalled_seconds", "all fail", "learning", "r1") not in found, "it may be chance"
    assert found["dart_quarantined", "task", "r1"] == 1


def test_what_is_not_known_makes_no_series() -> None:
    found = values(exposition([status(figures=Figures(Counts(updates=7)), paused=True), status("r2")]))
    assert ("dart_success_ratio", "r1") not in found and found["dart_success_ratio", "r2"] == 0.4
    assert ("dart_prefix_cached_ratio", "r1") not in found
    assert found["dart_paused", "r1"] == 1 and ("dart_paused", "r2") not in found


class Coordinator(control_pb2_grpc.ControlServiceServicer):
    """Answers once it has been asked `times` times."""

    def __init__(self, times: int) -> None:
        self._all = asyncio.Barrier(times)

    async def GetStatus(self, request: cpb.GetStatusRequest, context: object) -> cpb.GetStatusResponse:
        await self._all.wait()
        return status_to_proto(status())


async def scraped(*folders: Path) -> dict[tuple[str, ...], float]:
    app = make_dashboard(Library(folders), None)
    transport = httpx.ASGITransport(app.app)
    async with asyncio.timeout(120), httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.get("/metrics")
    await app.close()
    return values(answer.content)


@contextlib.contextmanager
def running(path: Path, made: RunDirectory, address: str) -> Iterator[None]:
    """A copy of the run that a process works on."""
    shutil.copytree(made.path, path)
    execute(RunDirectory(path), ("update runs set state = 'running', control_address = ?", (address,)))
    with RunDirectory(path).lock():
        yield


async def test_runs_are_asked_at_once_and_those_of_one_name_have_series_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart.dashboard.app.MOST_OPEN", 2)
    monkeypatch.setattr("dart.dashboard.app.SCRAPE_SECONDS", 60.0)
    made, parents, server = await asyncio.to_thread(small_run, tmp_path / "made"), "abcd", grpc.aio.server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(Coordinator(len(parents)), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with contextlib.ExitStack() as held:
        for parent in parents:
            held.enter_context(running(tmp_path / parent / "one", made, address))
        found = await scraped(*(tmp_path / parent for parent in parents))
    await server.stop(None)
    assert {key[1] for key in found if key[0] == "dart_updates"} == {"one", "one (b)", "one (c)", "one (d)"}
    assert not any(key[0] == "dart_unreadable" for key in found)


async def test_a_coordinator_has_time_to_answer_where_to_read_the_runs_took_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart.dashboard.app.SCRAPE_SECONDS", 0.0)
    monkeypatch.setattr("dart.dashboard.app.LEAST_SECONDS", 60.0)
    made, server = await asyncio.to_thread(small_run, tmp_path / "made"), grpc.aio.server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(Coordinator(1), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with running(tmp_path / "runs" / "one", made, address):
        found = await scraped(tmp_path / "runs")
    await server.stop(None)
    assert ("dart_updates", "one") in found


async def test_a_run_that_cannot_be_read_or_does_not_answer_is_told(tmp_path: Path) -> None:
    made, runs = await asyncio.to_thread(small_run, tmp_path / "made"), tmp_path / "runs"
    (runs / "damaged").mkdir(parents=True)
    (runs / "damaged" / "run.db").write_text("nothing")
    shutil.copytree(made.path, runs / "over")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with running(runs / "silent", made, address), running(runs / "odd", made, "unix:/x"):
            found = await scraped(runs)
    assert found == {("dart_unreadable", run): 1 for run in ("damaged", "silent", "odd")}


def test_thousands_of_tasks_make_no_series() -> None:
    many = Figures(success_by_task={f"task-{number}": 0.5 for number in range(MOST_TASKS + 1)})
    assert b"task-1" not in exposition([status(figures=many)])


def test_promtool_has_no_complaint() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition([status()]), capture_output=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()


def test_a_dashboard_without_a_live_run_has_no_series(tmp_path: Path) -> None:
    small_run(tmp_path)
    app = make_dashboard(Library([tmp_path]), None).app
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    assert values(answer.content) == {}


def test_the_grafana_dashboard_asks_for_metrics_that_there_are() -> None:
    known = {family.name for family in text_string_to_metric_families(exposition([status()]).decode())}
    known |= {f"{name}_total" for name in known}
    document = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    assert len(asked) >= 10

    for expression in asked:
        names = set(re.findall(r"dart_[a-z_]+", expression))
        assert names and names <= known, expression
