"""Run in a copy of the tree with the edits of `extensions`: uses each extension, and prints the results as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from dart import config
from dart.agent.episode import EpisodeSpec, run_episode
from dart.agent.grammar import make_grammar
from dart.cli import main
from dart.commands.look.view import picture
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.sessions import Fleet, InfrastructureError
from dart.coordinator.sampling.data import DataManager, _rules
from dart.coordinator.service.journal import Journal
from dart.core.action import Action
from dart.core.progress import Counts, Progress
from dart.core.status import Figures, Status
from dart.core.types import Generation, Observation, Prompt, Task, Trajectory
from dart.inspection.wording import details
from dart.store.database import Database, sqlite_url
from dart.v1 import session_pb2 as pb
from dart.wire.convert import (
    action_to_proto,
    generation_from_proto,
    generation_to_proto,
    observation_from_proto,
    task_to_proto,
    trajectory_to_proto,
)
from dart.wire.rules.fields import BODIES
from dart.wire.status import status_from_proto, status_to_proto
from dart.workers.env.role import EnvRole
from dart.workers.rollout.engine import Engine

TASK = Task("counter_world:Counter", "count", 3)
"""To count to 4, which is the step limit."""
AGENT = config.Agent(prompt="minimal", resize_multiple=1, min_pixels=1, history_screenshots=1)


def settings() -> config.Config:
    return config.Config.model_validate(
        {
            "model": {"path": "none"}, "agent": AGENT.model_dump(), "curation": {"easy": 0.5}, "stop": {"updates": 1},
            "environment": {"kind": TASK.suite, "tasks": {"names": [TASK.name]}},
        }
    )  # fmt: skip


async def counter() -> dict[str, object]:
    """An order that is given out again is counted where that happens, in `DataManager.failed`."""
    progress, envs = Progress(1), EnvPool(Fleet(60.0))
    envs.slots = 1
    async with await Database.open(sqlite_url(Path("counter.db")), Path("blobs")) as database:
        await database.start_run("run", "own", {}, started=1.0)
        data = DataManager(settings(), database, progress, Journal(Path("metrics.jsonl")), TASK.suite, 1, envs)
        order = await data.next()
        assert order is not None
        data.failed(order, InfrastructureError("the page does not load"))
    status = Status("run", "training", Figures(progress.counts))
    console = Console(width=120, record=True, file=StringIO())
    console.print(picture(status))
    return {
        "in the message": status_from_proto(status_to_proto(status)) == status,
        "in the event": progress.counts.to_json()["repeated_orders"],
        "after a restart": Counts.from_json(progress.counts.to_json()) == progress.counts,
        "in the live view": "repeated orders 1" in console.export_text(),
        "in dart status": "repeated orders 1" in " ".join(details(status)),
    }


class World:
    """The real env worker with the docs' world, whose replies go over the wire."""

    def __init__(self, worker: EnvRole) -> None:
        self._worker = worker

    async def reset(self, task: Task) -> Observation:
        return await self._answer(pb.Reset(task=task_to_proto(task)))

    async def act(self, action: Action, last: bool) -> Observation:
        return await self._answer(pb.Act(action=action_to_proto(action), last=last))

    async def _answer(self, command: pb.Reset | pb.Act) -> Observation:
        message = await self._worker.handle(command)
        assert isinstance(message, pb.Observed)
        assert BODIES["observed"].violation(message) is None
        return observation_from_proto(pb.Observed.FromString(message.SerializeToString()))


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    worker = EnvRole()
    environment = config.Environment(kind=TASK.suite, tasks={"names": [TASK.name]}, slots=1, viewport=(32, 16))
    await worker.prepare(config.EnvWorkerConfig(environment=environment).model_dump_json())
    running = asyncio.create_task(worker.run(lambda slots: None))
    try:
        yield World(worker)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await worker.close()


class Replica:
    """What the replica makes of an output of vLLM."""

    async def generate(self, prompt: Prompt) -> Generation:
        completion = SimpleNamespace(
            finish_reason="stop", token_ids=[2, 3], weight_versions=[SimpleNamespace(version="0", start=0, end=2)],
            logprobs=SimpleNamespace(logprobs=[-0.5, -0.5], start_indices=[0, 1]),
        )  # fmt: skip
        output = SimpleNamespace(prompt_token_ids=[1], outputs=[completion], num_cached_tokens=0)
        tokenizer = SimpleNamespace(decode=lambda *_, **__: "Action: click(start_box='(000,000)')")
        made = Engine._generation(SimpleNamespace(_tokenizer=tokenizer), output)  # type: ignore[arg-type]
        message = generation_to_proto(made, 0.0)
        assert BODIES["generated"].violation(message) is None
        return generation_from_proto(type(message).FromString(message.SerializeToString()))


async def fields() -> tuple[Trajectory, dict[str, object]]:
    spec = EpisodeSpec("t", "g", TASK, 4, 1.0, AGENT)
    async with world() as environment:
        made = await run_episode(environment, Replica(), spec, make_grammar(AGENT))
    async with await Database.open(sqlite_url(Path("run.db")), Path("blobs")) as database:
        await database.start_run("run", "own", {}, started=1.0)
        await database.open_group("g", TASK, 1, 1.0)
        await database.add_trajectory(made)
        stored = await database.trajectory("t", with_images=True)
    assert stored is not None
    shown = MessageToDict(trajectory_to_proto(stored.trajectory, (), "", True), preserving_proto_field_name=True)
    stored_turn = stored.trajectory.steps[0].generation
    return made, {
        "of the turn, stored": stored_turn.queue_seconds,  # type: ignore[attr-defined]
        "of the turn, shown": shown["steps"][0]["queue_seconds"],
        "of the trajectory, stored": stored.trajectory.page_errors,  # type: ignore[attr-defined]
        "of the trajectory, shown": shown["page_errors"],
        "the reward": (stored.trajectory.reward, stored.trajectory.evidence_json),
    }


def command() -> dict[str, object]:
    return {
        "help": CliRunner().invoke(main, ["--help"]).output,
        "run": CliRunner().invoke(main, ["greet", "you"]).output,
    }


def rule(won: Trajectory) -> dict[str, object]:
    lost = replace(won, reward=0.0, success=False)
    judging = _rules(settings()).judging
    return {
        "two of three": judging.decide([won, won, lost]).cause,
        "one of three": judging.decide([won, lost, lost]).cause,
    }


if __name__ == "__main__":
    trajectory, of_fields = asyncio.run(fields())
    told = {"counter": asyncio.run(counter()), "fields": of_fields, "command": command(), "rule": rule(trajectory)}
    print(json.dumps(told))
