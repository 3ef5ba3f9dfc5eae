"""/metrics: what Prometheus reads of live runs, checked by its own parser and by promtool where that is installed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from dashboards.made import small_run
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from dart.core.progress import Counts
from dart.core.status import Figures, Quarantined, Stall, Status, TimeSpent, Usage, WorkerStatus
from dart.dashboard.app import make_dashboard
from dart.dashboard.library import Library
from dart.dashboard.metrics import MOST_TASKS, exposition
from dart.inspection.inspector import Inspector
from dart.inspection.records import RunStatus

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
    told: dict[str, object] = {
        "figures": figures, "workers": workers, "env_time": TimeSpent({"acting": 60.0, "idle": 40.0}),
        "quiet": {"step": 2.0}, "stalls": (Stall("update", "update 8", "the trainer", 700.0, "train"),),
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
    assert found["dart_quarantined", "task", "r1"] == 1


def test_what_is_not_known_makes_no_series() -> None:
    found = values(exposition([status(figures=Figures(Counts(updates=7)), paused=True), status("r2")]))
    assert ("dart_success_ratio", "r1") not in found and found["dart_success_ratio", "r2"] == 0.4
    assert ("dart_prefix_cached_ratio", "r1") not in found
    assert found["dart_paused", "r1"] == 1 and ("dart_paused", "r2") not in found


async def test_two_runs_of_one_name_have_series_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for parent in ("a", "b"):
        await asyncio.to_thread(small_run, tmp_path / parent)
    library = Library([tmp_path / "a", tmp_path / "b"])
    rows = await library.rows()
    assert len({row.name for row in rows}) == 1 and len({row.id for row in rows}) == 2

    async def live(self: Inspector) -> RunStatus:
        return RunStatus(True, status(self.files.run_id), ())

    monkeypatch.setattr(Inspector, "status", live)
    monkeypatch.setattr(Library, "rows", AsyncMock(return_value=[replace(row, state="running") for row in rows]))
    with TestClient(make_dashboard(library, None).app, base_url="http://127.0.0.1") as client:
        found = values(client.get("/metrics").content)
    assert {run for name, *labels in found if name == "dart_updates" for run in labels} == {row.id for row in rows}


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
