"""What the tests of the workers share: a tiny model of two layers for the trainer, and one of each family."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_model  # it needs torch, which the env worker's tests do without

    path: Path = tmp_path_factory.mktemp("model")
    tiny_model.build(path, text={"num_hidden_layers": 2}, vision={"depth": 2})
    return path


@pytest.fixture(scope="module", params=["qwen3", "qwen2_5"])
def each_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL, then a tiny Qwen2.5-VL, whose vision blocks attend within windows."""
    import tiny_model

    path: Path = tmp_path_factory.mktemp(request.param)
    {"qwen3": tiny_model.build, "qwen2_5": tiny_model.build_windowed}[request.param](path)
    return path
