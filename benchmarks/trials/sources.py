"""Which source code makes a run: the commit that is checked out, and which files differ from it.

Asked before every piece of a run, because commits land while an experiment goes on for days. Nothing is refused for it:
most commits do not touch training. `told` says what a report has to say about it. Where there is no git, or `dart` is
not in its repository, the commit is "unknown".
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import dart

ROOT = Path(dart.__file__).resolve().parents[1]
PARTS = ("dart", "workers", "proto", "benchmarks/learning/imitation.py")
"""What runs in a training run; the last is the loss of a control."""
UNKNOWN = "unknown"
MOST_NAMES = 12
DIGITS = 12
"""Of a commit, in what is said about it."""


class Code(TypedDict):
    """`changed`: tracked files under `PARTS` that differ from the commit."""

    commit: str
    changed: list[str]


def current(root: Path = ROOT) -> Code:
    """The code under `root` as it is now."""
    try:
        # The second fails if the folder lies in a repository that does not have dart, such as a virtual environment.
        commit = _git(root, "rev-parse", "HEAD", "HEAD:./dart/__init__.py").split()[0]
        changed = _git(root, "diff", "--name-only", "--relative", "HEAD", "--", *PARTS).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return Code(commit=UNKNOWN, changed=[])
    return Code(commit=commit, changed=changed)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def told(made_by: Mapping[str, Sequence[Code]]) -> list[str]:
    """Sentences about runs that were not all made by one commit as it is. `made_by`: run → the code of its pieces."""
    pieces = {run: codes or [Code(commit=UNKNOWN, changed=[])] for run, codes in made_by.items()}
    commits = Counter(commit for codes in pieces.values() for commit in {code["commit"] for code in codes})
    said = []
    if set(commits) == {UNKNOWN}:
        said.append(f"the commit that made the {len(pieces)} runs is unknown")
    elif len(commits) > 1:
        each = ", ".join(f"{commit[:DIGITS]} (in {number} of them)" for commit, number in commits.most_common())
        said.append(f"the {len(pieces)} runs were made by {len(commits)} commits: {each}")
    changed = {run: sorted({file for code in codes for file in code["changed"]}) for run, codes in pieces.items()}
    if by_run := [f"{run} ({', '.join(files)})" for run, files in changed.items() if files]:
        said.append(f"{len(by_run)} of the {len(pieces)} runs were made with changed files: {shortened(by_run)}")
    return said


def shortened(names: Sequence[str]) -> str:
    """The names, of which there may be too many to read."""
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
