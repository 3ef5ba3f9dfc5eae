"""Which code made the runs of an experiment, and what a report says about it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.trials import sources
from benchmarks.trials.sources import Code

ONE, OTHER = "1e5bff4" + 33 * "0", "f52c38d" + 33 * "0"


def code(commit: str, *changed: str) -> Code:
    return Code(commit=commit, changed=list(changed))


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_code_is_the_commit_and_the_tracked_files_that_differ_from_it(tmp_path: Path) -> None:
    assert sources.current(tmp_path) == code("unknown"), "no repository"
    (tmp_path / "dart").mkdir()
    (tmp_path / "docs").mkdir()
    for name in ("dart/__init__.py", "dart/loss.py", "docs/loss.md"):
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "docs")
    git(tmp_path, "commit", "-qm", "without dart")
    assert sources.current(tmp_path) == code("unknown"), "a repository that does not have dart"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "said")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert sources.current(tmp_path) == code(commit)
    (tmp_path / "docs" / "loss.md").write_text("two\n")
    (tmp_path / "dart" / "untracked.py").write_text("two\n")
    assert sources.current(tmp_path) == code(commit)
    (tmp_path / "dart" / "loss.py").write_text("two\n")
    assert sources.current(tmp_path) == code(commit, "dart/loss.py")
    git(tmp_path, "add", "dart/loss.py")
    assert sources.current(tmp_path) == code(commit, "dart/loss.py"), "added to the index is not committed"


def test_nothing_is_said_about_one_commit_as_it_is() -> None:
    assert sources.told({}) == []
    assert sources.told({"full-0": [code(ONE), code(ONE)], "none-0": [code(ONE)]}) == []


def test_other_commits_and_changed_files_are_named() -> None:
    made = {"full-0": [code(ONE), code(OTHER)], "none-0": [code(OTHER, "dart/b.py", "dart/a.py")]}
    assert sources.told(made) == [
        "the 2 runs were made by 2 commits: f52c38d00000 (in 2 of them), 1e5bff400000 (in 1 of them)",
        "1 of the 2 runs were made with changed files: none-0 (dart/a.py, dart/b.py)",
    ]
    assert sources.told({"full-0": [code("unknown")], "none-0": []}) == ["the commit that made the 2 runs is unknown"]
    assert "unknown (in 1 of them)" in sources.told({"full-0": [code(ONE)], "none-0": []})[0]
    many = sources.told({f"full-{seed}": [code(ONE, "dart/a.py")] for seed in range(20)})
    assert many[0].startswith("20 of the 20 runs") and many[0].endswith("full-11 (dart/a.py), ...")
