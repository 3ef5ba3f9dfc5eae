"""`algorithm: sft`: demonstrations as batches, each once an epoch, and a real run from collected successes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from run_processes.told import events
from store_samples import trajectory

from dart import config
from dart.agent.templates import digest_of
from dart.agent.vocabulary import vocabulary_digest
from dart.coordinator.sampling.demonstrations import Demonstrations
from dart.coordinator.service.journal import Journal
from dart.core.curation.batches import samples_of
from dart.core.progress import Progress
from dart.core.types import Task
from dart.errors import UserError
from dart.store.database import Database, sqlite_url
from dart.store.records import GroupKind
from dart.wire.convert import sample_to_proto

ROOT = Path(__file__).parents[3]
MINIWOB = ROOT / "configs" / "miniwob_cpu.yaml"
HANG_SECONDS = 300


async def collected(directory: Path, count: int, **recorded: str) -> Path:
    """A run directory as `dart collect` leaves it, with successes c0, c1, …"""
    demo = config.load(MINIWOB)
    kept = json.loads(demo.model_dump_json()) | {"vocabulary": vocabulary_digest(demo.model.folder)} | recorded
    async with await Database.open(sqlite_url(directory / "run.db"), directory / "blobs") as database:
        await database.start_run("c", "collect", kept, started=1.0)
        task = Task("miniwob", "click-color", 3)
        await database.open_group("c-1", task, count, 1.0, kind=GroupKind.COLLECTED)
        for number in range(count):
            await database.add_trajectory(trajectory(f"c{number}", "c-1", task, finished=float(number)))
    return directory


def settings(source: Path, *more: str) -> config.Config:
    return config.load(
        MINIWOB, ["algorithm=sft", f"sft.sources=[{source}]", "trainer.trajectories_per_update=4", *more]
    )


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Path]:
    (tmp_path / "collected").mkdir()
    yield await collected(tmp_path / "collected", 6)


async def names(source: Path, tmp_path: Path, done: int, batches: int) -> list[str]:
    progress, journal = Progress(10), Journal(tmp_path / "metrics.jsonl")
    progress.resumed(done, done)
    data = Demonstrations(settings(source), progress, journal)
    await data.prepare()
    made = []
    for _ in range(batches):
        batch = await data.next_batch(progress.counts.updates)
        made += [group.trajectories[0].pooled_from for group in batch]
        progress.version_made(progress.counts.updates + 1, None)
        await data.consumed(batch, progress.counts.updates, progress.counts.updates - 1)
    await data.close()
    journal.close()
    return made


async def test_every_demonstration_comes_once_an_epoch_and_a_restart_goes_on(source: Path, tmp_path: Path) -> None:
    made = await names(source, tmp_path, 0, 6)  # 24 of 6: four epochs
    epochs = [made[at : at + 6] for at in range(0, 24, 6)]
    assert all(sorted(epoch) == [f"c{n}" for n in range(6)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert await names(source, tmp_path, 3, 3) == made[12:]


async def test_a_demonstration_is_a_sample_without_log_probs(source: Path, tmp_path: Path) -> None:
    data = Demonstrations(settings(source), Progress(10), Journal(tmp_path / "metrics.jsonl"))
    await data.prepare()
    group = (await data.next_batch(7))[0]
    sent = sample_to_proto(samples_of([group])[0])
    assert sent.rescore and not sent.logprobs and sent.advantage == 1.0
    assert [(span.version, span.start, span.end) for span in sent.versions] == [(7, 0, 2)]
    assert sent.images[0].data
    with pytest.raises(UserError, match="samples nothing"):
        data.submit([Task("miniwob", "click-color", 1)])
    await data.close()


async def test_successes_with_another_versions_prompt_are_refused(tmp_path: Path) -> None:
    for number, digest in enumerate((digest_of(config.load(MINIWOB).agent), "of another version")):
        source = tmp_path / str(number)
        source.mkdir()
        data = Demonstrations(
            settings(await collected(source, 4, prompt=digest)), Progress(10), Journal(tmp_path / "metrics.jsonl")
        )
        if not number:
            await data.prepare()
        else:
            with pytest.raises(
                UserError, match=r"1 was made by another version of dart, whose texts .*: collect again"
            ):
                await data.prepare()
        await data.close()


async def test_two_folders_may_have_trajectories_of_the_same_name(source: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = await collected(tmp_path / "other", 2)
    both = settings(source, f"sft.sources=[{source}, {other}]", "trainer.trajectories_per_update=8")
    data = Demonstrations(both, Progress(10), Journal(tmp_path / "metrics.jsonl"))
    await data.prepare()
    batch = await data.next_batch(0)
    assert len({group.id for group in batch}) == len({group.trajectories[0].id for group in batch}) == 8
    await data.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=sft"], "algorithm sft needs sft.sources"),
        (["sft.sources=[x]"], "sft.sources is set but algorithm is grpo"),
        (
            ["algorithm=sft", "sft.sources=[x]", "stop={success_rate: 0.9}"],
            "set stop.updates or stop.train_seconds",
        ),
        (
            ["algorithm=sft", "sft.sources=[x]", "schedule.training=synchronous"],
            "schedule.training is synchronous but algorithm sft samples nothing",
        ),
    ],
)
def test_what_does_not_go_together(overrides: list[str], message: str) -> None:
    with pytest.raises(config.ConfigError, match=message):
        config.load(MINIWOB, overrides)


def dart(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dart", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip


def test_a_missing_source_ends_before_anything_starts(tmp_path: Path) -> None:
    ended = dart("train", str(MINIWOB), "--set", "algorithm=sft", "--set", "sft.sources=[/nowhere]",
                 "--set", f"run.directory={tmp_path}")  # fmt: skip
    assert ended.returncode == 2
    assert "sft.sources: /nowhere is not a run directory" in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
@pytest.mark.engine
@pytest.mark.browser
def test_the_oracle_is_imitated(tmp_path: Path) -> None:
    """Collected from the real browser, then trained on by the real trainer alone: the likelihood rises."""
    common = [
        "--quiet",
        "--set",
        "dashboard.enabled=false",
        "--set",
        "environment.tasks.names=[click-color, click-dialog]",
    ]
    done = dart("collect", str(MINIWOB), "--from", "oracle", "--per-task", "8", *common,
                "--set", f"run.directory={tmp_path / 'collected'}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (source,) = (tmp_path / "collected").iterdir()
    done = dart("train", str(MINIWOB), *common, "--set", "algorithm=sft", "--set", f"sft.sources=[{source}]",
                "--set", "stop={updates: 12}", "--set", "evaluation.episodes=0",
                "--set", "trainer.learning_rate=1e-3", "--set", "trainer.trajectories_per_update=16",
                "--set", f"run.directory={tmp_path / 'runs'}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert {log.name for log in (run / "logs").iterdir()} == {"train.log"}, "neither environments nor replicas started"
    losses = [event["trainer"]["loss"] for event in events(run / "metrics.jsonl", "update")]
    assert len(losses) == 12 and losses[-1] < 0.7 * losses[0]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["trained"] == 12 * 16 and summary["trajectories"] == 0
