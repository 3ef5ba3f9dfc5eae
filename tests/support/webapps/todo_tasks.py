"""Task bundles for the to-do list, in the form in which CUA-Gym publishes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

SERVER = Path(__file__).with_name("todo_server.py")
SETUP = """
import json, os, shlex, subprocess, urllib.request, uuid
BASE_URL = '__CUA_GYM_TODO_URL__'  # like cua-gym-slack.xlang.ai
sid = str(uuid.uuid4())
with open('/tmp/task_web_sid', 'w') as file:
    file.write(sid)
state = {'user': 'Ada', 'todos': [{'id': 1, 'text': 'Buy bread', 'done': False}]}
asked = urllib.request.Request(
    f'{BASE_URL}/post?sid={sid}', json.dumps({'action': 'set', 'state': state}).encode(),
    {'Content-Type': 'application/json'})
assert urllib.request.urlopen(asked, timeout=30).status == 200
subprocess.Popen(shlex.split(f'google-chrome "{BASE_URL}/?sid={sid}&view=all"'), env=os.environ.copy()).wait()
"""
FETCH = """
import json, urllib.request
with open('/tmp/task_web_sid') as file:
    sid = file.read().strip()
state = json.loads(urllib.request.urlopen(f'https://cua-gym-todo.xlang.ai/go?sid={sid}', timeout=30).read())
texts = [todo['text'] for todo in state['current_state']['todos']]
"""
ADD_MILK = FETCH + "print('PASS' if 'Milk' in texts else 'FAIL', texts)\nprint('REWARD:', float('Milk' in texts))\n"
TICK_BREAD = (
    FETCH + "done = [todo['done'] for todo in state['current_state']['todos']]\nprint(f'REWARD: {sum(done) / 2}')"
)


def bundle(folder: Path, reward: str, setup: str | None = SETUP, **more: str) -> Path:
    """Write a task's folder. `more`: names of further files, without their suffix .py, and their texts."""
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps({"id": folder.name, "instruction": f"Do {folder.name}."}))
    for name, text in {"initial_setup": setup, "reward": reward, **more}.items():
        if text is not None:
            (folder / f"{name}.py").write_text(text)
    return folder


def options(folder: Path, tasks: Mapping[str, str] | None = None, **more: object) -> dict[str, object]:
    """`environment.options` for these tasks (name → reward) on the to-do list, all below `folder`."""
    for name, reward in (tasks or {"add-milk": ADD_MILK, "tick-bread": TICK_BREAD}).items():
        bundle(folder / "tasks" / name, reward)
    (folder / "websites" / "todo_mock").mkdir(parents=True, exist_ok=True)
    return {
        "applications": str(folder / "websites"), "tasks_folder": str(folder / "tasks"),
        "command": [sys.executable, str(SERVER), "{port}"], "save_seconds": 0.6, "settle_seconds": 0.05, **more,
    }  # fmt: skip
