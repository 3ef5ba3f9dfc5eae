"""Files of tasks: training and held-out names, step limits, and tasks with one instance alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dart.cli import main
from dart.commands.doctor import checks, warnings
from dart.commands.evaluate import EvaluateOptions, _chosen
from dart.config import Config, ConfigError, load, parse
from dart.coordinator.fleet.welcome import welcome
from dart.coordinator.sampling.evaluation import instances
from dart.coordinator.start import Start
from dart.job import Train
from dart.v1 import session_pb2 as pb

MINIWOB = Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml"
OSWORLD_LIKE = """
seeds: one
step_limit: 15
train: [chrome/1, {name: os/1, step_limit: 20}]
eval: [chrome/2, os/2, {name: page, seeds: many}]
"""


def written(folder: Path, tasks: str, **sections: object) -> Path:
    """A config with `tasks` in a file beside it."""
    raw = yaml.safe_load(MINIWOB.read_text())
    raw["environment"]["tasks"] = {"file": "tasks.yaml"}
    for name, values in ({"evaluation": {"episodes": 3}, "curation": {"step_limit": 18}} | sections).items():
        raw.setdefault(name, {}).update(values)
    (folder / "tasks.yaml").write_text(tasks)
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder / "config.yaml"


def test_a_file_says_what_is_trained_on_and_what_is_held_out(tmp_path: Path) -> None:
    config = load(written(tmp_path, OSWORLD_LIKE))
    tasks = config.environment.tasks
    assert (tasks.training, tasks.evaluation) == (("chrome/1", "os/1"), ("chrome/2", "os/2", "page"))
    assert tasks.single_instance == ("chrome/1", "os/1", "chrome/2", "os/2")
    limits = {name: config.step_limit(name) for name in tasks.all}
    assert limits == {"chrome/1": 15, "os/1": 18, "chrome/2": 15, "os/2": 15, "page": 15}
    assert not tasks.not_held_out
    assert [warning.split(":")[0] for warning in warnings(config)] == ["step limits"], "that of os/1 is above the cap"
    assert [task.id for task in instances(config, 5)] == [
        "miniwob/chrome/2#0", "miniwob/os/2#0", "miniwob/page#1000000", "miniwob/page#1000001", "miniwob/page#1000002",
    ]  # fmt: skip


def test_tasks_for_both_are_held_out_by_seed(tmp_path: Path) -> None:
    config = load(written(tmp_path, "{both: [a, b], train: [c]}"))
    tasks = config.environment.tasks
    assert tasks.training == tasks.evaluation == ("a", "b", "c"), "nothing is held out by name"
    assert {task.seed for task in instances(config, 3)} == {1_000_000}


def test_tasks_that_no_episode_is_left_for_are_named(tmp_path: Path) -> None:
    config = load(written(tmp_path, OSWORLD_LIKE, evaluation={"episodes": 2}, curation={"step_limit": 30}))
    (told,) = warnings(config)
    assert told == "evaluation.episodes: with 2 for 3 tasks, the evaluation leaves out page: set it to 3 or more"


@pytest.mark.parametrize("path", sorted(MINIWOB.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_that_ship_evaluate_every_task(path: Path) -> None:
    assert not [warning for warning in warnings(load(path)) if warning.startswith("evaluation.episodes")]


def test_json_will_do_and_the_resolved_config_needs_no_file(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(yaml.safe_load(OSWORLD_LIKE)))
    config = load(path)
    (tmp_path / "tasks.yaml").unlink()
    resolved = tmp_path / "elsewhere" / "config.yaml"
    resolved.parent.mkdir()
    resolved.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert load(resolved) == config
    with pytest.raises(ConfigError, match=r"environment\.tasks\.file: .*tasks\.yaml is no file"):
        load(path)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("train: [a, b, a]", "a is listed 2 times, in train: list it once"),
        ("{train: [a, b], eval: [a]}", "a is listed 2 times, in train and eval: list it once"),
        ("eval: [a]", "there is nothing to train on"),
        ("{both: [a], eval: [b]}", "evaluations would use eval alone: move those in both to train"),
        ("train: [{name: a, step_limit: 0}]", "tasks.yaml: train.0.step_limit (it is 0): give a number"),
        ("train: [{name: a, steplimit: 9}]", "train.0.steplimit is not a known field (it is 9): did you mean step_li"),
        ("train: [{step_limit: 9}]", "tasks.yaml: train.0.name is missing: add it"),
        ("train: a", "tasks.yaml: train (it is 'a')"),
        ("seeds: few", "tasks.yaml: seeds (it is 'few'): use one or many"),
        ("[a, b]", "tasks.yaml: (whole)"),
        ("train: [", "is neither YAML nor JSON"),
    ],
)
def test_a_wrong_file_is_told_by_field_value_and_remedy(tasks: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, tasks))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.tasks.names=[a]"], "environment.tasks.names are both given: keep one of them"),
        (["environment.tasks.file=7"], "environment.tasks.file (it is 7): name a YAML or JSON file"),
        (["evaluation.episodes=9999999"], "the 3 tasks of the evaluation have 10002 instances"),
    ],
)
def test_a_file_and_the_config_agree(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, OSWORLD_LIKE), overrides)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"names": ["a"], "eval_names": ["a"]}, "a is both a training task and in eval_names"),
        ({"names": ["a"], "step_limits": {"b": 3}}, "step_limits has b, which is no task of this config"),
        ({"names": ["a"], "single_instance": ["b"]}, "single_instance has b, which is no task"),
        ({"names": ["a"], "step_limits": {"a": 0}}, "step_limits.a (it is 0)"),
    ],
)
def test_names_without_a_file_are_checked_alike(tasks: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(raw_with(tasks))
    assert message in str(error.value)


def raw_with(tasks: dict[str, object]) -> dict[str, object]:
    raw: dict[str, dict[str, object]] = yaml.safe_load(MINIWOB.read_text())
    raw["environment"]["tasks"] = tasks
    raw["evaluation"] = {"episodes": 0}
    return dict(raw)


def test_doctor_warns_of_what_is_hardly_meant() -> None:
    tasks: dict[str, object] = {"names": ["a", "a", "b"], "single_instance": ["b"], "step_limits": {"a": 99, "b": 2}}
    config = parse(raw_with(tasks))
    assert config.environment.tasks.not_held_out == ("b",)
    assert [one.split(":")[0] for one in warnings(config)] == ["held-out tasks", "step limits", "task names"]
    assert "those of a are above curation.step_limit" in warnings(config)[1]


def test_an_env_worker_is_told_the_names_alone(tmp_path: Path) -> None:
    """So that one of an earlier version, which knows no other fields, can serve the run."""
    config = load(written(tmp_path, OSWORLD_LIKE))
    hello = pb.Hello(worker_id="env-0", role=pb.ROLE_ENV)
    told = json.loads(welcome(config, Start(), hello, Train()))["environment"]["tasks"]
    assert told == {
        "names": ["chrome/1", "os/1", "chrome/2", "os/2", "page"], "train_seeds": [0, 1_000_000],
        "eval_seeds": [1_000_000, 1_010_000],
    }  # fmt: skip


def test_doctor_counts_the_names_that_the_world_does_not_have(tmp_path: Path) -> None:
    pytest.importorskip("miniwob")
    config = load(written(tmp_path, "{train: [click-test, click-tset], eval: [nothing, click-color]}"))
    (problem,) = [told for name, check in checks(config, Train()) if name == "task names" and (told := check())]
    assert "did you mean click-test" in problem and problem.endswith("(1 more names are wrong)")


# ---- dart eval --tasks ----


def chosen(config: Config, **given: object) -> Config:
    return _chosen(config, EvaluateOptions(MINIWOB, **given))  # type: ignore[arg-type]


def test_choosing_tasks_keeps_what_is_known_about_them(tmp_path: Path) -> None:
    config = load(written(tmp_path, OSWORLD_LIKE, evaluation={"episodes": 0}))
    held_out = chosen(config, tasks="os/2")
    assert held_out.environment.tasks.evaluation == ("os/2",) and not held_out.environment.tasks.not_held_out
    assert held_out.evaluation.episodes == 1, "it has no more instances"
    trained = chosen(config, tasks="os/1,page")
    assert trained.environment.tasks.evaluation == ("os/1", "page")
    assert trained.environment.tasks.not_held_out == ("os/1",)
    assert trained.step_limit("os/1") == 18
    assert trained.evaluation.episodes == 200
    assert chosen(config, tasks="os/1,page", seeds="2000000:2000003").evaluation.episodes == 4


def test_a_task_that_the_config_does_not_name_has_one_instance_where_all_others_have(tmp_path: Path) -> None:
    suite = load(written(tmp_path, "{seeds: one, train: [os/1], eval: [os/2]}", evaluation={"episodes": 0}))
    for asked in ("os/3", "os/1,os/3"):
        tasks = chosen(suite, tasks=asked).environment.tasks
        assert set(tasks.evaluation) <= set(tasks.single_instance) and tasks.instances == len(asked.split(","))
    mixed = load(written(tmp_path, OSWORLD_LIKE, evaluation={"episodes": 0}))
    assert not chosen(mixed, tasks="os/3").environment.tasks.single_instance.count("os/3")


def test_doctor_warns_of_miniwobs_unusual_tasks_and_says_why(tmp_path: Path) -> None:
    raw = yaml.safe_load(MINIWOB.read_text())
    raw["environment"]["tasks"] = {"names": ["click-test", "chase-circle"], "eval_names": ["hover-shape"]}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    said = [line for line in CliRunner().invoke(main, ["doctor", str(path)]).output.splitlines() if "warning" in line]
    assert [line.partition(": ")[2].partition(": ")[0] for line in said] == ["hover-shape", "chase-circle"]
    assert "never gives a verdict" in said[0] and "after 10 s" in said[1]
    assert all("docs/miniwob.md" in line for line in said)
    raw["environment"]["tasks"] = {"names": ["click-test"]}
    assert not warnings(parse(raw))


def test_a_world_of_ones_own_may_warn_and_one_that_is_not_here_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "warning_world.py").write_text(
        "from dart.worlds import SyncEnv, WorldOptions\n"
        "class Warned(SyncEnv):\n"
        "    class Options(WorldOptions):\n"
        "        level: int = 1\n"
        "    def reset(self, task): ...\n"
        "    def act(self, action): ...\n"
        "    def judge(self, last, at_limit): ...\n"
        "    @classmethod\n"
        "    def warnings(cls, options, names):\n"
        "        return [f'{name} is hard at level {options.level}' for name in names]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    raw = yaml.safe_load(MINIWOB.read_text())
    raw["environment"] = {"kind": "warning_world:Warned", "options": {"level": 3}, "tasks": {"names": ["a", "b"]}}
    expected = [f"warning_world:Warned tasks: {name} is hard at level 3" for name in "ab"]
    assert warnings(parse(raw)) == expected
    raw["environment"]["options"] = {"lvl": 3}
    assert not warnings(parse(raw)), "the checks report that"
    raw["environment"] |= {"kind": "nowhere:World", "options": {}}
    assert not warnings(parse(raw))
