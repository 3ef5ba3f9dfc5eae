"""The estimates of `dart.core.capacity` against the bytes of a trainer that two ranks share, over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.torch

import tiny_model  # noqa: E402
from ranks import count_sharded  # noqa: E402
from ranks.start import run_ranks  # noqa: E402

from dart.config import Lora  # noqa: E402
from dart.core.capacity import memory  # noqa: E402
from dart.core.capacity.memory import Prompts, TrainerSetUp  # noqa: E402
from dart.core.capacity.shape import read_shape  # noqa: E402

RANKS = 2
CASES: dict[str, dict[str, Any]] = {
    "float32": {"mixed": False},
    "bfloat16": {},
    "windowed": {},
    "frozen_tower": {"vision_frozen": True},
    "adapter": {"lora_rank": 4, "lora_targets": Lora().target_modules},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny Qwen3-VL, and a tiny Qwen2.5-VL."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("usual", "windowed")}
    tiny_model.build(made["usual"])
    tiny_model.build_windowed(made["windowed"])
    return made


@pytest.fixture(scope="module")
def counted(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank has in each case, by name."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(count_sharded.__file__), [*map(str, folders.values()), "no checkpoint", str(out)], RANKS)
    return lambda name: [torch.load(out / f"{name}-{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_what_each_of_two_ranks_holds_is_what_is_estimated(folders: Any, counted: Any, name: str) -> None:
    config = json.loads((folders.get(name, folders["usual"]) / "config.json").read_text(encoding="utf-8"))
    shape, set_up = read_shape(config), TrainerSetUp(ranks=RANKS, sharded=True, **CASES[name])
    needs = memory.of_rank(shape, set_up, Prompts(100, 0, 0)).parts
    ranks = counted(name)
    for part in ("weights", "gradients", "optimiser state", "reference"):
        assert [rank[part] for rank in ranks] == [needs[part]] * RANKS
    # Of two layers, one is on its way while the other is used. The gathered parts of an adapter are left out.
    whole = needs["gathered layers"] - (2 if set_up.mixed else 4) * max(shape.text.layer, shape.vision.block)
    assert [rank["gathered"] for rank in ranks] == pytest.approx([whole] * RANKS, rel=0.01 if set_up.lora_rank else 0)
