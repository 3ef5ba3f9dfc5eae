"""A server with the routes and payloads of AndroidWorld's `server/android_server.py`, for tasks on a `daemon.Device`.

Like the published one it has one device, one suite and no sessions; a task that raises is an error 500. An instance's
parameters come from the seed by AndroidWorld's own rule. It touches its device with adb, as AndroidWorld does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import socket
import subprocess
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

WORDS = ("red", "green", "blue", "white", "black", "grey", "pink", "brown")


class Instance:
    """One task with its parameters. Each template does what its name says."""

    def __init__(self, name: str, seed: int, serial: str) -> None:
        self.name, self.serial, self.initialized = name, serial, False
        self.word = random.Random(seed).choice(WORDS)

    @property
    def template(self) -> str:
        return {"SayWord": "What comes after {word}? Answer it twice."}.get(self.name, "Switch demo on for {word}.")

    @property
    def goal(self) -> str:
        return self.template.format(word=self.word)

    def shell(self, command: str) -> str:
        done = subprocess.run(["adb", "-s", self.serial, "shell", command], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def initialize_task(self) -> None:
        if self.initialized:
            raise RuntimeError("initialize_task() is already called.")
        self.initialized = True
        if self.name == "CannotBegin":
            raise RuntimeError("no snapshot")
        self.shell("settings put global demo 0")

    def is_successful(self, said: str) -> float:
        if not self.initialized:
            raise RuntimeError("initialize_task() must be called")
        if self.name == "CannotGrade":
            raise KeyError("playing_queue")
        if self.name == "SayWord":
            return float(said == f"{self.word} {self.word}")
        if self.name == "HalfDone":
            return 0.5
        return float(self.shell("settings get global demo") == "1")

    def tear_down(self) -> None:
        self.shell("settings put global demo 0")
        self.initialized = False


FAMILY = {"android_world": ("CannotBegin", "CannotGrade", "HalfDone", "SayWord", "SwitchOn"), "android": ("SwitchOn",)}


class Server:
    def __init__(self, serial: str, log: Path) -> None:
        self.serial, self.log, self.said = serial, log, ""
        self.make("android_world", 2, 42)

    def make(self, family: str, count: int, seed: int) -> None:
        def instance_seed(name: str, index: int) -> int:
            return int(hashlib.sha256(f"{seed}_{name}_{index}".encode()).hexdigest(), 16) % 2**32

        self.suite = {
            name: [Instance(name, instance_seed(name, index), self.serial) for index in range(count)]
            for name in FAMILY[family]
        }

    def instance(self, request: Request) -> Instance:
        given = request.query_params
        return self.suite[given["task_type"]][int(given["task_idx"])]

    def note(self, request: Request, body: object = None) -> None:
        with self.log.open("a") as out:
            out.write(json.dumps([request.url.path, dict(request.query_params), body]) + "\n")

    def app(self) -> Starlette:
        routes = [
            ("POST", "/reset"), ("POST", "/execute_action"), ("GET", "/suite/task_list"), ("GET", "/suite/task_length"),
            ("GET", "/suite/reinitialize"), ("POST", "/task/initialize"), ("POST", "/task/tear_down"),
            ("GET", "/task/score"), ("GET", "/task/goal"), ("GET", "/health"),
        ]  # fmt: skip
        return Starlette(
            routes=[
                Route(path, self.answer(getattr(self, path[1:].replace("/", "_"))), methods=[method])
                for method, path in routes
            ]
        )

    def answer(self, route):  # type: ignore[no-untyped-def]
        async def answered(request: Request) -> Response:
            body = await request.json() if request.method == "POST" and await request.body() else None
            self.note(request, body)
            # What raises is an error 500, after which the connection is closed, here as there.
            return JSONResponse(route(request, body) or {"status": "success", "message": "Done."})

        return answered

    def reset(self, request: Request, body: object) -> None:
        self.said = ""
        if request.query_params["go_home"].lower() == "true":
            subprocess.run(["adb", "-s", self.serial, "shell", "input keyevent KEYCODE_HOME"], check=True)

    def execute_action(self, request: Request, body: dict[str, str]) -> None:
        match body["action_type"]:
            case "answer":
                self.said = body["text"]
            case "open_app" if body["app_name"].lower() == "notes":
                package = "com.example.notes"
                subprocess.run(["adb", "-s", self.serial, "shell", f"monkey -p {package} 1"], check=True)
            case "open_app":
                pass  # AndroidWorld takes a name that it does not know for a package, and does not look whether it is
            case other:
                raise RuntimeError(f"Invalid action type: {other}")

    def suite_task_list(self, request: Request, body: object) -> dict[str, list[str]]:
        most = int(request.query_params["max_index"])
        names = list(self.suite)
        return {"task_list": names if most > len(names) or most < 0 else names[:most]}

    def suite_task_length(self, request: Request, body: object) -> dict[str, int]:
        return {"length": len(self.suite[request.query_params["task_type"]])}

    def suite_reinitialize(self, request: Request, body: object) -> None:
        given = request.query_params
        self.make(
            given.get("task_family", "android_world"),
            int(given.get("n_task_combinations", 2)),
            int(given.get("seed", 42)),
        )

    def task_initialize(self, request: Request, body: object) -> None:
        self.said = ""
        self.instance(request).initialize_task()

    def task_tear_down(self, request: Request, body: object) -> None:
        self.instance(request).tear_down()

    def task_score(self, request: Request, body: object) -> dict[str, float]:
        return {"score": self.instance(request).is_successful(self.said)}

    def task_goal(self, request: Request, body: object) -> dict[str, str]:
        return {"goal": self.instance(request).goal}

    def health(self, request: Request, body: object) -> dict[str, str]:
        return {"status": "success"}


class AndroidWorld:
    """The process of one server. Use it as a context manager."""

    def __init__(self, folder: Path, serial: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.serial = folder / "requests.jsonl", serial
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.serial, str(self.log), str(self.port)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> AndroidWorld:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def requests(self) -> list[tuple[str, dict[str, str], object]]:
        """Path, parameters and body of all requests."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def main(arguments: argparse.Namespace) -> None:
    listening = socket.create_server(("127.0.0.1", arguments.port))
    print("ready", flush=True)
    server = Server(arguments.serial, Path(arguments.log))
    uvicorn.Server(uvicorn.Config(server.app(), log_level="critical")).run([listening])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("serial")
    parser.add_argument("log")
    parser.add_argument("port", type=int)
    main(parser.parse_args())
