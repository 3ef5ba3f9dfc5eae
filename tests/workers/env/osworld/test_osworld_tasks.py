"""Task files, what tasks need, the commands beside the world, and the configs that ship with dart."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from osworld import standin

from dart.config import load
from dart.errors import UserError
from dart.workers.env.osworld.__main__ import main
from dart.workers.env.osworld.evaluator import missing
from dart.workers.env.osworld.machine import Ran
from dart.workers.env.osworld.setup import Execute, NotEvaluated, Until, read
from dart.workers.env.osworld.tasks import OSWorldTask, Step, Tasks, needs
from dart.workers.env.osworld.world import OSWorld
from dart.worlds.plugs import read_options

CONFIGS = Path(__file__).parents[4] / "configs"
INFEASIBLE: dict[str, object] = {"func": "infeasible"}


def task(config: list[dict[str, object]] | None = None, **more: object) -> OSWorldTask:
    raw = {"id": "x", "instruction": "Do it.", "config": config or [], "evaluator": INFEASIBLE, **more}
    return OSWorldTask.model_validate(raw)


def step(kind: str, **parameters: object) -> dict[str, object]:
    return {"type": kind, "parameters": parameters}


@pytest.mark.parametrize(
    ("made", "needed"),
    [
        (task(), set()),
        (task([step("download", files=[{"url": "https://huggingface.co/x", "path": "/x"}])]), {"downloads"}),
        (task([step("chrome_open_tabs", urls_to_open=["https://www.apple.com"])]), {"websites"}),
        (task([step("launch", command=["google-chrome", "--remote-debugging-port=1337"])]), set()),
        (task([step("chrome_open_tabs", urls_to_open=["http://localhost:1234/x"])]), set()),
        (task(proxy=True), {"websites"}),
        (task([step("googledrive", settings_file="x")]), {"accounts"}),
        (
            task(evaluator={"func": "f", "result": {"type": "googledrive_file"}, "expected": {"type": "cloud_file"}}),
            {"accounts", "downloads"},
        ),
        (task(evaluator={"func": "f", "result": [None, {"type": "info_from_website"}]}), {"websites"}),
    ],
)
def test_what_a_task_needs(made: OSWorldTask, needed: set[str]) -> None:
    assert needs(made) == needed


def test_a_step_is_read_with_its_parameters() -> None:
    read_step = read(Step(type="execute", parameters={"command": "true", "shell": "true", "until": {"returncode": 0}}))
    assert read_step == Execute(type="execute", command="true", shell=True, until=Until(returncode=0))
    with pytest.raises(NotEvaluated, match="set-up step launch is not one of OSWorld's"):
        read(Step(type="launch", parameters={"comand": "x"}))
    with pytest.raises(NotEvaluated, match="set-up step brew is not one of OSWorld's"):
        read(Step(type="brew"))
    for refused in ("googledrive", "login", "proxy", "act", "replay", "tidy_desktop"):
        with pytest.raises(NotEvaluated, match=f"set-up step {refused} is not supported: "):
            read(Step(type=refused))


def test_until() -> None:
    ran = Ran(output="all is ready", error="", returncode=1)
    assert Until(stdout="ready").met(ran) and Until(returncode=1).met(ran)
    assert not Until(returncode=0).met(ran) and not Until(stderr="ready").met(ran) and not Until().met(ran)


def test_a_broken_task_file_is_named(tmp_path: Path) -> None:
    folder = standin.tasks(tmp_path)
    (folder / "os" / "broken.json").write_text('{"id": "broken"}')
    with pytest.raises(UserError, match=r"broken.json is not a task of OSWorld"):
        Tasks(folder).load("os/broken")
    with pytest.raises(UserError, match=r"has no files DOMAIN/ID.json"):
        Tasks(folder / "os")


def test_the_commands_list_tasks(tmp_path: Path) -> None:
    download = step("download", files=[{"url": "https://huggingface.co/x", "path": "/x"}])
    compared = {"func": "compare", "result": {"type": "vm_file"}, "expected": {"type": "rule"}}
    folder = standin.tasks(
        tmp_path / "tasks", fetch={"config": [download], "evaluator": INFEASIBLE}, compare={"evaluator": compared}
    )
    listed = CliRunner().invoke(main, ["tasks", str(folder)])
    assert listed.stdout.split() == ["os/compare", "os/fetch", "os/refuse", "os/write"]
    evaluators = standin.environment(tmp_path / "evaluators")
    graded = CliRunner().invoke(main, ["tasks", str(folder), "--without", "downloads", "--evaluators", str(evaluators)])
    assert graded.stdout.split() == ["os/refuse", "os/write"]
    assert "os/fetch: needs downloads" in graded.stderr and "easyocr_that_is_missing" in graded.stderr
    assert CliRunner().invoke(main, ["tasks", str(tmp_path / "none")]).exit_code == 1


def test_missing_evaluators_are_reported(tmp_path: Path) -> None:
    assert "install-evaluators" in str(missing(tmp_path))
    there = standin.environment(tmp_path / "there")
    assert missing(there) is None
    metadata = there / "packages" / "osworld_cube-0.3.0.dist-info"
    metadata.rename(metadata.with_name("osworld_cube-0.2.0.dist-info"))
    (there / "packages" / "osworld_cube-0.2.0.dist-info" / "METADATA").write_text(
        "Name: osworld-cube\nVersion: 0.2.0\n"
    )
    assert "has osworld-cube 0.2.0, not 0.3.0" in str(missing(there))


@pytest.mark.parametrize("name", ["osworld_uitars15_7b", "osworld_qwen3vl_8b"])
def test_the_configs_are_accepted(name: str) -> None:
    config = load(CONFIGS / f"{name}.yaml")
    read_options(OSWorld, config.environment.options)
    for task_name in config.environment.tasks.names:
        OSWorld.check_task(task_name)
