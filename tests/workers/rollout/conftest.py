"""What the tests of a real vLLM engine share: a tiny model, and the engine of the module's own `role`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import build

from dart.workers.rollout.engine import Engine
from dart.workers.rollout.role import RolloutRole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    RolloutRole.preload()
    folder = tmp_path_factory.mktemp("model")
    build(folder)
    return folder


@pytest.fixture
def engine(role: RolloutRole) -> Engine:
    assert role._engine is not None
    return role._engine
