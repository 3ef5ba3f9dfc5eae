"""The wheel holds everything under one top-level name; the editable install is what these tests run on."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]


def copied(to: Path) -> Path:
    """The sources that git knows: a build leaves files beside them, and takes along those of earlier builds."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "dart", "workers", "*.toml", "*.md",
         "LICENSE"], cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name, follow_symlinks=False)
    return to


def test_wheel_has_one_top_level_package_with_workers_and_the_models(tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree],
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
        "dart/dashboard/static/index.html",
        "dart/store/migrations/versions/v0003_screenshots.py",
        "dart/assets/tiny-qwen3vl/model.safetensors",
        "dart/assets/ladder/ladder.html",
        "dart/assets/desktop/openbox.xml",
        "dart/assets/desktop/words.txt",
        "dart/assets/desktop/tasks/dialog-press-2.json",
        "dart/assets/ladder-qwen3vl/model.safetensors",
        "dart/assets/desktop-qwen3vl/model.safetensors",
        "dart/launch/chart/values.schema.json",
        "dart/launch/chart/templates/_helpers.tpl",
    ):
        assert wanted in names
    assert wheel.stat().st_size < 20_000_000


def test_editable_install_imports_workers_under_dart_alone() -> None:
    assert importlib.util.find_spec("dart.workers.env.role") is not None
    code = "import importlib.util; print(importlib.util.find_spec('workers'))"
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/", env=installed
    )
    assert done.stdout.strip() == "None"


def test_the_generated_code_runs_with_the_oldest_versions_that_are_allowed() -> None:
    """Code from newer tools refuses older ones when it is imported."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = dict(each.split(">=") for each in wanted if each.startswith(("protobuf>=", "grpcio>=")))
    for name, pattern, files in (
        ("protobuf", r"# Protobuf Python Version: (\S+)", "*_pb2.py"),
        ("grpcio", r"GRPC_GENERATED_VERSION = '(\S+)'", "*_pb2_grpc.py"),
    ):
        found = {re.search(pattern, file.read_text())[1] for file in (ROOT / "dart" / "v1").glob(files)}  # type: ignore[index]
        assert found and all(Version(each).release[:2] == Version(oldest[name]).release for each in found), name
