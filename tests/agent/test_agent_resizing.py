"""The config's sizes of screenshots against the model folder's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dart.agent import resizing
from dart.config import Agent, load

PHONE, FULL_HD = (1080, 2400), (1920, 1080)
UI_TARS = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056}
QWEN3 = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}


PREPROCESSOR = "preprocessor_config.json"


def folder_with(tmp_path: Path, document: object, name: str = PREPROCESSOR) -> Path:
    (tmp_path / name).write_text(json.dumps(document), encoding="utf-8")
    return tmp_path


def test_sizes_that_resize_alike_are_alike(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, UI_TARS)
    assert resizing.problem(Agent(), FULL_HD, folder) is None
    assert resizing.problem(Agent(max_pixels=3_000_000), PHONE, folder) is None, "it is smaller than that"


def test_a_difference_is_told_with_its_remedy(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, UI_TARS)
    told = resizing.problem(Agent(max_pixels=1_003_520), PHONE, folder)
    assert told == (
        f"the model would see a screenshot of 1080x2400 as 1092x2408, by {folder / PREPROCESSOR}, and its clicks "
        "would be read as on 672x1484: set agent.min_pixels: 3136 (it is 78400), agent.max_pixels: 12845056 (it is "
        "1003520), or change that file"
    )
    told = resizing.problem(Agent(), FULL_HD, folder_with(tmp_path, QWEN3))
    assert told is not None and "set agent.resize_multiple: 32 (it is 28)" in told


def test_what_the_file_does_not_say_is_believed(tmp_path: Path) -> None:
    assert resizing.problem(Agent(), FULL_HD, tmp_path) is None
    for document in ({}, [], {"size": {"height": 224}}, {"max_pixels": "many"}, {"patch_size": 14}):
        assert resizing.problem(Agent(), FULL_HD, folder_with(tmp_path, document)) is None
    older = {"size": {"longest_edge": 1_003_520}, "max_pixels": 12_845_056}
    assert resizing.problem(Agent(), PHONE, folder_with(tmp_path, older)) is None, "max_pixels goes first"


def test_the_processors_own_file_goes_first_if_it_has_the_sizes(tmp_path: Path) -> None:
    """What `processor.save_pretrained` writes, and transformers reads, since release 5."""
    processor = "processor_config.json"
    folder = folder_with(tmp_path, {"image_processor": UI_TARS, "processor_class": "Any"}, processor)
    assert resizing.problem(Agent(), FULL_HD, folder) is None
    told = resizing.problem(Agent(max_pixels=1_003_520), PHONE, folder)
    assert told is not None and str(folder / processor) in told
    folder_with(tmp_path, QWEN3)  # which nothing reads
    assert resizing.problem(Agent(), FULL_HD, folder) is None
    folder_with(tmp_path, {"processor_class": "Any"}, processor)
    told = resizing.problem(Agent(), FULL_HD, folder)
    assert told is not None and str(folder / PREPROCESSOR) in told


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configs_agree_with_their_models(path: Path, tmp_path: Path) -> None:
    config = load(path, [])
    folder = config.model.folder
    if not config.model.path.startswith("builtin:"):
        folder = folder_with(tmp_path, QWEN3 if "qwen3" in path.stem else UI_TARS)
    assert resizing.problem(config.agent, config.environment.viewport, folder) is None
