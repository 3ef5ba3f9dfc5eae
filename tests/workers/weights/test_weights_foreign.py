"""Checkpoints that somebody else wrote: bad data, but never code."""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
from pathlib import Path

import pytest

from dart.errors import UserError

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from dart.workers.train.checkpoint import _check_parts  # noqa: E402

pytestmark = pytest.mark.torch


class Harmful:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.file),)


def written(folder: Path, **more: object) -> Path:
    weights = {"a.b": torch.zeros(3, 2, dtype=torch.bfloat16), "c": torch.zeros(2)}
    dcp.save({"weights": weights, "counters": {"updates": torch.tensor(3)}, **more}, checkpoint_id=folder)
    return folder


def test_tensors_and_what_describes_them_are_read(tmp_path: Path) -> None:
    _check_parts(written(tmp_path / "parts"))


def test_what_python_3_13_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the paths that torch puts into the description are of another module."""
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    monkeypatch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
    folder = written(tmp_path / "parts")
    assert b"pathlib._local" in (folder / ".metadata").read_bytes()
    _check_parts(folder)


def test_code_in_the_description_is_not_run(tmp_path: Path) -> None:
    folder = written(tmp_path / "parts")
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "harmed")))
    with pytest.raises(UserError, match=r"is not what dart writes \(posix.mkdir does not belong there\)"):
        _check_parts(folder)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("name", ["os.system", "FileSystemWriter"])
def test_nothing_is_reached_through_a_module_that_describes_tensors(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "parts")
    (folder / ".metadata").write_bytes(
        b"\x80\x04" + b"".join(
            b"\x8c" + bytes([len(text)]) + text.encode() for text in ("torch.distributed.checkpoint.filesystem", name)
        ) + b"\x93."
    )  # fmt: skip
    with pytest.raises(UserError, match=f"{name} does not belong there"):
        _check_parts(folder)


def test_what_is_no_tensor_is_refused_before_torch_unpickles_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "parts", more={"harmful": Harmful(tmp_path / "harmed")})
    with pytest.raises(UserError, match=r"has more.harmful, which is no tensor"):
        _check_parts(folder)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x04."])
def test_a_broken_description_is_told(tmp_path: Path, data: bytes) -> None:
    folder = written(tmp_path / "parts")
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(UserError, match="is not what dart writes"):
        _check_parts(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(UserError, match=f"checkpoint {tmp_path}: parts does not fit .* or remove that folder"):
        _check_parts(folder)
