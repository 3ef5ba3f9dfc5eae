"""What the tests of the workers share: a tiny model of two layers for the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_model  # it needs torch, which the env worker's tests do without

    path: Path = tmp_path_factory.mktemp("model")
    tiny_model.build(path, text={"num_hidden_layers": 2}, vision={"depth": 2})
    return path
