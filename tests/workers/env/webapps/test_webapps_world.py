"""The world on a real application with a real browser: episodes, sessions, and applications that die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import psutil
import pytest
from webapps.todo_tasks import ADD_MILK, SETUP, bundle, options

from dart.core.action import Click, Finish, Keys, Observe, Point, TypeText
from dart.core.types import Task
from dart.errors import UserError
from dart.testing import conform
from dart.workers.env.webapps import programs
from dart.workers.env.webapps.environment import WebAppEnv
from dart.workers.env.webapps.options import WebAppsOptions
from dart.workers.env.webapps.servers import Server, Servers
from dart.workers.env.webapps.world import WebApps
from dart.worlds import EnvironmentFailure, limited
from dart.worlds.plugs import check

pytestmark = pytest.mark.browser
SCREEN = (240, 200)
BOX, TICK = Click(Point(60 / 240, 20 / 200)), Click(Point(16 / 240, 50 / 200))
GONE_SECONDS = 60.0
"""A hang guard."""


@asynccontextmanager
async def leased(given: dict[str, object], count: int = 1) -> AsyncIterator[list[WebAppEnv]]:
    world = WebApps()
    try:
        await world.start(WebAppsOptions.model_validate(given), SCREEN)
        yield [env for _ in range(count) if isinstance(env := await world.lease(), WebAppEnv)]
    finally:
        await world.close()


def task(name: str) -> Task:
    return Task("webapps", name, 1)


def server(env: WebAppEnv) -> Server:
    assert env.session is not None
    return env.session.server


def process(env: WebAppEnv) -> psutil.Process:
    return psutil.Process(server(env)._pid)


async def add(env: WebAppEnv, text: str) -> None:
    for action in (BOX, TypeText(text), Keys(("Return",))):
        await env.act(action)


def test_it_conforms(tmp_path: Path) -> None:
    conform("webapps", "add-milk", "tick-bread", options=options(tmp_path), screen=SCREEN)


async def test_what_the_policy_does_earns_the_tasks_reward_and_is_the_evidence(tmp_path: Path) -> None:
    async with leased(options(tmp_path)) as [env]:
        first = await env.reset(task("add-milk"))
        assert first.instruction == "Do add-milk."
        assert await env.page.evaluate("location.search") == f"?sid={env.session.sid}&view=all"  # type: ignore[union-attr]
        await add(env, "Milk")
        verdict = await env.judge(Finish(), False)
        assert verdict.reward == 1.0
        evidence = json.loads(verdict.evidence_json())
        assert evidence["difference"]["todos"]["modified"][1]["text"] == "Milk"
        assert evidence["application"] == "todo_mock"
        assert evidence["reward_said"].startswith("PASS ['Buy bread', 'Milk']")
        await env.reset(task("tick-bread"))
        await env.conclude(TICK)
        assert (await env.judge(TICK, True)).reward == 0.5
        await env.reset(task("add-milk"))
        verdict = await env.judge(Finish("fail"), False)
        assert (verdict.reward, await env.probe()) == (0.0, True)
        assert "FAIL ['Buy bread']" in str(verdict.evidence["reward_said"])


async def test_episodes_share_an_application_and_nothing_else(tmp_path: Path) -> None:
    async with leased(options(tmp_path), 3) as envs:
        await asyncio.gather(*(env.reset(task("add-milk")) for env in envs))
        one, other, _ = envs
        assert len({server(env)._pid for env in envs}) == 1
        assert len({env.session.sid for env in envs if env.session}) == 3
        await add(one, "Milk")
        verdicts = await asyncio.gather(*(env.judge(Finish(), False) for env in envs))
        assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0]
        await one.page.evaluate("localStorage.mine = 1")
        folder, ended = server(one).folder, one.session
        assert await one.renew()
        assert ended is not None
        assert not list(folder.glob(f"run/.mock-states/{ended.sid}*")), "the ended session's state is kept"
        assert len(list(folder.glob("episode-*"))) == 2, "the server may live for days"
        await one.reset(task("add-milk"))
        assert await one.page.evaluate("localStorage.mine") is None
        assert await other.page.evaluate("localStorage.mine") is None


async def test_its_page_reaches_nothing_but_the_application(tmp_path: Path) -> None:
    other = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    asked = "fetch('http://127.0.0.1:%d/', {mode: 'no-cors'}).then(() => 'answered', () => 'blocked')"
    try:
        async with leased(options(tmp_path)) as [env]:
            await env.reset(task("add-milk"))
            assert await env.page.evaluate(asked % server(env).port, wait=True) == "answered"
            assert await env.page.evaluate(asked % other.server_port, wait=True) == "blocked"
    finally:
        other.shutdown()
        other.server_close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_application_that_dies_or_hangs_is_no_reward_of_0(tmp_path: Path, number: signal.Signals) -> None:
    async with leased(options(tmp_path, answer_seconds=5.0), 2) as [env, other]:
        await env.reset(task("add-milk"))
        await other.reset(task("add-milk"))
        dead = process(env)
        dead.send_signal(number)
        if number == signal.SIGKILL:
            while server(env).alive():
                await asyncio.sleep(0.02)
            with pytest.raises(EnvironmentFailure, match="todo_mock died during the episode"):
                await env.act(Observe())
        with pytest.raises(EnvironmentFailure, match=r"the application todo_mock (has died|does not answer)"):
            await env.judge(Finish(), False)
        assert not await other.probe()
        for one in (env, other):
            assert await one.renew()
            await one.reset(task("add-milk"))
        assert server(env) is server(other)
        assert server(env)._pid != dead.pid
        dead_for_good(dead)
        await add(env, "Milk")
        assert (await env.judge(Finish(), False)).reward == 1.0


def dead_for_good(one: psutil.Process) -> None:
    began = time.monotonic()
    with contextlib.suppress(psutil.NoSuchProcess):
        while one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - began < GONE_SECONDS
            time.sleep(0.02)


async def test_applications_that_no_episode_uses_make_room(tmp_path: Path) -> None:
    given = options(tmp_path, most_applications=1)
    (tmp_path / "websites" / "other_mock").mkdir()
    bundle(tmp_path / "tasks" / "elsewhere", "print('REWARD: 0.25')", SETUP.replace("TODO", "OTHER"))
    async with leased(given, 2) as [env, other]:
        await env.reset(task("add-milk"))
        first = server(env)
        await other.reset(task("elsewhere"))
        assert first.alive(), "an application in use was ended"
        assert (await other.judge(Finish(), False)).reward == 0.25
        await other.renew()
        await env.renew()
        await env.reset(task("elsewhere"))
        assert server(env).name == "other_mock"
        bundle(tmp_path / "tasks" / "third", ADD_MILK, SETUP.replace("TODO", "THIRD"))
        (tmp_path / "websites" / "third_mock").mkdir()
    async with leased(given, 1) as [env]:
        await env.reset(task("add-milk"))
        first = server(env)
        await env.reset(task("elsewhere"))
        assert not first.alive()
        assert not first.folder.exists()


async def test_an_application_that_is_being_taken_does_not_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(WebAppsOptions.model_validate(options(tmp_path, most_applications=1)))
    todo, other = (tmp_path / "websites" / name for name in ("todo_mock", "other_mock"))
    other.mkdir()
    asked, answer = asyncio.Event(), asyncio.Event()

    async def answers(_: Server) -> bool:
        asked.set()
        return await answer.wait()

    monkeypatch.setattr(Server, "answers", answers)
    try:
        first = await servers.take(todo)
        await servers.give(first)
        taking = asyncio.create_task(servers.take(todo))
        await asked.wait()
        await servers.take(other)
        answer.set()
        assert await taking is first and first.alive(), "it was ended while it was asked whether it answers"
        await servers.give(first)
        asked.clear()
        answer.clear()
        taking = asyncio.create_task(servers.take(todo))
        await asked.wait()
        taking.cancel()
        await asyncio.wait({taking})
        assert first.users == 0, "who gave up counts as a user"
    finally:
        await servers.close()


async def test_a_task_that_gives_every_session_one_id_is_refused(tmp_path: Path) -> None:
    given = options(tmp_path)
    bundle(tmp_path / "tasks" / "fixed", ADD_MILK, SETUP.replace("str(uuid.uuid4())", "'always'"))
    async with leased(given) as [env]:
        await env.reset(task("fixed"))
        with pytest.raises(UserError, match=r"gives every session the id 'always'.*uuid\.uuid4"):
            await env.reset(task("fixed"))


async def test_a_setup_that_fails_is_the_tasks_fault(tmp_path: Path) -> None:
    given = options(tmp_path)
    wrong = {
        "raise ValueError('no such state')  # here": "ended with 1: ValueError: no such state",
        "import no_such_package": "'no_such_package': install it for environment.options.python",
        SETUP.replace("file.write(sid)", "file.write('a/b')"): "left 'a/b' in /tmp/task_web_sid",
        "x = 1": "left '' in /tmp/task_web_sid",
    }
    async with leased(given) as [env]:
        for number, (setup, said) in enumerate(wrong.items()):
            bundle(tmp_path / "tasks" / f"broken-{number}", ADD_MILK, setup)
            with pytest.raises(UserError, match=re.escape(said)):
                await env.reset(task(f"broken-{number}"))
        await env.reset(task("add-milk"))
        assert len(list(server(env).folder.glob("episode-*"))) == 1


async def test_what_a_reward_program_does_is_not_mistaken_for_a_reward(tmp_path: Path) -> None:
    rewards: dict[str, str | float] = {
        "import no_such_package": "No module named 'no_such_package'",
        "print('CRITICAL: Cannot fetch state from somewhere')\nprint('REWARD: 0.0')": "did not get the state",
        "raise KeyError('todos')": 0.0,
        "print('no number')": 0.0,
        "print(0.75)": 0.75,
        "print('REWARD: 7')": 1.0,
        "x = ' ' * (300 << 20)\nprint('REWARD: 1.0')": 0.0,
        "import os\nprint('REWARD:', float(os.environ['CUA_GYM_AGENT_ANSWER'] == '42'))": 1.0,
    }
    async with leased(options(tmp_path, program_megabytes=200)) as [env]:
        for number, (reward, outcome) in enumerate(rewards.items()):
            bundle(tmp_path / "tasks" / f"odd-{number}", f"{reward}\n'__CUA_GYM_TODO_URL__'", None)
            await env.reset(task(f"odd-{number}"))
            if isinstance(outcome, str):
                with pytest.raises(EnvironmentFailure, match=outcome):
                    await env.judge(Finish(), False)
            else:
                verdict = await env.judge(Finish(answer="42"), False)
                assert verdict.reward == outcome, reward
                assert ("error" in verdict.evidence) == (outcome == 0.0)


async def test_a_reward_program_that_never_ends_is_killed_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    reward = f"""
import subprocess
started = subprocess.Popen(['sleep', '600'])
open({str(note)!r}, 'w').write(str(started.pid))
while True: '__CUA_GYM_TODO_URL__'
"""
    given = options(tmp_path, program_seconds=5.0)
    bundle(tmp_path / "tasks" / "endless", reward, None)
    async with leased(given) as [env]:
        await env.reset(task("endless"))
        with pytest.raises(EnvironmentFailure, match="took longer than 5 s"):
            await env.judge(Finish(), False)
        if note.exists():  # else the machine was too busy to get so far
            with contextlib.suppress(psutil.NoSuchProcess):
                dead_for_good(psutil.Process(int(note.read_text())))


def test_a_program_whose_processor_time_is_up_ends_with_a_signal_of_its_own() -> None:
    command = [sys.executable, limited.__file__, str(os.getpid()), "1", "512", sys.executable, "-c", "while True: pass"]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGXCPU


async def test_a_program_whose_processor_time_is_up_took_too_long(tmp_path: Path) -> None:
    program = "import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)"  # as the kernel does
    with pytest.raises(EnvironmentFailure, match="took longer than 60 s of processor time"):
        await programs.run(program, tmp_path, sys.executable, 60.0, 512, {})


async def test_an_application_that_does_not_start_says_what_it_printed(tmp_path: Path) -> None:
    given = options(tmp_path, command=[sys.executable, "-c", "exit('no port {port} for me')"])
    async with leased(given) as [env]:
        with pytest.raises(EnvironmentFailure, match=r"todo_mock did not start within 60 s: no port \d+ for me"):
            await env.reset(task("add-milk"))


WORKER = """
import asyncio, sys
from test_webapps_world import leased, options, process, server, task
async def main():
    async with leased(options(__import__("pathlib").Path(sys.argv[1]))) as [env]:
        await env.reset(task("add-milk"))
        print(process(env).pid, server(env).folder, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def test_nothing_is_left_of_a_worker_that_was_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert worker.stdout is not None
    with worker.stdout:
        pid, folder = worker.stdout.readline().split()
        application = psutil.Process(int(pid))
        worker.kill()
        worker.wait()
    dead_for_good(application)
    began = time.monotonic()
    while Path(folder).exists():
        assert time.monotonic() - began < GONE_SECONDS
        time.sleep(0.05)


def test_options_and_tasks_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"environment\.options\.command.*no word of command has \{port\}"):
        check("webapps", options(tmp_path, command=["npm", "start"]), ["add-milk"])
    with pytest.raises(UserError, match=r"environment\.options\.applications is missing"):
        check("webapps", {"tasks_folder": str(tmp_path)}, [])
