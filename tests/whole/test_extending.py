"""docs/extending.md says which files an extension touches: here the extensions are made, in a copy of the tree.

The copy gets exactly the edits of `extensions`, whose files must be those of the table, and then each extension is used
there. A whole run with a world of one's own is in tests/worlds/test_worlds_of_ones_own.py.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from extensions import ALL

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
LIMITS = {
    "a world": (1, 0), "a counter": (0, 3), "a field of a turn": (0, 5), "a field of a trajectory": (0, 5),
    "a command": (1, 1), "a loss": (1, 0), "a named loss": (0, 2), "a curation rule": (0, 3),
}  # fmt: skip
"""The most new and the most edited files, documentation apart."""
MOST_FORMS = 6


@dataclass
class Row:
    new: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    docs: list[str] = field(default_factory=list)

    @property
    def files(self) -> set[str]:
        return {*self.new, *self.edited, *self.docs}


def table(heading: str) -> Iterator[list[str]]:
    """The cells of the table under a heading, row by row."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    yield from ([cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:])


def documented() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    name = ""
    for what, file, _ in table("Files touched"):
        name = what or name
        path = re.findall(r"`([^`]+)`", file)[0]
        row = rows.setdefault(name, Row())
        (row.new if "new" in file else row.docs if path.endswith(".md") else row.edited).append(path)
    return rows


def test_every_extension_is_within_its_limit() -> None:
    counted = {name: (len(row.new), len(row.edited)) for name, row in documented().items()}
    assert counted == LIMITS


def test_every_file_of_the_table_exists() -> None:
    named = {path for row in documented().values() for path in (*row.edited, *row.docs)}
    assert not [path for path in named if not (ROOT / path).is_file()]


def test_the_extensions_that_are_tried_touch_the_files_of_the_table() -> None:
    assert {name: set(edits) for name, edits in ALL.items()} == {name: row.files for name, row in documented().items()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with all extensions in it."""
    copy = tmp_path_factory.mktemp("extended")
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors", "node_modules")
    for folder in ("dart", "workers", "proto", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "README.md", copy)
    for edits in ALL.values():
        for path, changes in edits.items():
            for change in changes:
                change.apply(copy / path)
    for path in {path for edits in ALL.values() for path in edits if path.endswith(".py")}:
        ast.parse((copy / path).read_text(encoding="utf-8"))
    changed = ["control", "session", "trajectory"]
    protos = [f"proto/dart/v1/{name}.proto" for name in changed]
    out = ["-I", "proto", "--python_out=.", "--grpc_python_out=."]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *out, *protos], cwd=copy, check=True)
    return copy


def use(tree: Path, script: str) -> Any:
    """What a script of tests/support prints when it is run with the copy."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / script)], cwd=tree, env={"PYTHONPATH": str(tree)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tried(tree: Path) -> Mapping[str, Mapping[str, object]]:
    told: Mapping[str, Mapping[str, object]] = use(tree, "extended_tree.py")
    return told


def test_a_counter_is_in_the_status_the_view_and_the_events(tried: Mapping[str, Mapping[str, object]]) -> None:
    assert tried["counter"] == {
        "in the message": True, "in the event": 1, "after a restart": True, "in the live view": True,
        "in dart status": True,
    }  # fmt: skip


def test_a_world_is_judged_and_a_field_that_a_worker_makes_is_stored_and_shown(
    tried: Mapping[str, Mapping[str, object]],
) -> None:
    assert tried["fields"] == {
        "of the turn, stored": 0.25, "of the turn, shown": 0.25,
        "of the trajectory, stored": 7, "of the trajectory, shown": "7",
        "the reward": [1.0, '{"count": 4, "goal": 4}'],
    }  # fmt: skip


def test_a_command_is_in_the_help_and_runs(tried: Mapping[str, Mapping[str, object]]) -> None:
    assert re.search(r"^  greet  +Greet someone\.$", str(tried["command"]["help"]), re.MULTILINE)
    assert tried["command"]["run"] == "hello you\n"


def test_a_curation_rule_decides(tried: Mapping[str, Mapping[str, object]]) -> None:
    assert tried["rule"] == {"two of three": "too easy", "one of three": "released"}


@pytest.mark.torch
def test_the_trainer_computes_a_loss_of_ones_own_and_a_named_one(tree: Path) -> None:
    """Per step, the mean of w · A · log π, of the numbers in `loss_samples`."""
    objective = ((math.log(0.3) + 0.5 * math.log(0.2)) / 2 - 2 * math.log(0.5)) / 2
    told = use(tree, "extended_losses.py")
    assert told == pytest.approx({"reinforce": -objective, "my_losses:reinforce": -objective}, rel=1e-6)


def defined(path: Path) -> set[str]:
    """Names of the file's classes, functions and methods; in a proto file, of its messages."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".proto":
        return set(re.findall(r"^message (\w+)", text, re.MULTILINE))
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}


def test_a_turn_has_at_most_six_forms_and_they_are_there() -> None:
    rows = list(table("The life of a turn"))
    assert [row[0].split(".")[0] for row in rows] == [str(number + 1) for number in range(len(rows))]
    assert len(rows) <= MOST_FORMS
    for form, where, made_by, _ in rows:
        for cell, files in ((form, where), (made_by, made_by)):
            *_, path = re.findall(r"`([\w/]+\.(?:py|proto))`", files)
            (name, *_) = re.findall(r"`(\w+)`", cell)
            assert name in defined(ROOT / path), f"{name} is not in {path}"
