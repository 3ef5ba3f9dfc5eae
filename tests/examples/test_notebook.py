"""examples/python/drive_a_run.ipynb, executed cell by cell with a real run: Chromium, engine and trainer."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
NOTEBOOK = EXAMPLES / "drive_a_run.ipynb"
HANG_SECONDS = 900


@pytest.fixture
def notebook() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def told(cell: NotebookNode) -> str:
    """What the cell printed or showed, as text."""
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(shown)


def pictures(cells: Iterable[NotebookNode]) -> list[Image.Image]:
    found = [
        output.data["image/png"] for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]


def test_it_is_committed_without_outputs(notebook: NotebookNode) -> None:
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))


@pytest.mark.browser
@pytest.mark.engine
@pytest.mark.torch
def test_it_drives_a_run_to_its_end(notebook: NotebookNode, tmp_path: Path) -> None:
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    config = EXAMPLES / ".." / ".." / "configs" / "miniwob_cpu.yaml"
    parameters.source = (
        f"CONFIG = {str(config.resolve())!r}\nWATCH_UPDATES = 2\n"
        "SETTINGS = ['evaluation.episodes=0', 'rollout.replicas=1', 'trainer.trajectories_per_update=32',\n"
        "            'stop.train_seconds=300']"
    )
    client = NotebookClient(
        notebook, timeout=HANG_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    done = {cell.source.splitlines()[0]: cell for cell in code_cells(notebook)}
    texts = [told(cell) for cell in done.values()]
    _curve, trajectory = pictures(done.values())
    colours = trajectory.convert("RGB").getcolors(1 << 24)
    assert (255, 0, 255) in {colour for _, colour in colours}, "a mark where the policy clicked"
    assert any("the run is paused" in text for text in texts)
    assert any("accepted: 4" in text for text in texts)
    assert any("checkpoints/v" in text for text in texts)
    assert "state='finished'" in texts[-1]
