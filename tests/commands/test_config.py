"""Configs: every shipped one loads; wrong ones are told with field, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dart.config import ConfigError, load
from dart.config.yaml_text import read_yaml_file
from dart.config_reference import reference

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
MINIWOB = Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads(path: Path) -> None:
    assert load(path).environment.tasks.training


def test_resolved_config_loads_again(tmp_path: Path) -> None:
    config = load(MINIWOB)
    again = tmp_path / "config.yaml"
    again.write_text(yaml.safe_dump(yaml.safe_load(config.model_dump_json())))
    assert load(again) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.replica=3", "rollout.replica is not a known field (it is 3): did you mean replicas?"),
        ("rollout.replicas=many", "rollout.replicas (it is 'many')"),
        ("rollout.replicas=0", "rollout.replicas (it is 0): give a number of at least 1"),
        ("rollout.temperature=3.0", "rollout.temperature (it is 3.0): vLLM samples at 0.01 to 2: choose one of these"),
        ("rollout.temperature=0", "rollout.temperature (it is 0): vLLM samples at 0.01 to 2"),
        ("rollout.temperature=.nan", "rollout.temperature (it is nan)"),
        ("evaluation.temperature=2.1", "vLLM samples at 0.01 to 2, or greedily at 0: choose one of these"),
        ("rollout.engine_args.dtype=half", "rollout.engine_args: dtype cannot be set: set model.dtype instead"),
        ("sync.every_updates=8", "raise it, or lower sync.every_updates"),
        ("sync.max_unavailable=5", "sync.max_unavailable is 5 but there are only 2 replicas"),
        ("environment.tasks.eval_seeds=[10, 20]", "train_seeds and eval_seeds overlap"),
        (
            "server.host=0.0.0.0",
            "open to the network: set server.tokens.env, server.tokens.rollout, server.tokens.train, server",
        ),
        ("server.tokens={env: secret}", "tokens.env must be env:NAME or file:PATH"),
        ("trainer.loss.importance_cap=.inf", "importance_cap (it is inf): give a finite number"),
        ("stop.updates=[", "override 'stop.updates=[': [ is not a YAML value"),
        ("nonsense", "override 'nonsense' is not section.field=value"),
        ("trainer.loss.kl=1", "trainer.loss.kl is not a known field (it is 1)"),
        ("trainer.loss.kind=gpro", "trainer.loss.kind (it is 'gpro'): use grpo, cispo, likelihood, or module:function"),
        ("trainer.loss.ratio=step", "trainer.loss.ratio (it is 'step'): use token or sequence"),
        ("trainer.loss.clip_low=1.2", "trainer.loss.clip_low (it is 1.2): give a number of at most 1"),
        ("trainer.loss.aggregation=constant", "trainer.loss: aggregation constant needs constant_length"),
        ("trainer.loss.importance=masked", "set a floor below 1 and a cap above, for example 0.5 and 5"),
        ("trainer.loss.entropy_quantile=1", "trainer.loss.entropy_quantile (it is 1): give a number below 1"),
        ("trainer.loss.entropy_coefficient=-1", "trainer.loss.entropy_coefficient (it is -1)"),
        ("trainer.advantage.kind=step", "trainer.advantage.kind (it is 'step'): use group or gigpo"),
        ("trainer.advantage.gamma=1.5", "trainer.advantage.gamma (it is 1.5): give a number of at most 1"),
        ("trainer.advantage.gamma=0", "trainer.advantage.gamma (it is 0): give a number above 0"),
        ("trainer.advantage.step_weight=-1", "trainer.advantage.step_weight (it is -1): give a number"),
        (
            "trainer.advantage.overlong_buffer=99",
            "trainer.advantage.overlong_buffer is 99, more than rollout.max_tokens",
        ),
        ("environment.kind=MyWorld", "'MyWorld' names no world: use one that ships with dart, module:Class"),
        ("stop={}", "nothing ends the run: set at least one of updates"),
        ("run.name=2024-13-01", "override 'run.name=2024-13-01': 2024-13-01 is not a YAML value"),
        ("run.seed=" + "1" * 5000, "is not a YAML value"),
        ("run.name=" + "[" * 3000, "is not a YAML value"),
        ("rollout.environment={A: x, A: y}", "is not a YAML value"),
        ('agent.prompt="a\\0b"', "agent.prompt: "),
        ("rollout.max_tokens=2048", "rollout.max_tokens is 2048, and prompt and answer together have at most"),
        ("server.heartbeat_seconds=15", "heartbeat_seconds is 15, and a worker that is silent for lost_after_seconds"),
        ("trainer.adam_betas=[0.9, 1]", "trainer.adam_betas.1 (it is 1): give a number below 1"),
        (
            "environment.tasks.eval_seeds=[1000000, 9223372036854775809]",
            "is beyond what the database holds: end at 2^63",
        ),
    ],
)
def test_wrong_fields_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(MINIWOB, [override])
    assert message in str(error.value)


@pytest.mark.parametrize("password", ["simple", "with:colon", "with@sign", "a:b@c", "x"])
def test_no_part_of_a_password_is_shown(password: str) -> None:
    with pytest.raises(ConfigError, match="has a password: leave it out") as error:
        load(MINIWOB, [f"run.database=postgresql://me:{password}@host/db"])
    assert "'postgresql://me:***@host/db'" in str(error.value)


@pytest.mark.parametrize("kind", ["cispo", "my_losses:reinforce", "my.package.losses:reinforce"])
def test_a_loss_goes_by_name_or_by_where_it_is(kind: str) -> None:
    assert load(MINIWOB, [f"trainer.loss.kind={kind}"]).trainer.loss.kind == kind


def test_an_adapter_goes_to_the_replicas_over_gloo() -> None:
    osworld = MINIWOB.with_name("osworld_uitars15_7b.yaml")
    with pytest.raises(
        ConfigError, match=r"sync\.transport is nccl, and an adapter goes .*: set sync\.transport: gloo"
    ):
        load(osworld, ["trainer.lora.sync=adapter"])
    assert load(osworld, ["trainer.lora.sync=adapter", "sync.transport=gloo"]).trainer.serves_adapter
    assert not load(osworld, ["trainer.lora={}"]).trainer.serves_adapter


def test_quantised_replicas_need_narrow_weights_and_the_importance_weight() -> None:
    fp8 = "rollout.quantization=fp8"
    with pytest.raises(ConfigError, match=r"fp8 and model\.dtype float32, .*: set model\.dtype: bfloat16"):
        load(MINIWOB, [fp8])
    with pytest.raises(ConfigError, match=r"importance none would not correct for it: set it to truncated"):
        load(MINIWOB, [fp8, "model.dtype=bfloat16", "trainer.loss.importance=none"])
    assert load(MINIWOB, [fp8, "model.dtype=bfloat16"]).rollout.quantization == "fp8"
    with pytest.raises(ConfigError, match=r"quantization must be none or fp8|use none or fp8"):
        load(MINIWOB, ["rollout.quantization=int4"])


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: name a YAML file"):
        load(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(broken)
    broken.write_text("just text")
    with pytest.raises(ConfigError, match="is a text: write sections"):
        load(broken)
    broken.write_text("run: {name: 2024-13-01}")
    with pytest.raises(ConfigError, match=r"2024-13-01 is no value \(month must be in 1..12\): put it in quotes"):
        load(broken)
    with pytest.raises(ConfigError, match=r"broken.yaml/more.yaml cannot be read \(Not a directory\): name a readable"):
        load(broken / "more.yaml")
    with pytest.raises(ConfigError, match=r"environment.tasks.file: .*more.yaml cannot be read \(Not a directory\)"):
        load(MINIWOB, [f"environment.tasks={{file: {broken}/more.yaml}}"])


def test_a_section_is_not_given_twice(tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    text = MINIWOB.read_text()
    twice.write_text(f"{text}\nstop:\n  updates: 1\n")
    with pytest.raises(ConfigError, match="stop is given twice: keep one of them") as error:
        load(twice)
    assert f"line {len(text.splitlines()) + 2}" in str(error.value)


@pytest.mark.parametrize("repeats", ["[*{0}, *{0}, *{0}, *{0}]", "{{one: *{0}, two: *{0}}}", "{{<<: [*{0}, *{0}]}}"])
def test_aliases_that_repeat_more_than_anybody_could_read_are_refused(tmp_path: Path, repeats: str) -> None:
    lines = ["a0: &a0 {one: 1}"]
    lines += [f"a{number}: &a{number} {repeats.format(f'a{number - 1}')}" for number in range(1, 30)]
    bomb = tmp_path / "bomb.yaml"
    bomb.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"line \d+, column \d+: aliases \(\*a\d+\) repeat more than 100,000"):
        load(bomb)
    with pytest.raises(ConfigError, match="repeat more than 100,000 values"):
        load(MINIWOB, [f"environment.tasks={{file: {bomb}}}"])


def test_an_alias_within_what_it_repeats_is_refused(tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    endless.write_text("run: &all {name: [*all]}")
    with pytest.raises(ConfigError, match=r"\*all is a part of what it repeats: write out what you mean"):
        load(endless)


def test_what_a_merge_adds_may_be_given_again(tmp_path: Path) -> None:
    path, inner = tmp_path / "merged.yaml", "&both {<<: &base {one: 1, two: 2}, two: 3}"
    path.write_text(f"x: {{<<: {inner}, four: 4}}\ny: {{<<: *both, one: 5}}\nz: *base\n")
    assert read_yaml_file(path) == yaml.safe_load(path.read_text())


def test_the_page_of_fields_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), "run python -m dart.config_reference"
