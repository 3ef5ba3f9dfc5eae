"""`dart serve-world`: our own client conforms against it, OpenEnv's client can use it, and nobody else may."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from dart.commands import serve_world
from dart.config import load
from dart.testing import conform
from dart.v1 import session_pb2 as pb
from dart.wire.role import Command, CommandError, Reply
from dart.workers.env.openenv.world import OpenEnv, OpenEnvOptions
from dart.worlds import Click, EnvironmentFailure, Full, Keys, Observe, Point, Task, UserError

ROOT = Path(__file__).parents[2]
LADDER = ROOT / "configs" / "ladder_cpu.yaml"
WORLD = """
from dataclasses import replace
from dart.worlds import Click, Keys, Observation, SyncEnv, UserError, Verdict, from_pixels

class Halves(SyncEnv):
    @classmethod
    def check_task(cls, name):
        if name not in ("left", "right", "album", "closed"):
            raise UserError(f"environment.tasks.names: there is no task {name}: use left or right")
    def reset(self, task):
        self.task, self.hit = task.name, None
        if task.name == "closed":
            raise UserError("the shop is closed")
        seen = self.look(f"Click on the {task.name} half.")
        return replace(seen, goal_images=(seen.image,)) if task.name == "album" else seen
    def act(self, action):
        if isinstance(action, Keys):
            return replace(self.look(), accessibility_tree="two halves", last_action_error="there is no keyboard")
        if isinstance(action, Click) and action.at:
            if action.button == "middle":
                raise RuntimeError("it broke")
            self.hit = "left" if action.at.x < 0.5 else "right"
        return self.look()
    def judge(self, last, at_limit):
        return Verdict(float(self.hit == self.task), {"hit": self.hit, "at_limit": at_limit})
    def look(self, instruction=""):
        w, h = self.screen
        return Observation(from_pixels(bytes(w * h * 3), w, h), instruction, done=self.hit is not None)

class Forbidden(Halves):
    def __init__(self, options, screen):
        raise UserError("there is no quota for another environment: buy one")
"""


@contextmanager
def served(
    folder: Path, config: Path, *arguments: str, **environment: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address at which a `dart serve-world` serves, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dart", "serve-world", str(config), "--port", "0", *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said = ""
        while not (found := re.search(r"at (http://\S+):", said)):
            line = process.stdout.readline()
            assert line, f"it ended: {said}"
            said += line
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose world is a file beside it."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "halves_world.py").write_text(WORLD)
    raw: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "miniwob_cpu.yaml").read_text())
    tasks = {"names": ["left", "right"]}
    raw["environment"] = {"kind": "halves_world:Halves", "viewport": [64, 32], "slots": 3, "tasks": tasks}
    (folder / "halves.yaml").write_text(yaml.safe_dump(raw))
    return folder / "halves.yaml"


@pytest.fixture(scope="module")
def address(config: Path) -> Iterator[str]:
    with served(config.parent, config) as (url, _):
        yield url


def opened(url: str, **options: Any) -> ClientConnection:
    return connect(f"{url.replace('http', 'ws')}/ws", proxy=None, **options)


def ask(socket: ClientConnection, kind: str, data: Any = None) -> dict[str, Any]:
    socket.send(json.dumps({"type": kind} | ({} if data is None else {"data": data})))
    answer: dict[str, Any] = json.loads(socket.recv())
    return answer


def test_the_round_trip_conforms(address: str) -> None:
    conform("openenv", "left", "right", options={"url": address}, screen=(64, 32))


async def test_other_sessions_do_not_wait_for_the_check_of_a_task(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away:
        async def handle(self, command: Command) -> Reply | None:
            raise CommandError(pb.FAILURE_CODE_ENVIRONMENT, "away")

    checked_on: list[int] = []
    monkeypatch.setattr(serve_world, "check", lambda *_: checked_on.append(threading.get_ident()))
    session = serve_world.Session(Away(), load(config, ()).environment, "one")  # type: ignore[arg-type]
    answer = await session.answer('{"type": "reset"}')
    assert answer == {"type": "error", "data": {"message": "away", "code": "EXECUTION_ERROR"}}
    assert checked_on and threading.get_ident() not in checked_on


@pytest.mark.browser
def test_the_round_trip_of_the_ladder_conforms(tmp_path: Path) -> None:
    with served(tmp_path, LADDER, "--set", "environment.slots=2") as (url, _):
        conform("openenv", "ladder-easy-01", "ladder-hard-01", options={"url": url}, screen=(96, 96))


def test_an_episode_has_instruction_screenshot_reward_and_evidence(address: str) -> None:
    with opened(address) as socket:
        data = ask(socket, "reset", {"task": "right", "seed": 5, "episode_id": "mine"})["data"]
        seen = data["observation"]
        assert base64.b64decode(seen["screenshot"]).startswith(b"\x89PNG")
        assert (seen["instruction"], seen["task"], seen["seed"]) == ("Click on the right half.", "right", 5)
        assert (seen["width"], seen["height"], data["reward"], data["done"]) == (64, 32, None, False)
        assert ask(socket, "state")["data"]["episode_id"] == "mine"
        click = {"kind": "click", "at": {"x": 0.75, "y": 0.5}, "metadata": {}}
        data = ask(socket, "step", click)["data"]
        assert (data["reward"], data["done"]) == (1.0, True)
        assert data["observation"]["evidence"] == {"hit": "right", "at_limit": False}
        assert ask(socket, "step", click)["data"]["message"] == "no episode is running: send reset first"
        data = ask(socket, "reset")["data"]
        assert (data["observation"]["task"], data["done"]) == ("left", False), "the first task, if none is named"
        data = ask(socket, "step", {"kind": "observe", "last": True})["data"]
        assert (data["reward"], data["observation"]["evidence"]["at_limit"]) == (0.0, True)


async def test_what_the_world_tells_beside_the_screenshot_reaches_the_client(address: str) -> None:
    world = OpenEnv()
    await world.start(OpenEnvOptions(url=address), (64, 32))
    env = await world.lease()
    assert not (await env.reset(Task("openenv", "left", 1))).last_action_error
    seen = await env.act(Keys(("a",)))
    assert (seen.accessibility_tree, seen.last_action_error) == ("two halves", "there is no keyboard")
    with pytest.raises(UserError, match="refuses the task: the shop is closed"):
        await env.reset(Task("openenv", "closed", 1))
    await world.close()


@pytest.mark.parametrize(
    ("kind", "data", "code", "message"),
    [
        ("reset", {"task": "album"}, "TASK_REFUSED", "task album: its instruction has 1 pictures"),
        ("reset", {"task": "closed"}, "TASK_REFUSED", "the shop is closed"),
        ("reset", {"task": "up"}, "TASK_REFUSED", "there is no task up: use left or right"),
        ("reset", {"seed": -1}, "VALIDATION_ERROR", "seed: "),
        ("reset", {"seed": 2**64}, "VALIDATION_ERROR", "seed: "),
        ("reset", {"level": 1}, "VALIDATION_ERROR", "level: "),
        ("step", {"kind": "scroll", "at": None, "dy": 10**12}, "VALIDATION_ERROR", "scroll: Value out of range: 10000"),
        ("step", {"kind": "click", "at": None, "count": -1}, "VALIDATION_ERROR", "action click: Value out of range"),
        ("step", {"kind": "clack"}, "VALIDATION_ERROR", "action kind 'clack' is unknown"),
        ("step", {"kind": "click", "at": {"x": 2, "y": 0}}, "VALIDATION_ERROR", "outside the observation"),
        ("step", {"kind": "observe", "last": 1}, "VALIDATION_ERROR", "last is 1"),
        ("step", {"kind": "click", "at": {"x": 0.1, "y": 0}, "button": "middle"}, "EXECUTION_ERROR", "it broke"),
        ("leap", {}, "UNKNOWN_TYPE", "'leap' is not reset, step, state or close"),
    ],
)
def test_what_cannot_be_done_is_an_error_and_the_session_goes_on(
    address: str, kind: str, data: Any, code: str, message: str
) -> None:
    with opened(address) as socket:
        ask(socket, "reset")
        answer = ask(socket, kind, data)
        assert (answer["type"], answer["data"]["code"]) == ("error", code)
        assert message in answer["data"]["message"]
        socket.send("{")
        assert json.loads(socket.recv())["data"]["code"] == "INVALID_JSON"
        assert ask(socket, "reset")["type"] == "observation"


async def test_sessions_are_bounded_and_their_environments_are_used_again(address: str) -> None:
    world = OpenEnv()
    await world.start(OpenEnvOptions(url=address), (64, 32))
    for _ in range(2):
        envs = [await world.lease() for _ in range(3)]
        for env in envs:
            assert (await env.reset(Task("openenv", "left", 1))).instruction
        with pytest.raises(Full, match="all 3 sessions are in use"):
            await world.lease()
        assert (await envs[0].act(Click(Point(0.1, 0.1)))).done
        assert (await envs[0].judge(Observe(), False)).reward == 1.0
        for env in envs:
            await world.dispose(env)
        for _ in range(100):  # a session that ends is counted until the server has noticed
            if health(address)["sessions"] == 0:
                break
            await asyncio.sleep(0.05)
    await world.close()


def health(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/health") as answer:
        said: dict[str, Any] = json.load(answer)
    return said


def test_it_says_what_it_is(address: str) -> None:
    assert health(address)["status"] == "healthy"
    with urllib.request.urlopen(f"{address}/metadata") as answer:
        assert json.load(answer)["name"] == "halves_world:Halves"
    with urllib.request.urlopen(f"{address}/schema") as answer:
        assert "click" in json.load(answer)["action"]["properties"]["kind"]["enum"]


def test_a_page_in_a_browser_gets_no_session(address: str) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        opened(address, origin="http://evil.example")


async def test_a_token_is_required_where_there_is_one(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(config.parent, config, DART_TOKEN="secret") as (url, _):
        with pytest.raises(InvalidStatus, match="403"):
            opened(url)
        monkeypatch.setenv("OE_TOKEN", "secret")
        world = OpenEnv()
        await world.start(OpenEnvOptions(url=url, token="env:OE_TOKEN"), (64, 32))
        env = await world.lease()
        assert (await env.reset(Task("openenv", "left", 1))).instruction == "Click on the left half."
        monkeypatch.setenv("OE_TOKEN", "guessed")
        with pytest.raises(EnvironmentFailure, match="cannot be reached"):
            await world.lease()
        await world.close()


def test_a_task_with_one_instance_is_reset_to_it(config: Path) -> None:
    single = ("--set", "environment.tasks.single_instance=[left]")
    with served(config.parent, config, *single) as (url, _), opened(url) as socket:
        assert ask(socket, "reset", {"task": "left"})["data"]["observation"]["seed"] == 0
        assert ask(socket, "reset", {"task": "left", "seed": 7})["data"]["observation"]["seed"] == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_sessions_open(config: Path, number: int) -> None:
    with served(config.parent, config) as (url, process), opened(url) as socket:
        ask(socket, "reset")
        process.send_signal(number)
        with pytest.raises(ConnectionClosed):
            socket.recv()
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "environment.tasks.names=[up]"], "there is no task up"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to the network: set DART_TOKEN"),
        (["--set", "environment.kind=none_such:World"], "module none_such cannot be imported"),
        (["--set", "environment.kind=halves_world:Forbidden"], "there is no quota for another environment: buy one"),
    ],
)
def test_what_cannot_be_served_is_one_message(config: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dart", "serve-world", str(config), "--port", "0", *arguments], cwd=config.parent,
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr


async def test_openenvs_own_client_can_use_it(address: str) -> None:
    module = pytest.importorskip("openenv.core.generic_client", reason="needs openenv-core (450 MB with Gradio)")
    async with module.GenericEnvClient(base_url=address) as env:
        first = await env.reset(task="right", seed=3)
        assert base64.b64decode(first.observation["screenshot"]).startswith(b"\x89PNG")
        assert (first.reward, first.done) == (None, False)
        assert (await env.state())["step_count"] == 0
        last = await env.step({"kind": "click", "at": {"x": 0.9, "y": 0.5}})
        assert (last.reward, last.done) == (1.0, True)
        with pytest.raises(RuntimeError, match="no episode is running"):
            await env.step({"kind": "observe"})
