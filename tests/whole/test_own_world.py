"""`dart train` starts the example's world: real env worker, replica and trainer; nothing but the config names it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 900

pytestmark = [pytest.mark.engine, pytest.mark.torch]


def test_train_starts_the_example(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "configs" / "miniwob_cpu.yaml").read_text())
    settings["run"]["directory"] = str(tmp_path / "runs")
    settings["environment"] = {
        "kind": "own_world:Boxes", "viewport": [160, 224], "slots": 4, "tasks": {"names": ["boxes"]},
    }  # fmt: skip
    settings["rollout"] |= {"replicas": 1, "slots": 4}
    settings["stop"] = {"env_steps": 60}
    settings["dashboard"] = {"enabled": False}
    settings["evaluation"] = {"episodes": 4}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        [sys.executable, "-m", "dart", "train", str(config), "--quiet"],
        cwd=ROOT / "examples" / "python", capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["env_steps"] >= 60
    with sqlite3.connect(run / "run.db") as database:
        evidence = {text for (text,) in database.execute("SELECT evidence_json FROM trajectories")}
    judged = [json.loads(text) for text in evidence if text]
    assert judged and all(set(one) == {"clicked", "wanted"} for one in judged)
