"""OSWorld's evaluators in a process of their own, in a virtual environment of their own (Python 3.12, osworld-cube).

This file is run by that environment's interpreter, so it imports nothing of dart. It reads one JSON object per line
and answers each with one, under the same `id`:

- `check`: can this environment grade the task? Answers {} or {"not_evaluated": why}.
- `step`: carry out one set-up step by OSWorld's own code. Answers {}, {"machine_lost": why} or {"not_evaluated": why}.
- `evaluate`: `postconfig`, getters and metrics. Answers {"reward": number, "error": text or ""}, or as above.

OSWorld's code turns a machine that has died, an address that does not answer and a package that is missing into a
reward of 0. Here all requests go through `Watch`, which ends the evaluation when the machine does not answer, and
remembers addresses outside that failed. What OSWorld's code raises by itself is a reward of 0 with `error`: the policy
has left something that the metric cannot read.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict
from urllib.parse import urlsplit

REQUEST_SECONDS, TRIES, PAUSE_SECONDS = 180.0, 3, 2.0
MOST_TEXT = 4000
PASSING = (408, 425, 429)
"""Statuses below 500 that say "not now"."""
PACKAGE = "osworld_cube.vm_backend"
READS = ("/file", "/screen_size", "/window_size", "/desktop_path", "/list_directory")
_ORIGINAL: dict[str, type] = {}


class MachineLost(BaseException):
    """The machine, or an address that the task needs, does not answer now. Not an Exception: OSWorld's getters catch
    those and carry on without a result."""


class NotEvaluated(Exception):
    """The task has no result here."""


class Machine(TypedDict):
    host: str
    server: int
    chromium: int
    vlc: int


class Step(TypedDict):
    type: str
    parameters: dict[str, object]


class Getter(TypedDict):
    type: str


class Evaluator(TypedDict):
    func: str | list[str]
    result: NotRequired[Getter | list[Getter | None] | None]
    expected: NotRequired[Getter | list[Getter | None] | None]


class Asked(TypedDict):
    """One line of standard input; `check` and `step` use only some of it."""

    id: int
    op: str
    evaluator: Evaluator
    step: Step
    last: str
    machine: Machine
    cache: str
    screen: list[int]
    password: str


Answer = dict[str, object]


class Watch:
    """Stands between `requests` and the network while one machine is graded."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        requests = importlib.import_module("requests")
        self._errors = (requests.exceptions.ConnectionError, requests.exceptions.Timeout)
        self._session, self._send = requests.Session, requests.Session.send
        self.lost = ""
        self.failed: dict[str, str] = {}
        """Addresses outside that failed, and why."""
        self.away: dict[str, str] = {}
        """Those of them that may answer later: the network or the server has a bad moment, or it wants a pause."""

    def __enter__(self) -> Watch:
        self._session.send = lambda session, request, **options: self._sent(session, request, options)
        return self

    def __exit__(self, *_: object) -> None:
        self._session.send = self._send

    def _sent(self, session: object, request: Any, options: dict[str, object]) -> Any:
        if options.get("timeout") is None:
            options["timeout"] = REQUEST_SECONDS
        parts = urlsplit(request.url)
        ports = (self._machine["server"], self._machine["chromium"], self._machine["vlc"])
        if parts.hostname == self._machine["host"].lower() and parts.port in ports:
            return self._to_machine(session, request, options, parts.path, parts.port == ports[0])
        try:
            answer = self._send(session, request, **options)
        except self._errors as error:
            self.failed[request.url] = self.away[request.url] = f"{type(error).__name__}: {error}"
            raise
        self.failed.pop(request.url, None)
        self.away.pop(request.url, None)
        if answer.status_code >= 400:
            self.failed[request.url] = f"HTTP {answer.status_code}"
        if answer.status_code >= 500 or answer.status_code in PASSING:
            self.away[request.url] = f"HTTP {answer.status_code}"
        return answer

    def without_result(self) -> None:
        """Raises NotEvaluated or MachineLost if an address outside has failed: then there is no result."""
        if self.failed.keys() - self.away.keys():
            raise NotEvaluated(_told(self.failed))
        if self.away:
            raise MachineLost(_told(self.away))

    def _to_machine(self, session: object, request: Any, options: dict[str, object], path: str, server: bool) -> Any:
        """Requests that only read are tried again; none that runs a program is. No proxies: machines are on a network
        of one's own."""
        options["proxies"] = {}
        if self.lost:
            raise MachineLost(self.lost)
        reads = request.method == "GET" or path in READS
        for left in reversed(range(TRIES if reads else 1)):
            try:
                return self._send(session, request, **options)
            except self._errors as error:
                if not server:  # Chromium or VLC: the policy may have closed it
                    raise
                if not left:
                    self.lost = f"{request.method} {request.url} failed: {type(error).__name__}: {error}"
                    raise MachineLost(self.lost) from None
            time.sleep(PAUSE_SECONDS)


def guest(host: str, port: int) -> object:
    """OSWorld's client of the machine, except that programs are run once: its own runs them three times on failures."""
    requests = importlib.import_module("requests")
    module = importlib.import_module("cube_computer_tool.guest_agent")
    agent = module.GuestAgent(host, port)

    def posted(route: str, asked: dict[str, object], seconds: float = REQUEST_SECONDS) -> Any:
        return requests.post(f"http://{host}:{port}{route}", json=asked, timeout=seconds)

    def execute_python_command(command: str) -> object:
        program = module._PYAUTOGUI_PREFIX.format(command=command)
        answer = posted("/execute", {"command": ["python", "-c", program], "shell": False})
        return answer.json() if answer.status_code == 200 else None

    def run_python_script(script: str) -> object:
        answer = posted("/run_python", {"code": script})
        failed = {"status": "error", "message": answer.text, "output": "", "error": answer.text}
        return answer.json() if answer.status_code == 200 else failed

    def run_bash_script(script: str, timeout: int = 30, working_dir: str | None = None) -> object:
        asked = {"script": script, "timeout": timeout, "working_dir": working_dir}
        answer = posted("/run_bash_script", asked, timeout + 100)
        failed = {"status": "error", "output": "", "error": answer.text, "returncode": -1}
        return answer.json() if answer.status_code == 200 else failed

    for once in (execute_python_command, run_python_script, run_bash_script):
        setattr(agent, once.__name__, once)
    return agent


def setup_controller(asked: Asked) -> Callable[..., Any]:
    """OSWorld's SetupController with the password and the screen of this run, which its evaluator does not pass."""
    module = importlib.import_module(f"{PACKAGE}.setup_controller")
    original = _ORIGINAL.setdefault("SetupController", module.SetupController)
    width, height = asked["screen"]
    fixed = {"client_password": asked["password"], "screen_width": width, "screen_height": height}

    def made(*positional: object, **named: object) -> Any:
        return original(*positional, **{**named, **fixed})

    module.__dict__["SetupController"] = made
    return made


# ---- what is asked ----


def check(asked: Asked) -> Answer:
    evaluator = asked["evaluator"]
    functions = evaluator["func"]
    for name in functions if isinstance(functions, list) else [functions]:
        _find("metrics", name)
    for wanted in (evaluator.get("result"), evaluator.get("expected")):
        for getter in wanted if isinstance(wanted, list) else [wanted]:
            if getter:
                _find("getters", f"get_{getter['type']}")
    return {}


def _find(package: str, name: str) -> None:
    """Import what defines the name. Raises NotEvaluated with the packages that are missing."""
    missing = []
    for module in importlib.import_module(f"{PACKAGE}.{package}").__dict__["_SUBMODULES"]:
        try:
            if hasattr(importlib.import_module(f"{PACKAGE}.{package}.{module}"), name):
                return
        except ImportError as error:
            missing.append(f"{module}: {error}")
    if name != "infeasible":
        why = f" ({'; '.join(missing)}: install what is missing in the evaluators' environment)" if missing else ""
        raise NotEvaluated(f"OSWorld's {package} have no {name} here{why}")


def step(asked: Asked) -> Answer:
    machine = asked["machine"]
    Path(asked["cache"]).mkdir(parents=True, exist_ok=True)
    with Watch(machine) as watch:
        controller = setup_controller(asked)(
            guest=guest(machine["host"], machine["server"]),
            chromium_port=machine["chromium"], vlc_port=machine["vlc"], cache_dir=asked["cache"],
        )  # fmt: skip
        try:
            getattr(controller, f"_{asked['step']['type']}_setup")(**asked["step"]["parameters"])
        except Exception as error:
            watch.without_result()
            raise MachineLost(f"{type(error).__name__}: {error}") from error
    return {}


def evaluate(asked: Asked) -> Answer:
    check(asked)
    setup_controller(asked)
    machine, cache = asked["machine"], Path(asked["cache"])
    evaluator = importlib.import_module(f"{PACKAGE}.evaluator").Evaluator(
        guest(machine["host"], machine["server"]), cache.parent, machine["chromium"], machine["vlc"],
        machine["server"], machine["host"],
    )  # fmt: skip
    error = ""
    with Watch(machine) as watch:
        try:
            task = {"id": cache.name, "evaluator": asked["evaluator"]}
            reward = float(evaluator.evaluate(task, [asked["last"]] if asked["last"] else []))
        except ImportError as missing:
            raise NotEvaluated(f"{missing}: install it in the evaluators' environment") from missing
        except Exception:  # noqa: BLE001  whatever a metric raises
            reward, error = 0.0, traceback.format_exc()[-MOST_TEXT:]
        if watch.lost:
            raise MachineLost(watch.lost)
        if reward < 1:
            watch.without_result()
    return {"reward": min(max(reward, 0.0), 1.0), "error": error}


def _told(failed: dict[str, str]) -> str:
    return "; ".join(f"{url} does not answer: {why}" for url, why in failed.items())


def main() -> None:
    """Answer until standard input closes. What OSWorld's code prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    verbs = {"check": check, "step": step, "evaluate": evaluate}
    for line in sys.stdin:
        asked: Asked = json.loads(line)
        try:
            answer = verbs[asked["op"]](asked)
        except MachineLost as error:
            answer = {"machine_lost": str(error)}
        except NotEvaluated as error:
            answer = {"not_evaluated": str(error)}
        except Exception:  # noqa: BLE001  the worker is told, and goes on
            answer = {"broken": traceback.format_exc()[-MOST_TEXT:]}
        answers.write(json.dumps({"id": asked["id"], **answer}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
