"""Run in a copy of the tree with the edits of `extensions`: uses each extension, and prints the results as JSON."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

from click.testing import CliRunner
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from dart import config
from dart.agent.episode import EpisodeSpec, run_episode
from dart.agent.grammar import make_grammar
from dart.cli import main
from dart.commands.status_text import details
from dart.commands.view import picture
from dart.coordinator.sampling.data import _rules
from dart.core.action import Action
from dart.core.progress import Counts, Progress
from dart.core.status import Figures, Status
from dart.core.types import Generation, Image, Observation, Prompt, Task, Trajectory, VersionSpan
from dart.store.database import Database, sqlite_url
from dart.wire.convert import (
    generation_from_proto,
    generation_to_proto,
    observation_from_proto,
    observation_to_proto,
    trajectory_to_proto,
)
from dart.wire.rules.fields import BODIES
from dart.wire.status import status_from_proto, status_to_proto

TASK = Task("own", "count", 1)
AGENT = config.Agent(prompt="minimal", resize_multiple=1, min_pixels=1, history_screenshots=1)
IMAGE = Image.of(b"x", "image/png", 2, 2)


def counter() -> dict[str, object]:
    progress = Progress(1)
    progress.order_repeated()  # type: ignore[attr-defined]
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
    """The env worker's answers, as its messages bring them."""

    async def reset(self, task: Task) -> Observation:
        return self._answer(Observation(IMAGE, "count"))

    async def act(self, action: Action, last: bool) -> Observation:
        return self._answer(Observation(IMAGE, "", True, 1.0, '{"seen": 1}', page_errors=7))  # type: ignore[call-arg]

    @staticmethod
    def _answer(observation: Observation) -> Observation:
        message = observation_to_proto(observation, 0.0)
        assert BODIES["observed"].violation(message) is None
        return observation_from_proto(type(message).FromString(message.SerializeToString()))


class Replica:
    async def generate(self, prompt: Prompt) -> Generation:
        span = (VersionSpan(0, 0, 2),)
        text = "Action: click(start_box='(000,000)')"
        made = Generation((1,), (2, 3), (-0.5, -0.5), span, text, queue_seconds=0.25)  # type: ignore[call-arg]
        message = generation_to_proto(made, 0.0)
        assert BODIES["generated"].violation(message) is None
        return generation_from_proto(type(message).FromString(message.SerializeToString()))


async def fields() -> tuple[Trajectory, dict[str, object]]:
    spec = EpisodeSpec("t", "g", TASK, 4, 1.0, AGENT)
    made = await run_episode(World(), Replica(), spec, make_grammar(AGENT))
    async with await Database.open(sqlite_url(Path("run.db")), Path("blobs")) as database:
        await database.start_run("run", "own", {}, started=1.0)
        await database.open_group("g", TASK, 1, 1.0)
        await database.add_trajectory(made)
        stored = await database.trajectory("t", with_images=True)
    assert stored is not None
    shown = MessageToDict(trajectory_to_proto(stored.trajectory, None, "", True), preserving_proto_field_name=True)
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
    made = config.Config.model_validate(
        {
            "model": {"path": "none"}, "agent": AGENT.model_dump(),
            "environment": {"tasks": {"names": ["count"]}}, "curation": {"easy": 0.5}, "stop": {"updates": 1},
        }
    )  # fmt: skip
    lost = replace(won, reward=0.0, success=False)
    judging = _rules(made).judging
    return {
        "two of three": judging.decide([won, won, lost]).cause,
        "one of three": judging.decide([won, lost, lost]).cause,
    }


if __name__ == "__main__":
    trajectory, of_fields = asyncio.run(fields())
    print(json.dumps({"counter": counter(), "fields": of_fields, "command": command(), "rule": rule(trajectory)}))
