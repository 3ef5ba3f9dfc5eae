"""Task bundles are read as they are published, and what cannot be run is refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from webapps.todo_tasks import ADD_MILK, SETUP, bundle, options

from dart.errors import UserError
from dart.workers.env.webapps import world
from dart.workers.env.webapps.options import PREVIEW, WebAppsOptions
from dart.workers.env.webapps.programs import reward_in
from dart.workers.env.webapps.tasks import Tasks, fill_in, key, named_in
from dart.workers.env.webapps.world import WebApps

MAIL, DOCS = "https://cua-gym-gmail.xlang.ai", "__CUA_GYM_GOOGLE_DOCS_URL__"


def read(given: dict[str, object]) -> WebAppsOptions:
    return WebAppsOptions.model_validate(given)


def test_the_names_of_an_application_are_one_name() -> None:
    same = {"google_docs_mock": "google_docs", "Canvas-LMS_mock": "canvas_lms", "booking-com": "booking_com"}
    assert {name: key(name) for name in same} == same
    named = f"URL = '{MAIL}/go'  # or https://cua-gym-slack.xlang.ai\nHOST = '__CUA_GYM_BOOKING_COM_HOST__'"
    assert named_in(named, "a-task") == {"gmail", "booking_com"}


def test_addresses_and_the_file_of_the_session_are_filled_in() -> None:
    program = f"'{MAIL}/go' '{DOCS}' '__CUA_GYM_GMAIL_HOST__' 'cua-gym-gmail.xlang.ai' open('/tmp/task_web_sid')"
    assert fill_in(program, "127.0.0.1:81", Path("/x/sid")) == (
        "'http://127.0.0.1:81/go' 'http://127.0.0.1:81' '127.0.0.1:81' '127.0.0.1:81' open('/x/sid')"
    )


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("PASS 0.3 points\nREWARD: 0.5\n", 0.5),
        ("REWARD: 0.2\nREWARD: 1\n", 1.0),
        ("0.25\n", 0.25),
        ("REWARD: .5e0", 0.5),
        ("REWARD: nan", None),
        ("the REWARD: 1.0", None),
        ("", None),
    ],
)
def test_a_reward_stands_alone_on_its_line(said: str, reward: float | None) -> None:
    assert reward_in(said) == reward


@pytest.mark.parametrize("name", ["task.json", "config.json", "task_config.json"])
def test_a_bundle_is_read(tmp_path: Path, name: str) -> None:
    given = options(tmp_path)
    field = "task_instruction" if name == "task_config.json" else "instruction"
    (tmp_path / "tasks" / "add-milk" / "task.json").unlink()
    (tmp_path / "tasks" / "add-milk" / name).write_text(json.dumps({field: "Add milk.", "app_type": "todo_mock"}))
    task = Tasks(read(given)).load("add-milk")
    assert (task.instruction, task.application.name) == ("Add milk.", "todo_mock")
    assert (task.setup, task.reward) == (SETUP, ADD_MILK)


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    given, tasks = options(tmp_path), tmp_path / "tasks"
    bundle(tasks / "two", ADD_MILK, SETUP.replace("TODO", "SLACK"))
    bundle(tasks / "none", "print('REWARD: 1.0')", None)
    bundle(tasks / "judged", f"from reward_judge import call_llm_judge\n{ADD_MILK}")
    bundle(tasks / "absent", "print(1)", SETUP.replace("TODO", "TODOS"))
    bundle(tasks / "no-python", f"def (:\n '''{MAIL}")
    bundle(tasks / "sheet", ADD_MILK, None)
    (tasks / "sheet" / "initial_setup.xlsx").touch()
    bundle(tasks / "untold", ADD_MILK)
    (tasks / "untold" / "task.json").write_text('{"id": "untold"}')
    refused = {
        "add-mlik": "has no task 'add-mlik': there are for example add-milk",
        "../tasks/add-milk": r"has no task '\.\./tasks",
        "two": r"task two uses 2 applications \(slack, todo\)",
        "none": "task none names no application",
        "judged": "task judged is judged by a language model",
        "absent": r"application todos, which environment\.options\.applications .* \(there are todo_mock\)",
        "no-python": "a program of task no-python is not Python",
        "sheet": r"task sheet has initial_setup\.xlsx, which is for a desktop",
        "untold": "task.json is not a task of CUA-Gym",
    }
    for name, said in refused.items():
        with pytest.raises(UserError, match=said):
            WebApps.check_tasks(read(given), [name])
    WebApps.check_tasks(read(given), ["add-milk", "tick-bread"])


def test_an_application_that_is_not_built_is_named_with_the_command(tmp_path: Path) -> None:
    given = options(tmp_path, command=PREVIEW)
    folder = tmp_path / "websites" / "todo_mock"
    with pytest.raises(UserError, match=f"todo_mock is not built: run `cd {folder} && npm install && npm run build`"):
        WebApps.check_tasks(read(given), ["add-milk"])
    for name in ("node_modules/vite/bin/vite.js", "dist/index.html"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    WebApps.check_tasks(read(given), ["add-milk"])


def test_doctor_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options(tmp_path)
    checks = WebApps.checks(read({**given, "command": ["no-such-node", "{port}"], "python": "/no/python"}))
    assert "there is no program no-such-node" in str(checks["webapps server"]())
    assert "/no/python: No such file" in str(checks["webapps python"]())
    assert checks["webapps folders"]() is None
    lost = WebApps.checks(read({**given, "applications": str(tmp_path / "no"), "python": shutil.which("true")}))
    assert "is not a folder: name `websites` of a clone of CUA-Gym-Hub" in str(lost["webapps folders"]())
    assert lost["webapps python"]() is None
    (tmp_path / "node").write_text("#!/bin/sh\necho v16.20.2\n")
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    old = WebApps.checks(read({**given, "command": PREVIEW}))["webapps server"]()
    assert f"is v16.20.2: version {world.OLDEST_NODE} or newer is needed" in str(old)
