"""A world of one's own: one new file and no edit; it conforms, doctor takes it, and the launcher starts it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dart.cli import main
from dart.config import parse
from dart.coordinator.run import Run
from dart.coordinator.start import Start
from dart.errors import UserError
from dart.job import Evaluate
from dart.processes.launcher import Launcher, local_children
from dart.rundir import RunDirectory
from dart.testing import conform
from dart.v1 import session_pb2 as pb
from dart.wire.channel import Dial
from dart.wire.convert import trajectory_to_proto
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.worker import WorkerOptions, serve
from dart.worlds.plugs import check, find

ROOT = Path(__file__).parents[2]
MINIWOB = ROOT / "configs" / "miniwob_cpu.yaml"

WORLD = """
from dart.worlds import Click, Observation, SyncEnv, UserError, Verdict, WorldOptions, from_pixels

class Halves(SyncEnv):
    class Options(WorldOptions):
        side: float = 0.5
    @classmethod
    def check_task(cls, name):
        if name not in ("left", "right"):
            raise UserError(f"environment.tasks.names: there is no task {name}: use left or right")
    def reset(self, task):
        self.task, self.hit = task.name, None
        return self.look(f"Click on the {task.name} half.")
    def act(self, action):
        if isinstance(action, Click) and action.at:
            self.hit = "left" if action.at.x < self.options.side else "right"
        return self.look()
    def judge(self, last, at_limit):
        return Verdict(float(self.hit == self.task), {"hit": self.hit, "at_limit": at_limit})
    def look(self, instruction=""):
        w, h = self.screen
        return Observation(from_pixels(bytes(w * h * 3), w, h), instruction, done=self.hit is not None)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a world in it, in which dart is started."""
    (tmp_path / "halves_world.py").write_text(WORLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "halves_world", raising=False)
    return tmp_path


def settings(**environment: object) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(MINIWOB.read_text())
    raw["environment"] = {
        "kind": "halves_world:Halves", "viewport": [64, 32], "slots": 3, "tasks": {"names": ["left", "right"]},
        **environment,
    }  # fmt: skip
    raw["evaluation"] = {"episodes": 12}
    return raw


def test_it_is_as_short_as_promised() -> None:
    assert len(WORLD.strip().splitlines()) <= 25
    example = (ROOT / "examples" / "python" / "own_world.py").read_text(encoding="utf-8")
    assert len(example.splitlines()) < 40


def test_it_conforms(folder: Path) -> None:
    conform("halves_world:Halves", "left", "right", screen=(64, 32))


def test_the_example_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "python"))
    monkeypatch.delitem(sys.modules, "own_world", raising=False)
    conform("own_world:Boxes", "boxes", screen=(64, 64))


def test_what_the_docs_tell_works(folder: Path) -> None:
    """The page's first two blocks of code are a world and its config, the third its test."""
    page = (ROOT / "docs" / "extending.md").read_text()
    world, config, test = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:3]
    (folder / "counter_world.py").write_text(world)
    sys.modules.pop("counter_world", None)
    made = parse(settings() | yaml.safe_load(config)).environment
    check(made.kind, made.options, made.tasks.names)
    scope: dict[str, Any] = {}
    exec(test, scope)
    scope["test_my_world"]()
    sys.modules.pop("counter_world", None)


@pytest.mark.browser
def test_miniwob_conforms() -> None:
    conform("miniwob", "click-test-2", "click-color", "enter-text")


@pytest.mark.parametrize("actions", ["frozenset({'Click', 'keys'})", "'click'"])
def test_actions_that_no_action_is_called_are_refused(folder: Path, actions: str) -> None:
    (folder / "misnamed_world.py").write_text(f"{WORLD}\n\nclass Misnamed(Halves):\n    actions = {actions}\n")
    sys.modules.pop("misnamed_world", None)
    with pytest.raises(UserError, match=r"Misnamed.actions is .*: write a set of names of actions, which are.* click"):
        find("misnamed_world:Misnamed")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.hit = task.name, None", "self.hit = task.name + str(id(self)), None", "with another instruction"),
        ("Click on the {task.name} half.", "", "has no instruction"),
        ("from_pixels(bytes(w * h * 3), w, h)", "self.image", "has no attribute 'image'"),
        ("return self.look()", "self.look()", "gave None, not an Observation"),
        ("float(self.hit == self.task)", "2.0", "a reward is a number in"),
        (
            "bytes(w * h * 3)",
            "(0 if instruction else __import__('time').time_ns()).to_bytes(8) * (w * h * 3 // 8)",
            "the screenshot changed by itself after act.Observe",
        ),
        ("def judge", "def renew(self):\n        return None\n    def judge", "renew.. of an environment that works"),
        ("def judge", "def probe(self):\n        return False\n    def judge", "probe.. of a new environment"),
    ],
)
def test_one_that_does_not_conform_is_told(folder: Path, old: str, new: str, message: str) -> None:
    broken = WORLD.replace(old, new).replace('f"Click on the {task.name} half."', 'f"Click on {self.task}."')
    assert broken != WORLD
    (folder / "broken_world.py").write_text(broken)
    sys.modules.pop("broken_world", None)
    with pytest.raises(AssertionError, match=message):
        conform("broken_world:Halves", "left", screen=(64, 32))


def test_doctor_takes_it(folder: Path) -> None:
    config = folder / "config.yaml"

    def doctor(**environment: object) -> str:
        config.write_text(yaml.safe_dump(settings(**environment)))
        return CliRunner().invoke(main, ["doctor", str(config)]).output

    fine = doctor(options={"side": 0.3})
    assert "ok       task names" in fine
    assert "chromium" not in fine, "that is MiniWoB's"
    assert "config: environment.options.sid is not a known field (it is 0.3): did you mean side?" in doctor(
        options={"sid": 0.3}
    )
    assert "there is no task up: use left or right" in doctor(tasks={"names": ["up"]})
    assert "module nowhere cannot be imported" in doctor(kind="nowhere:World")


def test_the_old_keys_of_miniwob_are_its_options() -> None:
    raw = yaml.safe_load(MINIWOB.read_text())
    raw["environment"] |= {"browser": "chromium", "settle_seconds": 0.5}
    made = parse(raw).environment
    assert made.options == {"browser": "chromium", "settle_seconds": 0.5}
    check(made.kind, made.options, ())
    raw["environment"]["options"] = {"browser": "chromium"}
    with pytest.raises(UserError, match=r"browser is given twice: keep only environment\.options\.browser"):
        parse(raw)


class LeftClicks(WorkerRole):
    """A replica without a model: it clicks on the left half."""

    role = pb.ROLE_ROLLOUT

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=8, image_cache_entries=64, engine_ranks=1)

    async def handle(self, command: Command) -> Reply | None:
        text = "Action: click(start_box='(008,016)')"
        tokens = [*map(ord, text), 2]
        return pb.Generated(
            prompt_token_ids=[1], token_ids=tokens, logprobs=[-0.5] * len(tokens), text=text,
            versions=[{"version": 0, "start": 0, "end": len(tokens)}], finish_reason=pb.FINISH_REASON_STOP,
        )  # fmt: skip


async def test_a_run_with_it(folder: Path) -> None:
    """The real coordinator, the env worker as `dart train` starts it, and a replica without a model."""
    config = parse(settings() | {"rollout": {"replicas": 1}})
    directory = RunDirectory(folder / "run")
    directory.path.mkdir()
    job = Evaluate()
    async with await directory.open_to_work(create=True) as database:
        await database.start_run("run", "own", {}, started=1.0, kind=job.kind)
        run = Run(config, directory, database, job, Start())

        async def launch() -> None:
            address = await run.address
            (env,) = [child for child in local_children(config, address, job) if child.name.startswith("env")]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(serve(LeftClicks(), WorkerOptions(Dial(address), "rollout-0"), asyncio.Event()))
                tasks.create_task(Launcher([env], folder / "logs").run())

        async with asyncio.timeout(60):
            summary = await run.execute(launch())
        rows = await database.list_trajectories()
        stored = [await database.trajectory(row.id) for row in rows]
    assert summary["evaluation"]["episodes"] == 12
    found = Counter(
        (one.trajectory.task.name, one.trajectory.success, one.trajectory.evidence_json) for one in stored if one
    )
    evidence = json.dumps({"hit": "left", "at_limit": False})
    assert found == {("left", True, evidence): 6, ("right", False, evidence): 6}
    assert stored[0] and trajectory_to_proto(stored[0].trajectory, (), "", False).evidence_json == evidence
    assert re.search(r"halves_world:Halves/left#\d+", " ".join(row.task.id for row in rows))
