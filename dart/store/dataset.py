"""Trajectories as a data set for Hugging Face `datasets`: one row per step, in one Parquet file.

The columns are in docs/collect.md. Needs pyarrow (the extra `data`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from dart.core.action_json import action_to_json
from dart.core.types import Image, Trajectory
from dart.errors import UserError
from dart.store.reader import Reader

_VALUES = {
    "trajectory_id": "string", "task": "string", "seed": "int64", "instruction": "string", "step": "int32",
    "text": "string", "action": "string", "reward": "float64", "source": "string", "accessibility_tree": "string",
    "last_action_error": "string",
}  # fmt: skip
# `datasets` reads this from the file's metadata; without it an image would load as a struct.
_FEATURES = {name: {"dtype": kind, "_type": "Value"} for name, kind in _VALUES.items()} | {
    "history": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "Sequence"},
    "image": {"_type": "Image"},
    "goal_images": {"feature": {"_type": "Image"}, "_type": "Sequence"},
}


def check_writable() -> None:
    """Raises UserError if pyarrow is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError("the data set needs the package pyarrow: run `pip install 'dart-gui-rl[data]'`")


async def write_dataset(run: Reader, path: Path, source: str) -> int:
    """Write every success of the run except copies, and return the number of rows; `source` says who made them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"string": pa.string(), "int64": pa.int64(), "int32": pa.int32(), "float64": pa.float64()}
    columns = {name: types[kind] for name, kind in _VALUES.items()}
    columns["history"] = pa.list_(pa.string())
    columns["image"] = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns["goal_images"] = pa.list_(columns["image"])
    metadata = {"huggingface": json.dumps({"info": {"features": _FEATURES}})}
    schema = pa.schema(list(columns.items()), metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, rows = path.with_suffix(".tmp"), 0
    with pq.ParquetWriter(temporary, schema) as file:
        for success in await run.newest_successes():
            stored = await run.trajectory(success.trajectory_id, with_images=True)
            assert stored is not None, f"{success.trajectory_id} is not in the database"
            table = pa.Table.from_pylist(list(_rows(stored.trajectory, source)), schema)
            file.write_table(table)
            rows += table.num_rows
    temporary.replace(path)
    return rows


def _rows(trajectory: Trajectory, source: str) -> Iterator[dict[str, object]]:
    said: list[str] = []
    for step in trajectory.steps:
        yield {
            "trajectory_id": trajectory.id,
            "task": trajectory.task.name,
            "seed": trajectory.task.seed,
            "instruction": trajectory.instruction,
            "step": step.index,
            "history": list(said),
            "text": step.generation.text,
            "action": None if step.action is None else json.dumps(action_to_json(step.action)),
            "reward": trajectory.reward,
            "source": source,
            "accessibility_tree": step.accessibility_tree,
            "last_action_error": step.last_action_error,
            "image": _picture(step.images[-1]),
            "goal_images": [_picture(image) for image in step.images[: trajectory.goal_images]],
        }
        said.append(step.generation.text)


def _picture(image: Image) -> dict[str, object]:
    return {"bytes": image.data, "path": f"{image.sha256.hex()}.{image.media_type.rpartition('/')[2]}"}
