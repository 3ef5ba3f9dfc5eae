"""The chart's manifests, rendered by Helm's library in the environment of `make chart`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from dart.launch.k8s import CHART

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
PYTHON = ROOT / "build" / "chart" / "bin" / "python"
MISSING = "`make chart` installs Helm's library for these tests"
VERSIONS = ("1.29.0", "1.33.0", "1.37.0")
"""Of Kubernetes."""


def render(given: dict[str, Any]) -> dict[str, Any]:
    """What `render.py` answers."""
    asked = {"chart": str(CHART), "values": given, "name": "demo", "namespace": "rl", "kubernetes": VERSIONS}
    done = subprocess.run(
        [PYTHON, FOLDER / "render.py"], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def manifests(given: dict[str, Any]) -> list[dict[str, Any]]:
    rendered = render(given)
    assert "error" not in rendered, rendered["error"]
    return [
        document
        for template, text in rendered["manifests"].items()
        if template.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]
