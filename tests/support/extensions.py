"""The extensions of docs/extending.md, as edits that a test makes in a copy of the tree.

A world and a loss of the user's own are the docs' own text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def first_python(page: str) -> str:
    """The first block of Python on a page of the docs."""
    found = re.search(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@dataclass(frozen=True, slots=True)
class Insert:
    """Insert `lines` below the first line with the text `below` that comes after the text `within`."""

    below: str
    lines: str
    within: str = ""

    def apply(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        place = text.index(self.below, text.index(self.within))
        end = text.index("\n", place) + 1
        path.write_text(f"{text[:end]}{self.lines}\n{text[end:]}", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace the only place with this text."""

    old: str
    new: str

    def apply(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{path}: {self.old}"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Write:
    """A new file; or, for documentation, text at the end of one."""

    text: str

    def apply(self, path: Path) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(self.text)


Edits = Mapping[str, tuple[Insert | Replace | Write, ...]]

WORLD: Edits = {"counter_world.py": (Write(first_python("extending.md")),)}

COUNTER: Edits = {
    "dart/core/progress.py": (
        Insert("unparsable: int = 0", "    repeated_orders: int = 0", "class Counts"),
        Insert(
            "# ---- events ----",
            "    def order_repeated(self) -> None:\n"
            "        was = self.counts\n"
            "        self._counts = replace(was, repeated_orders=was.repeated_orders + 1)\n",
        ),
    ),
    "proto/dart/v1/control.proto": (Insert("uint64 pooled", "  uint64 repeated_orders = 1000;", "message Counts"),),
    "dart/coordinator/sampling/data.py": (
        Insert("self._progress.attempt_failed()", "        self._progress.order_repeated()"),
    ),
}

TURN_FIELD: Edits = {
    "dart/core/types.py": (Insert("truncated: bool = False", "    queue_seconds: float = 0.0", "class Generation"),),
    "proto/dart/v1/session.proto": (Insert("string text", "  double queue_seconds = 1000;", "message Generated {"),),
    "proto/dart/v1/trajectory.proto": (Insert("string text", "  double queue_seconds = 1000;", "message Step {"),),
    "dart/wire/rules/table.py": (Insert('"text"', '        "queue_seconds": SECONDS,', '"Generated": {'),),
    "workers/rollout/engine.py": (Insert("text=", "            queue_seconds=0.25,", "def _generation("),),
}

TRAJECTORY_FIELD: Edits = {
    "dart/core/types.py": (
        Insert("evidence_json: str", "    page_errors: int = 0", "class Observation"),
        Insert("evidence_json: str", "    page_errors: int = 0", "class Trajectory"),
    ),
    "proto/dart/v1/session.proto": (Insert("evidence_json", "  uint64 page_errors = 1000;", "message Observed {"),),
    "proto/dart/v1/trajectory.proto": (
        Insert("evidence_json", "  uint64 page_errors = 1001;", "message Trajectory {"),
    ),
    "dart/wire/rules/table.py": (Insert('"evidence_json"', '        "page_errors": STORED,', '"Observed": {'),),
    "workers/env/role.py": (Replace("verdict.evidence_json())", "verdict.evidence_json(), page_errors=7)"),),
}

COMMAND: Edits = {
    "dart/commands/greet.py": (
        Write('import click\n\n\ndef greet(name: str) -> None:\n    click.echo(f"hello {name}")\n'),
    ),
    "dart/cli.py": (
        Write(
            '\n\n@main.command()\n@click.argument("name")\ndef greet(name: str) -> None:\n    """Greet someone."""\n'
            "    from dart.commands.greet import greet as run\n\n    run(name)\n"
        ),
    ),
    "README.md": (Insert("| `dart doctor", "| `dart greet NAME` | a greeting |"),),
}

LOSS: Edits = {"my_losses.py": (Write(first_python("losses.md")),)}

NAMED_LOSS: Edits = {
    "dart/algo/objectives.py": (
        Replace(
            "\n\nOBJECTIVES: dict[str, Objective] = {",
            "\n\ndef reinforce(tokens: Tokens, clip_low: float, clip_high: float) -> torch.Tensor:\n"
            "    return tokens.advantages * tokens.new\n\n\n"
            'OBJECTIVES: dict[str, Objective] = {"reinforce": reinforce, ',
        ),
    ),
    "dart/config/trainer.py": (Replace("LOSS_KINDS = (", 'LOSS_KINDS = ("reinforce", '),),
    "docs/losses.md": (Write("\n*reinforce*: A · log π.\n"),),
}

CURATION_RULE: Edits = {
    "dart/core/curation/judging.py": (
        Insert("max_tokens: int = 0", "    easy: float = 1.0", "class Judging"),
        Insert(
            "def decide(",
            "        if sum(one.success for one in trajectories) > self.easy * len(trajectories):\n"
            '            return Decision(False, "too easy", f"more than {self.easy:.0%} succeeded", ())',
        ),
    ),
    "dart/config/curation.py": (Insert("success_threshold", "    easy: Fraction = 1.0", "class Curation("),),
    "dart/coordinator/sampling/data.py": (Insert("max_tokens=", "            easy=config.curation.easy,", "Judging("),),
    "docs/curation.md": (Write("\n*Too easy*: a group of which more than `curation.easy` succeeded is dropped.\n"),),
}

ALL: Mapping[str, Edits] = {
    "a world": WORLD,
    "a counter": COUNTER,
    "a field of a turn": TURN_FIELD,
    "a field of a trajectory": TRAJECTORY_FIELD,
    "a command": COMMAND,
    "a loss": LOSS,
    "a named loss": NAMED_LOSS,
    "a curation rule": CURATION_RULE,
}
