"""Prompts of one's own and notes: read with the config, checked there, and shown to the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import yaml

from dart.agent.prompt import build_prompt
from dart.agent.templates import TEMPLATES, template_of
from dart.config import Agent, Config, ConfigError, load, parse
from dart.core.types import Image, Markup, Text

MINIWOB = Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml"
PASSWORD = "The password of the computer is 'osworld'."
OWN = """
system: |-
  You operate a {machine}. {note}
user: |-
  Answer {"action": ...}.
  Task: {instruction}
  Begin.
"""
SCREEN = Image.of(b"screen", "image/png", 160, 224)


def written(folder: Path, prompt: str | None = OWN, **agent: str) -> Path:
    """A config with a prompt in a file beside it."""
    raw = yaml.safe_load(MINIWOB.read_text())
    raw["agent"] = {"prompt": "own.yaml", **agent}
    if prompt is not None:
        (folder / "own.yaml").write_text(prompt)
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder / "config.yaml"


def first_words(config: Config | Agent) -> str:
    agent = config.agent if isinstance(config, Config) else config
    parts = build_prompt(agent, "click <|im_end|>", [], SCREEN).parts
    assert isinstance(parts[1], Text), "the instruction is no markup"
    assert all(isinstance(part, Markup) for part in (parts[0], parts[2]))
    return f"{parts[0].text}{parts[1].text}{parts[2].text}"  # type: ignore[union-attr]


def test_a_prompt_of_ones_own_replaces_what_stands_before_the_first_screenshot(tmp_path: Path) -> None:
    assert first_words(load(written(tmp_path, note=PASSWORD))) == (
        f"<|im_start|>system\nYou operate a {{machine}}. {PASSWORD}<|im_end|>\n<|im_start|>user\n"
        'Answer {"action": ...}.\nTask: click <|im_end|>\nBegin.<|im_end|>\n<|im_start|>user\n<|vision_start|>'
    )
    assert "You operate a {machine}. <|im_end|>" in first_words(load(written(tmp_path)))


def test_the_resolved_config_needs_no_file(tmp_path: Path) -> None:
    config = load(written(tmp_path))
    (tmp_path / "own.yaml").unlink()
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert load(resolved) == config
    with pytest.raises(ConfigError, match=r"agent\.prompt \(it is 'own\.yaml'\): use ui_tars, qwen3_vl, minimal, or"):
        load(tmp_path / "config.yaml")


def test_another_prompt_replaces_the_text_that_a_runs_config_has(tmp_path: Path) -> None:
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(yaml.safe_dump(json.loads(load(written(tmp_path)).model_dump_json())))
    (tmp_path / "other.yaml").write_text("{system: another, user: '{instruction}'}")
    other = load(resolved, ["agent.prompt=other.yaml"])
    assert other.agent.template is not None and other.agent.template.system == "another"
    assert load(resolved, ["agent.prompt=ui_tars"]).agent.template is None
    with pytest.raises(ConfigError, match=r"otter\.yaml cannot be read"):
        load(resolved, ["agent.prompt=otter.yaml"])


@pytest.mark.parametrize("name", ["ui_tars", "qwen3_vl"])
def test_a_note_is_the_end_of_the_system_message(name: Literal["ui_tars", "qwen3_vl"]) -> None:
    plain, noted = Agent(grammar=name, prompt=name), Agent(grammar=name, prompt=name, note=PASSWORD)
    assert template_of(plain) is TEMPLATES[name]
    before, _, after = first_words(plain).partition("<|im_end|>")
    assert first_words(noted) == f"{before}\n{PASSWORD}<|im_end|>{after}"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{system: a, user: b}", "{instruction} stands 0 times in user: the task's instruction stands once"),
        ("{system: a, user: '{instruction} {instruction}'}", "{instruction} stands 2 times in user"),
        ("{system: '{instruction}', user: '{instruction}'}", "{instruction} stands in system"),
        ("{system: '{note}{note}', user: '{instruction}'}", "{note} stands more than once"),
        ("{system: a, user: '{note} {instruction}'}", "{note} stands more than once or in user"),
        ("{system: 'a<|im_end|>', user: '{instruction}'}", "own.yaml: system (it is 'a<|im_end|>'): <|im_end|> would"),
        ("{system: a, user: '{instruction}', assistant: b}", "own.yaml: assistant is not a known field"),
        ("{user: '{instruction}'}", "own.yaml: system is missing: add it"),
        ("just words", "own.yaml: (whole)"),
        ("[", "own.yaml is not YAML"),
        (None, "own.yaml cannot be read"),
    ],
)
def test_a_wrong_file_is_told_by_field_value_and_remedy(prompt: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, prompt))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"prompt": "minimal", "note": "x"}, "note is set, and prompt minimal has no system text"),
        ({"note": "x<|im_start|>"}, "agent.note (it is 'x<|im_start|>'): <|im_start|> would end or begin a message"),
        ({"template": {"system": "a", "user": "{instruction}"}}, "template is set, and prompt ui_tars is built in"),
        ({"read": "strict", "actions_per_step": 2}, "actions_per_step is 2, and read is strict, which takes exactly"),
        ({"actions_per_step": 17}, "agent.actions_per_step (it is 17): give a number of at most 16"),
        ({"show": ["screen"]}, "agent.show.0 (it is 'screen'): use accessibility_tree or last_act"),
        ({"prompt": ""}, "agent.prompt (it is '')"),
        ({"grammar": "qwen3_vl"}, "prompt is ui_tars, and grammar is qwen3_vl, which cannot read"),
        ({"grammar": "qwen3_vl", "prompt": "qwen3_vl", "coordinates": "thousand"}, "has a grid of its own"),
        ({"prompt": "ui_tar"}, "agent.prompt (it is 'ui_tar'): use ui_tars, qwen3_vl, minimal, or name a file"),
    ],
)
def test_what_does_not_go_together_is_told(agent: dict[str, object], message: str) -> None:
    raw = yaml.safe_load(MINIWOB.read_text()) | {"agent": agent}
    with pytest.raises(ConfigError) as error:
        parse(raw)
    assert message in str(error.value)
