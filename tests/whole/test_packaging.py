"""The wheel holds everything under one top-level name; the editable install is what these tests run on."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_has_one_top_level_package_with_workers_and_the_models(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dart"}
    for wanted in (
        "dart/workers/env/role.py",
        "dart/workers/rollout/role.py",
        "dart/workers/train/role.py",
        "dart/v1/session_pb2.py",
        "dart/store/migrations/versions/v0003_screenshots.py",
        "dart/assets/tiny-qwen3vl/model.safetensors",
        "dart/assets/ladder/ladder.html",
        "dart/assets/desktop/openbox.xml",
        "dart/assets/desktop/words.txt",
        "dart/assets/desktop/tasks/dialog-press-2.json",
        "dart/assets/ladder-qwen3vl/model.safetensors",
        "dart/assets/desktop-qwen3vl/model.safetensors",
    ):
        assert wanted in names
    assert wheel.stat().st_size < 20_000_000


def test_editable_install_imports_workers_under_dart_alone() -> None:
    assert importlib.util.find_spec("dart.workers.env.role") is not None
    code = "import importlib.util; print(importlib.util.find_spec('workers'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "None"
