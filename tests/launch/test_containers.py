"""The container files: what a linter says of them, and that their extras exist. Nothing here can build them."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from launching.charts import MISSING, PYTHON

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "containers").glob("*.Containerfile"))


def test_their_extras_are_those_of_the_project() -> None:
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert len(FILES) == 2
    for file in FILES:
        named = re.findall(r"EXTRAS=([\w,-]+)", file.read_text())
        assert named and {extra for one in named for extra in one.split(",")} <= known


@pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    def lint(*files: Path) -> int:
        return subprocess.run([PYTHON.with_name("hadolint"), *files], check=False, stdout=subprocess.DEVNULL).returncode

    assert lint(*FILES) == 0
    spoilt = tmp_path / "Containerfile"
    spoilt.write_text(FILES[0].read_text().replace("apt-get install -y", "apt-get install"))
    assert lint(spoilt) != 0
