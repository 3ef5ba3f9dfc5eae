"""A run from the chart's own manifests: its commands, users, secrets and volumes, as processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import charts

from dart.config import load
from dart.launch.k8s import values

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 2100
SETTINGS = (
    "cluster.device=cpu",
    "cluster.k8s.image=unused:1",
    "evaluation.episodes=0",
    "trainer.trajectories_per_update=16",
    "trainer.ranks=2",
    "rollout.replicas=1",
    "checkpoint.every_updates=1",
    "stop.updates=1000",
    "cluster.k8s.values={metrics: {enabled: true}}",
)

ASKED = "DART_TEST_PODS"
pytestmark = [
    pytest.mark.skipif(
        not os.environ.get(ASKED),
        reason=f"`make test-pods` runs it: it needs root, namespaces and overlay mounts, and takes minutes ({ASKED}=1)",
    ),
    pytest.mark.engine, pytest.mark.browser, pytest.mark.torch,
    pytest.mark.skipif(not charts.PYTHON.exists(), reason=charts.MISSING),
]  # fmt: skip


def test_a_run_from_the_manifests_survives_a_drained_node_and_frees_its_jobs(tmp_path: Path) -> None:
    given = values(load(ROOT / "configs" / "miniwob_cpu.yaml", SETTINGS))
    asked = {
        "manifests": charts.manifests(given), "folder": str(tmp_path), "source": str(ROOT), "python": sys.prefix,
    }  # fmt: skip
    file = tmp_path / "asked.json"
    file.write_text(json.dumps(asked))
    done = subprocess.run(
        ["unshare", "-mn", "--propagation", "private", sys.executable, charts.FOLDER / "pods.py", file],
        stdout=subprocess.PIPE, text=True, timeout=HANG_SECONDS, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in tmp_path.glob("*.log"))

    exits = told["exits"]
    jobs = {name: codes for name, codes in exits.items() if name.startswith(("demo-rollout", "demo-train"))}
    assert exits["demo-coordinator-0"] == [130, 0], logs
    assert len(jobs) == 3 and all(codes[0] == 75 and codes[-1] == 0 for codes in jobs.values()), logs
    assert told["probe"] == "SERVING"
    assert 'dart_environments_slot_seconds_total{run="demo",state="idle"}' in told["metrics"]

    run = tmp_path / "claims" / "demo-runs" / "demo"
    assert (
        json.loads((run / "summary.json").read_text())["updates"]
        == yaml.safe_load((tmp_path / "volumes" / "demo-coordinator-0" / "config" / "config.yaml").read_text())["stop"][
            "updates"
        ]
    )
    assert {file.stat().st_uid for file in run.rglob("*")} == {10001}
