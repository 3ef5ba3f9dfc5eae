"""The limits that keep the project readable: short functions, few untyped values."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_FUNCTION = 60
ANY_PER_THOUSAND_LINES, UNTYPED_DICTIONARIES = 4.0, 20


def sources(*tops: str) -> list[Path]:
    """The hand-written Python files that git knows below the given folders, or everywhere."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    paths = [Path(name) for name in listed if "_pb2" not in name and (ROOT / name).is_file()]
    return [path for path in paths if not tops or path.parts[0] in tops]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{path}:{node.lineno} {node.name} has {length} lines"
        for path in sources()
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert not long


def test_values_have_types() -> None:
    lines = names = dictionaries = 0
    for path in sources("dart", "workers"):
        text = read(path)
        lines += text.count("\n")
        names += sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text)))
        dictionaries += len(re.findall(r"dict\[str, Any\]", text))
    assert dictionaries <= UNTYPED_DICTIONARIES
    assert 1000 * names / lines <= ANY_PER_THOUSAND_LINES


def test_decisions_are_tested_without_an_event_loop() -> None:
    """At least four synchronous tests of decisions for each one that needs a loop."""
    tests: Counter[bool] = Counter()
    for path in sources("tests"):
        if path.parts[1] == "core":
            for node in ast.walk(ast.parse(read(path))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    tests[isinstance(node, ast.AsyncFunctionDef)] += 1
    assert tests[False] >= 4 * tests[True]


def test_nothing_is_raised_in_an_except_star_clause() -> None:
    """Python 3.11.2, which Debian 12 has, would put it in a group again: `dart.errors.ungrouped` does not."""
    raising = [
        f"{path}:{node.lineno}"
        for path in sources()
        for one in ast.walk(ast.parse(read(path)))
        if isinstance(one, ast.TryStar)
        for handler in one.handlers
        for node in ast.walk(handler)
        if isinstance(node, ast.Raise)
    ]
    assert not raising
