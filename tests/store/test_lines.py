"""metrics.jsonl within its bound: important lines stay for ever, and a process killed while it folds loses nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dart.store import lines


def important(line: str) -> bool:
    return line.startswith("!")


def begin(path: Path, *texts: str) -> None:
    path.write_text("".join(f"{text}\n" for text in texts))


def read(path: Path) -> list[str]:
    return [line.rstrip("\n") for line in lines.read_lines(path)]


def test_important_lines_stay_and_of_the_others_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for number in range(5):
        begin(path, f"!{number}", f"{number} a", f"{number} b")
        assert lines.set_aside(path)
        assert read(path)[-3:] == [f"!{number}", f"{number} a", f"{number} b"], "also before it is folded"
        lines.fold(path, important)
    begin(path, "5")
    assert read(path) == ["!0", "!1", "!2", "!3", "!4", "4 a", "4 b", "5"]
    lines.fold(path, important)
    assert read(path)[-1] == "5"


def test_what_is_not_folded_yet_is_not_set_aside_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    begin(path, "a")
    assert lines.set_aside(path)
    begin(path, "b")
    assert not lines.set_aside(path)
    assert read(path) == ["a", "b"]


@pytest.mark.parametrize("killed", ["before the elder is replaced", "after it"])
def test_killed_while_it_folds(tmp_path: Path, killed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    begin(lines.elder(path), "!1", "2")
    begin(path, "!3", "4")
    lines.set_aside(path)
    begin(path, "5")

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "replace" if killed.startswith("before") else "unlink", kill)
        lines.fold(path, important)
    assert read(path) == (["!1", "2", "!3", "4", "5"] if killed.startswith("before") else ["!1", "!3", "4", "5"])
    lines.fold(path, important)
    assert read(path) == ["!1", "!3", "4", "5"]
    assert sorted(file.name for file in tmp_path.glob("metrics.jsonl*")) in (
        ["metrics.jsonl", "metrics.jsonl.1"],
        ["metrics.jsonl", "metrics.jsonl.1", "metrics.jsonl.tmp"],
    )


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("whole\ncut")
    assert read(path) == ["whole"]


@pytest.mark.parametrize("odd", ["metrics.jsonl.1", "metrics.jsonl.2", "metrics.jsonl"])
def test_what_is_no_regular_file_is_left_out(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "metrics.jsonl"
    parts = (lines.elder(path), path.with_name(f"{path.name}.2"), path)
    for part in parts:
        if part.name == odd:
            os.mkfifo(part)
        else:
            begin(part, part.name)
    assert read(path) == [part.name for part in parts if part.name != odd]
