"""What each tracker has recorded offline in a run directory, as its own files say: name → update → number."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

Numbers = dict[str, dict[int, float]]
SWANLAB = Path(__file__).parents[3] / "build" / "swanlab" / "bin" / "python"
"""The interpreter of the environment that `make swanlab` makes."""
BLOCK_BYTES, HEADER_BYTES = 32_768, 7


def read_back(kind: str, run: Path) -> Numbers:
    readers = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio, "mlflow": mlflow, "swanlab": swanlab}
    return readers[kind](run / "trackers" / kind)


def tensorboard(folder: Path) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: {event.step: event.value for event in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


def wandb(folder: Path) -> Numbers:
    """From the newest folder, which is what one has `wandb sync` send."""
    from wandb.proto import wandb_internal_pb2

    found: Numbers = defaultdict(dict)
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))[-1:]:
        for encoded in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(encoded)
            if record.WhichOneof("record_type") != "history":
                continue
            told = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in told.items():
                if isinstance(value, int | float) and not name.startswith("_"):
                    found[name][int(told.get("update", -1))] = value
    return dict(found)


def _records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format, after a header: records in blocks, in parts where one does not fit."""
    place, parts = HEADER_BYTES, b""
    while place + 7 <= len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < 7:
            place += left
            continue
        length, part = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):
            yield parts
            parts = b""


def trackio(folder: Path) -> Numbers:
    found: Numbers = defaultdict(dict)
    (database,) = folder.glob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        for step, encoded in connection.execute("select step, metrics from metrics"):
            for name, value in json.loads(encoded).items():
                if isinstance(value, int | float):
                    found[name][step] = value
    return dict(found)


def mlflow(folder: Path) -> Numbers:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    return {
        name: {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }


def swanlab(folder: Path) -> Numbers:
    """From the files that `swanlab sync` sends. Field 13 of a record is a number: 1 its name, 2 the step, 5.1 it."""
    found: Numbers = defaultdict(dict)
    for file in sorted(folder.glob("run-*/*.swanlab")):
        for encoded in _records(file.read_bytes()):
            for number in _fields(encoded).get(13, ()):
                told = _fields(number)
                for value in told.get(5, ()):
                    for double in _fields(value).get(1, ()):
                        found[told[1][0].decode()][int(*told.get(2, (0,)))] = struct.unpack("<d", double)[0]
    return dict(found)


def _fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of an encoded message: numbers for varints, bytes for all others."""
    found: dict[int, list[Any]] = defaultdict(list)
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        tag = varint()
        if tag & 7 == 0:
            found[tag >> 3].append(varint())
            continue
        length = {1: 8, 5: 4}.get(tag & 7) or varint()
        found[tag >> 3].append(data[place : place + length])
        place += length
    return found
