"""Run directories as somebody might leave them who wants to hang the dashboard, to read this user's files through it,
or to hide the other runs. Each is a copy of a good run with one thing changed."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from dart.rundir import RunDirectory
from dart.store.tables import metadata

FILES = ("run.db", "run.db-wal", "run.db-shm", "run.db-journal", "run.lock", "place.json", "config.yaml", "address",
         "metrics.jsonl", "summary.json", "evaluation.json", "blobs", "secrets", "checkpoints", "logs")  # fmt: skip
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
VALUES: dict[str, object] = {
    "text": "not this", "blob": b"\xff\xfe\x00", "whole": 7, "huge": 2**62, "infinite": float("inf"), "null": None,
}  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000
JSON = {"broken": "{", "deep": '{"a": ' + DEEP + "}", "list": "[1]", "half": '{"a": "\\ud800"}',
        "nan": '{"a": NaN, "b": 1e999}', "long": '{"a": ' + "9" * 5000 + "}"}  # fmt: skip
Change = Callable[[Path], None]


def changes(marker: Path, *, all_values: bool = True) -> Iterator[tuple[str, Change]]:
    """(Name, what is done to a copy of a run). `marker`: a file outside, none of whose bytes may be shown. Without
    `all_values`, each column has one of the wrong values."""
    for file in FILES:
        name = file.replace(".", "_")
        yield f"missing-{name}", lambda run, file=file: _remove(run / file)
        yield f"short-{name}", lambda run, file=file: _put(run / file, lambda to: to.write_bytes(b"SQLite format 3\0"))
        yield f"sparse-{name}", lambda run, file=file: _put(run / file, _sparse)
        yield f"fifo-{name}", lambda run, file=file: _put(run / file, os.mkfifo)
        yield f"link-{name}", lambda run, file=file: _put(run / file, lambda to: to.symlink_to(marker))
        yield f"zero-{name}", lambda run, file=file: _put(run / file, lambda to: to.symlink_to("/dev/zero"))
        yield f"folder-{name}", lambda run, file=file: _put(run / file, Path.mkdir)
    yield "blobs-elsewhere", lambda run: _put(run / "blobs", lambda to: to.symlink_to(marker.parent))
    for table in ("runs", "trajectories", "steps", "groups", "events", "versions", "dart_schema"):
        columns = metadata.tables[table].columns.keys()
        yield f"view-{table}", lambda run, table=table, columns=columns: _view(run, table, columns)
        yield f"empty-{table}", lambda run, table=table: _sql(run, f"DELETE FROM {table}")
        for number, column in enumerate(columns):
            wrong = list((JSON if "json" in column else VALUES).items())
            for kind, value in wrong if all_values else wrong[number % len(wrong) :][:1]:
                yield (
                    f"{kind}-{table}-{column}",
                    (lambda run, table=table, column=column, value=value: _fill(run, table, column, value)),
                )
    yield (
        "large-runs-config_json",
        lambda run: _sql(run, "UPDATE runs SET config_json = '{\"a\": \"' || hex(zeroblob(100000000)) || '\"}'"),
    )
    yield "trigger", lambda run: _sql(run, "CREATE TRIGGER t AFTER UPDATE ON runs BEGIN DELETE FROM events; END")
    for where in ({"database": "postgresql://nobody@127.0.0.1:1/none", "key": "k"}, {"blobs": "file:///", "key": "etc"},
                  {"database": "env:HOME"}, {"database": 5}, ["no", "object"]):  # fmt: skip
        text = json.dumps(where)
        yield f"place-{len(text)}", lambda run, text=text: _put(run / "place.json", lambda to: to.write_text(text))
    config = {"server": {"tokens": {"control": f"file:{marker}"}, "tls_certificate": str(marker)},
              "model": {"path": str(marker.parent)}, "retention": [], "curation": 5}  # fmt: skip
    yield "config", lambda run: _fill(run, "runs", "config_json", json.dumps(config))
    yield os.fsdecode(b"name-\xff\xfe"), lambda run: None
    yield "name\nof two lines", lambda run: None


def hostile_runs(good: RunDirectory, parent: Path, marker: Path, *, all_values: bool = True) -> list[Path]:
    """Make them below `parent`, without screenshots."""
    made = []
    for name, change in changes(marker, all_values=all_values):
        run = parent / name
        shutil.copytree(good.path, run, ignore=shutil.ignore_patterns("blobs"))
        if os.geteuid() == 0 and len(made) % 2:  # another owner's
            for folder, _, files in os.walk(run):
                for one in (folder, *(os.path.join(folder, file) for file in files)):  # noqa: PTH118
                    os.chown(one, 65534, 65534, follow_symlinks=False)
        change(run)
        made.append(run)
    return made


def _remove(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def _put(file: Path, make: Callable[[Path], object]) -> None:
    _remove(file)
    make(file)


def _sparse(file: Path) -> None:
    with file.open("wb") as made:
        made.truncate(1 << 40)


def _sql(run: Path, *statements: str, values: tuple[object, ...] = ()) -> None:
    with closing(sqlite3.connect(run / "run.db")) as connection, connection:
        for statement in statements:
            connection.execute(statement, values)


def _untyped(run: Path, table: str, columns: list[str]) -> str:
    """The table again, without its rules; its old name."""
    named = ", ".join(f'"{column}"' for column in columns)
    _sql(run, "PRAGMA foreign_keys=OFF", f"CREATE TABLE copied AS SELECT {named} FROM {table}", f"DROP TABLE {table}")
    return named


def _fill(run: Path, table: str, column: str, value: object) -> None:
    named = _untyped(run, table, list(metadata.tables[table].columns.keys()))
    _sql(run, f"CREATE TABLE {table} ({named})", f"INSERT INTO {table} SELECT * FROM copied", "DROP TABLE copied")
    _sql(run, f'UPDATE {table} SET "{column}" = ?', values=(value,))


def _view(run: Path, table: str, columns: list[str]) -> None:
    _untyped(run, table, columns)
    named = ", ".join(f'i AS "{column}"' for column in columns)
    _sql(run, "DROP TABLE copied", f"CREATE VIEW {table} AS {ENDLESS} SELECT {named} FROM n")
