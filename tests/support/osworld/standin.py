"""A stand-in for the environment with OSWorld's evaluators, and a folder of tasks, for tests without osworld-cube.

It has the modules and names that `evaluator_process` uses, with a few metrics and getters of its own. Its getters are
as careless as OSWorld's: they catch every Exception. DART_OSWORLD_EVALUATORS names a real environment, which
`test_osworld_published_evaluators` uses.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

_AGENT = """
    import requests
    _PYAUTOGUI_PREFIX = "import pyautogui; import time; pyautogui.FAILSAFE = False; {command}"

    class GuestAgent:
        def __init__(self, host, port):
            self.host, self._base_url = host, f"http://{host}:{port}"

        def get_file(self, path):
            for _ in range(3):
                try:
                    answer = requests.post(self._base_url + "/file", data={"file_path": path})
                    return answer.content if answer.status_code == 200 else None
                except Exception:
                    pass
            return None
"""
_EVALUATOR = """
    import importlib
    from osworld_cube.vm_backend import getters, metrics

    class Proxy:
        pass

    class Evaluator:
        def __init__(self, guest, cache, chromium, vlc, server, ip):
            self.env = Proxy()
            self.env.controller, self.env.vm_ip, self.env.server_port = guest, ip, server

        def evaluate(self, task, history):
            evaluator = task["evaluator"]
            for step in evaluator.get("postconfig", []):
                from osworld_cube.vm_backend.setup_controller import SetupController
                SetupController(guest=self.env.controller).setup([step])
            if evaluator["func"] == "infeasible":
                return float(history[-1:] == ["FAIL"])
            if history[-1:] == ["FAIL"]:
                return 0.0
            got = getattr(getters, "get_" + evaluator["result"]["type"])(self.env, evaluator["result"])
            expected = evaluator["expected"]
            return float(getattr(metrics, evaluator["func"])(
                got, getattr(getters, "get_" + expected["type"])(self.env, expected)))
"""
_METRICS = """
    def exact_match(got, expected):
        return float(got == expected)

    def first_line(got, expected):
        return float(got.splitlines()[0] == expected)
"""
_GETTERS = """
    import requests

    def get_vm_file(env, config):
        try:
            content = env.controller.get_file(config["path"])
            return content.decode() if content is not None else None
        except Exception:
            return None

    def get_rule(env, config):
        return config["rules"]

    def get_cloud_file(env, config):
        try:
            answer = requests.get(config["path"], timeout=5)
            return answer.text
        except Exception:
            return None
"""
_LAZY = """
    import importlib

    _SUBMODULES = {modules}

    def __getattr__(name):
        for module in _SUBMODULES:
            try:
                found = importlib.import_module("." + module, __package__)
            except ImportError:
                continue
            if hasattr(found, name):
                return getattr(found, name)
        raise AttributeError(name)
"""
_SETUP = """
    import requests

    class SetupController:
        def __init__(self, guest, chromium_port=0, vlc_port=0, cache_dir="", client_password="", screen_width=0,
                     screen_height=0):
            self.guest, self.words = guest, f"{client_password} {screen_width}x{screen_height}"

        def setup(self, config):
            for step in config:
                getattr(self, f"_{step['type']}_setup")(**step["parameters"])

        def _execute_setup(self, command, **_):
            requests.post(self.guest._base_url + "/setup/execute", json={"command": command})

        def _chrome_open_tabs_setup(self, urls_to_open):
            requests.post(self.guest._base_url + "/setup/launch", json={"command": [*urls_to_open, self.words]})
"""
_FILES = {
    "cube_computer_tool/__init__.py": "",
    "cube_computer_tool/guest_agent.py": _AGENT,
    "osworld_cube/__init__.py": "",
    "osworld_cube/vm_backend/__init__.py": "",
    "osworld_cube/vm_backend/evaluator.py": _EVALUATOR,
    "osworld_cube/vm_backend/setup_controller.py": _SETUP,
    "osworld_cube/vm_backend/metrics/__init__.py": _LAZY.format(modules=("general", "docs")),
    "osworld_cube/vm_backend/metrics/general.py": _METRICS,
    "osworld_cube/vm_backend/metrics/docs.py": "import easyocr_that_is_missing\n\ndef compare(got, expected): ...",
    "osworld_cube/vm_backend/getters/__init__.py": _LAZY.format(modules=("general",)),
    "osworld_cube/vm_backend/getters/general.py": _GETTERS,
    "osworld_cube-0.3.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: osworld-cube\nVersion: 0.3.0\n",
}


def environment(folder: Path) -> Path:
    """The stand-in, as a folder for `environment.options.evaluators`."""
    for name, words in _FILES.items():
        path = folder / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(words))
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder / "packages"}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


def tasks(folder: Path, **more: dict[str, object]) -> Path:
    """A folder of tasks, `os/NAME`: `write`, `refuse` and those in `more`."""
    rule = {"type": "rule", "rules": "hello"}
    result = {"type": "vm_file", "path": "/tmp/note", "dest": "note"}
    made: dict[str, dict[str, object]] = {
        "write": {"evaluator": {"func": "exact_match", "result": result, "expected": rule}},
        "refuse": {"evaluator": {"func": "infeasible"}},
        **more,
    }
    for name, task in made.items():
        path = folder / "os" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"id": name, "instruction": f"Do {name}.", "config": [], **task}))
    return folder
