"""The world on small machines over real HTTP, with a stand-in for OSWorld's evaluators in a real process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from osworld import standin
from osworld.machine import FakeMachine

from dart.core.action import Click, Finish, Observe, Point, TypeText, Wait
from dart.core.types import Task
from dart.errors import UserError
from dart.testing import conform
from dart.workers.env.osworld import episodes
from dart.workers.env.osworld import machine as machine_module
from dart.workers.env.osworld.episodes import OSWorldEnv
from dart.workers.env.osworld.machine import MachineError
from dart.workers.env.osworld.options import OSWorldOptions
from dart.workers.env.osworld.setup import Downloads
from dart.workers.env.osworld.world import OSWorld
from dart.worlds import Full
from dart.worlds.plugs import check, read_options

SCREEN = (160, 224)
AWAY = "http://127.0.0.1:9/nothing"
GONE = "http://gone/nothing"  # stands for an address of a server that has nothing
RESULT = {"type": "vm_file", "path": "/tmp/note", "dest": "note"}
RULE = {"type": "rule", "rules": "hello"}
STEPS = [
    {"type": "execute", "parameters": {"command": ["echo", "{CLIENT_PASSWORD} {SCREEN_WIDTH_HALF}"], "stdout": "said"}},
    {"type": "launch", "parameters": {"command": "xterm -e cat"}},
    {"type": "activate_window", "parameters": {"window_name": "cat", "strict": True}},
    {"type": "chrome_open_tabs", "parameters": {"urls_to_open": ["http://one"]}},
    {"type": "sleep", "parameters": {"seconds": 0.01}},
]
MORE: dict[str, dict[str, object]] = {
    "steps": {"config": STEPS, "evaluator": {"func": "infeasible"}},
    "fails": {
        "config": [{"type": "open", "parameters": {"path": "/x"}}], "evaluator": {"func": "infeasible"},
    },
    "download": {
        "config": [{"type": "download", "parameters": {"files": [{"url": GONE, "path": "/x"}]}}],
        "evaluator": {"func": "infeasible"},
    },
    "download_away": {
        "config": [{"type": "download", "parameters": {"files": [{"url": AWAY, "path": "/x"}]}}],
        "evaluator": {"func": "infeasible"},
    },
    "late": {"evaluator": {"func": "exact_match", "result": RESULT, "expected": {"type": "cloud_file", "path": AWAY}}},
    "drive": {
        "config": [{"type": "googledrive", "parameters": {"settings_file": "x"}}], "evaluator": {"func": "infeasible"},
    },
    "missing_package": {"evaluator": {"func": "compare", "result": RESULT, "expected": RULE}},
    "gold": {"evaluator": {"func": "exact_match", "result": RESULT, "expected": {"type": "cloud_file", "path": GONE}}},
    "crash": {"evaluator": {"func": "first_line", "result": RESULT, "expected": RULE}},
    "post": {
        "evaluator": {
            "postconfig": [{"type": "execute", "parameters": {"command": ["echo", "post"]}}],
            "func": "exact_match", "result": RESULT, "expected": RULE,
        },
    },
}  # fmt: skip


@dataclass
class Place:
    env: OSWorldEnv
    machine: FakeMachine
    options: OSWorldOptions

    async def run(self, name: str, last: Finish | None = None, note: bytes | None = None) -> float:
        await self.env.reset(Task("osworld", f"os/{name}"))
        if note is not None:
            self.machine.files["/tmp/note"] = note
        return (await self.env.judge(last or Finish(), False)).reward


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("dart.workers.env.osworld.setup.LAUNCH_SECONDS", 0.0)
    monkeypatch.setattr("dart.workers.env.osworld.setup.DOWNLOADS", 1)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The tasks and the evaluators."""
    folder, nothing = tmp_path_factory.mktemp("osworld"), tmp_path_factory.mktemp("nothing")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(nothing))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        more = json.loads(json.dumps(MORE).replace("//gone/", f"//127.0.0.1:{server.server_port}/"))
        yield standin.tasks(folder / "tasks", **more), standin.environment(folder / "evaluators")
        server.shutdown()


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[FakeMachine]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeMachine(SCREEN)) for _ in range(count)]


def options_of(prepared: tuple[Path, Path], there: list[FakeMachine], state: Path, **more: object) -> dict[str, object]:
    tasks, evaluators = prepared
    return {
        "tasks_folder": str(tasks), "evaluators": str(evaluators), "state_folder": str(state),
        "static": {"hosts": [f"127.0.0.1:{one.port}" for one in there]}, "typing": "keyboard",
        "start_seconds": 0, "settle_seconds": 0, "max_wait_seconds": 0.1, "boot_seconds": 0.2, "evaluator_seconds": 60,
        **more,
    }  # fmt: skip


@pytest.fixture
async def place(prepared: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Place]:
    with machines(1) as there:
        options = OSWorldOptions.model_validate(options_of(prepared, there, tmp_path))
        world = OSWorld()
        try:
            await world.start(options, SCREEN)
            env = await world.lease()
            assert isinstance(env, OSWorldEnv)
            with pytest.raises(Full):
                await world.lease()
            yield Place(env, there[0], options)
        finally:
            await world.close()


def test_it_keeps_to_the_contract(prepared: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that a hook reverts, as a snapshot would."""
    with machines(2) as there, FakeMachine() as hook:
        ports = {one.port: one for one in there}
        monkeypatch.setattr(hook, "_answer", lambda path, asked: (ports[asked["server"]].revert(), (200, b"done"))[1])
        renew = f"http://127.0.0.1:{hook.port}/revert"
        hosts = [f"127.0.0.1:{one.port}" for one in there]
        options = options_of(prepared, there, tmp_path) | {"static": {"hosts": hosts, "renew": renew}}
        conform("osworld", "os/write", "os/refuse", "os/steps", options=options, screen=SCREEN)


async def test_an_episode(place: Place) -> None:
    start = await place.env.reset(Task("osworld", "os/write"))
    assert start.instruction == "Do write."
    seen = await place.env.act(Click(Point(0.5, 0.25)))
    assert seen.image.sha256 != start.image.sha256
    await place.env.act(TypeText("a<b"))
    await place.env.conclude(Observe())
    began = time.monotonic()
    await place.env.act(Wait(100.0))
    assert 0.1 <= time.monotonic() - began < 60
    assert place.machine.gui.calls == [
        "click(80.0, 56.0, button='left')", "typewrite('a')", "hotkey('shift', ',')", "typewrite('b')",
    ]  # fmt: skip
    assert (await place.env.judge(Finish(), False)).reward == 0.0
    place.machine.files["/tmp/note"] = b"hello"
    verdict = await place.env.judge(Finish(), False)
    assert verdict.reward == 1.0
    assert verdict.evidence == {"func": "exact_match", "last_action": "DONE", "evaluator_error": ""}


async def test_what_a_final_action_counts_as(place: Place) -> None:
    for status, reward in (("infeasible", 1.0), ("call_user", 1.0), ("fail", 0.0), ("success", 0.0)):
        assert await place.run("refuse", Finish(status)) == reward  # type: ignore[arg-type]
        assert await place.run("write", Finish(status), b"hello") == (0.0 if reward else 1.0)  # type: ignore[arg-type]
    await place.env.reset(Task("osworld", "os/refuse"))
    assert (await place.env.judge(Observe(), True)).reward == 0.0


async def test_set_up_steps(place: Place) -> None:
    await place.env.reset(Task("osworld", "os/steps"))
    assert place.machine.windows == ["['xterm', '-e', 'cat']", "['http://one', 'password 160x224']"]
    (said,) = place.options.state_folder.glob("evaluations/*/steps/said")
    assert said.read_text() == "password 80\n"


async def test_a_step_that_the_machine_fails_is_the_machines_failure(place: Place) -> None:
    place.machine.failing["/setup/open_file"] = 500
    with pytest.raises(MachineError, match=r"set-up step 1 of 1 \(open\) failed: .*answered 500: broken on purpose"):
        await place.env.reset(Task("osworld", "os/fails"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("download", r"os/download is not evaluated: set-up step 1 of 1 \(download\): http.* cannot be downloaded"),
        ("drive", "set-up step googledrive is not supported: it changes files of a Google account"),
        ("missing_package", "docs: No module named 'easyocr_that_is_missing': install what is missing"),
    ],
)
async def test_a_task_that_cannot_work_is_not_evaluated(place: Place, name: str, why: str) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=why):
            await place.env.reset(Task("osworld", f"os/{name}"))
    assert await place.run("write", note=b"hello") == 1.0


async def test_an_expected_file_that_cannot_be_had_is_not_a_zero(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"os/gold is not evaluated: http.*does not answer"):
        await place.run("gold", note=b"x")
    with pytest.raises(UserError, match="os/gold is not evaluated"):
        await place.env.reset(Task("osworld", "os/gold"))
    with monkeypatch.context() as later:
        later.setattr(episodes, "TRIED_AGAIN_SECONDS", 0.0)
        await place.env.reset(Task("osworld", "os/gold"))


async def test_an_episode_that_is_under_way_is_evaluated_although_another_has_no_result(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.env.reset(Task("osworld", "os/write"))
    place.machine.files["/tmp/note"] = b"hello"
    with monkeypatch.context() as meanwhile:
        meanwhile.setitem(place.env._shared.without_result, "os/write", (time.monotonic(), "a page was gone"))
        assert (await place.env.judge(Finish(), False)).reward == 1.0
        with pytest.raises(UserError, match="os/write is not evaluated: a page was gone"):
            await place.env.reset(Task("osworld", "os/write"))


async def test_an_address_that_does_not_answer_now_voids_the_attempt_alone(place: Place) -> None:
    with pytest.raises(MachineError, match=r"set-up step 1 of 1 \(download\).*http.* does not answer now"):
        await place.env.reset(Task("osworld", "os/download_away"))
    with pytest.raises(MachineError, match=r"http.* does not answer"):
        await place.run("late", note=b"x")
    await place.env.reset(Task("osworld", "os/late"))


async def test_machines_are_given_back_even_if_the_evaluators_fail_to_close(place: Place) -> None:
    class Failing:
        async def close(self) -> None:
            raise OSError("broken on purpose")

    shared = replace(place.env._shared, evaluators=Failing())  # type: ignore[arg-type]
    with pytest.raises(OSError, match="broken on purpose"):
        await shared.close()
    assert shared.client.is_closed


async def test_what_a_metric_cannot_read_is_a_zero_with_the_reason(place: Place) -> None:
    await place.env.reset(Task("osworld", "os/crash"))
    verdict = await place.env.judge(Finish(), False)
    assert verdict.reward == 0.0 and "splitlines" in str(verdict.evidence["evaluator_error"])


async def test_a_machine_that_dies_before_the_verdict_is_not_a_zero(place: Place) -> None:
    await place.env.reset(Task("osworld", "os/write"))
    place.machine.__exit__()
    with pytest.raises(MachineError, match="/file failed: ConnectionError"):
        await place.env.judge(Finish(), False)
    assert not await place.env.probe()


async def test_post_configuration_runs_once(place: Place) -> None:
    assert await place.run("post", note=b"hello") == 1.0
    assert place.machine.requests.count("POST /setup/execute") == 1


async def test_a_failed_action_is_not_sent_again(place: Place) -> None:
    await place.env.reset(Task("osworld", "os/write"))
    place.machine.failing["/execute"] = 500
    with pytest.raises(MachineError, match="/execute answered 500"):
        await place.env.act(Click(Point(0.5, 0.5)))
    assert place.machine.requests.count("POST /execute") == 1
    assert not await place.env.probe()


async def test_the_screen_must_be_the_configs(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    with machines(1) as there:
        world = OSWorld()
        await world.start(OSWorldOptions.model_validate(options_of(prepared, there, tmp_path)), (1920, 1080))
        with pytest.raises(UserError, match=r"write environment.viewport: \[160, 224\]"):
            await world.lease()
        await world.close()


async def test_all_environments_are_closed_at_once_even_if_one_fails() -> None:
    closed, all_closing = [], asyncio.Barrier(3)

    class Part:
        """An environment, or what they share."""

        def __init__(self, name: str, error: OSError | None = None) -> None:
            self.name, self.error = name, error

        async def close(self) -> None:
            if self.name != "shared":
                await all_closing.wait()
            if self.error:
                raise self.error
            closed.append(self.name)

    world = OSWorld()
    world._leased = {Part("one"), Part("fails", OSError("the disk is full")), Part("other")}  # type: ignore[arg-type]
    world._shared = Part("shared")  # type: ignore[assignment]
    async with asyncio.timeout(30):
        await world.close()
    assert (sorted(closed[:-1]), closed[-1]) == (["one", "other"], "shared")


async def test_a_static_host_is_reverted_by_a_command(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    with machines(1) as there:
        hosts = [f"127.0.0.1:{there[0].port}"]
        done = tmp_path / "done"
        for renew, renewed in ((f"touch {done}-{{host}}-{{server}}", True), ("sh -c 'exit 3'", False)):
            raw = options_of(prepared, there, tmp_path) | {"static": {"hosts": hosts, "renew": renew}}
            world = OSWorld()
            await world.start(OSWorldOptions.model_validate(raw), SCREEN)
            reverted = Path(f"{done}-127.0.0.1-{there[0].port}")
            reverted.unlink(missing_ok=True)
            if not renewed:
                for _ in range(2):  # the host is free again
                    with pytest.raises(MachineError, match="renew"):
                        await world.lease()
                await world.close()
                continue
            env = await world.lease()
            assert reverted.exists(), "whoever had the host before may have used it"
            reverted.unlink()
            await env.reset(Task("osworld", "os/write"))
            assert not reverted.exists(), "it was reverted and not used since"
            assert await env.renew() and reverted.exists()
            await world.dispose(env)
            await world.lease()  # the host is free again
            await world.close()


async def test_a_static_host_that_does_not_answer_is_reverted_all_the_same(
    prepared: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode may have switched it off."""
    with machines(1) as there, FakeMachine() as hook:
        off, answer = [True], there[0]._answer
        monkeypatch.setattr(there[0], "_answer", lambda *asked: (503, b"") if off else answer(*asked))
        monkeypatch.setattr(hook, "_answer", lambda path, asked: (off.clear(), (200, b"done"))[1])
        hosts, renew = [f"127.0.0.1:{there[0].port}"], f"http://127.0.0.1:{hook.port}/revert"
        raw = options_of(prepared, there, tmp_path) | {"static": {"hosts": hosts, "renew": renew}}
        world = OSWorld()
        await world.start(OSWorldOptions.model_validate(raw), SCREEN)
        assert await (await world.lease()).probe()
        await world.close()


async def test_files_of_an_evaluation_go_with_its_machine(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    """Where every episode has a machine of another name, they would fill the disk."""
    old = tmp_path / "evaluations" / "gone" / "os" / "write"
    old.mkdir(parents=True)
    os.utime(old.parents[1], (1.0, 1.0))
    with machines(1) as there:
        world = OSWorld()
        await world.start(OSWorldOptions.model_validate(options_of(prepared, there, tmp_path)), SCREEN)
        assert not old.parents[1].exists(), "a killed worker's"
        env = await world.lease()
        for end in (env.renew, lambda: world.dispose(env)):
            await env.reset(Task("osworld", "os/write"))
            assert list((tmp_path / "evaluations").iterdir())
            await end()
            assert list((tmp_path / "evaluations").iterdir()) == []
        await world.close()


async def test_workers_of_one_machine_never_have_the_same_host(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    with machines(3) as there:
        options = OSWorldOptions.model_validate(options_of(prepared, there, tmp_path))
        one, other = OSWorld(), OSWorld()
        for world in (one, other):
            await world.start(options, SCREEN)
        first, second = await one.lease(), await other.lease()
        await other.lease()
        with pytest.raises(Full, match=r"all 3 hosts in .* are in use: name more"):
            await one.lease()
        await other.dispose(second)
        await one.lease()
        await one.dispose(first)
        await one.close()
        for _ in range(2):
            await other.lease()
        await other.close()


async def test_workers_that_fetch_the_same_file_at_once_each_get_all_of_it(tmp_path: Path) -> None:
    """They share a folder, and the second begins while the first is half done."""
    half, go_on = asyncio.Event(), asyncio.Event()

    async def pieces(first: bool) -> AsyncIterator[bytes]:
        yield b"a" * 1000
        if first:
            half.set()
            await go_on.wait()
        yield b"b" * 1000

    def client(first: bool) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, content=pieces(first))))

    one, other = Downloads(tmp_path, client(True)), Downloads(tmp_path, client(False))
    fetching = asyncio.create_task(one.get("http://files/x"))
    await half.wait()
    path = await other.get("http://files/x")
    assert path.read_bytes() == b"a" * 1000 + b"b" * 1000
    go_on.set()
    assert await fetching == path and path.read_bytes() == b"a" * 1000 + b"b" * 1000
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    await one.close()
    await other.close()


def test_names_are_checked_with_the_folder(prepared: tuple[Path, Path]) -> None:
    options: dict[str, object] = {"tasks_folder": str(prepared[0]), "static": {"hosts": ["a"]}}
    check("osworld", options, ["os/write", "os/download"])
    for names, more, why in (
        (["write"], {}, "did you mean os/write"),
        (["write", "os/write", "gimp/drw"], {}, r"has no task 'write' \(.*\); 'gimp/drw' \("),
        (["os/drive"], {}, "os/drive needs an account"),
        (["os/download"], {"leave_out": ["downloads"]}, "os/download needs downloads"),
        (["os/write"], {"tasks_folder": "/nowhere"}, "/nowhere is not a folder"),
    ):
        with pytest.raises(UserError, match=why):
            check("osworld", options | more, names)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"static": {"hosts": []}}, "static.hosts is empty"),
        ({"pool": "emulator"}, "emulator.url or emulator.tokens is missing"),
        ({"emulator": {"tokens": ["secret"]}}, "must be env:NAME or file:PATH"),
        ({"static": {"hosts": ["a:1:2:3:4:5"]}}, "has 5 ports"),
        ({"static": {"hosts": ["a:http"]}}, "static.hosts"),
        ({"tasks": "x"}, "tasks"),
    ],
)
def test_options_are_refused_with_their_names(changes: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=why):
        read_options(OSWorld, {"tasks_folder": "x", "static": {"hosts": ["a"]}, **changes})
