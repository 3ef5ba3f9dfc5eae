"""Held-out evaluation: its orders, evaluation.json, and `dart eval` around it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result
from run_processes.data_rig import Rig, environments
from store_samples import fates, trajectory

from dart.cli import main
from dart.commands import evaluate as command
from dart.commands import running
from dart.commands.look.status import _rises
from dart.commands.plot import read_metrics
from dart.commands.running import JobRun
from dart.config import Config, ConfigError, load
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import InfrastructureError, SetUpFailed
from dart.coordinator.sampling import evaluations
from dart.coordinator.sampling.evaluation import Evaluation
from dart.coordinator.service.journal import Journal
from dart.coordinator.start import MOST_UNWRITTEN_EVENTS
from dart.coordinator.summary import write_json
from dart.core.curation.orders import Failures, Order
from dart.core.evaluation.documents import ByDecoding, Success
from dart.core.evaluation.estimates import wilson
from dart.core.types import Task, Termination, Trajectory
from dart.errors import UserError
from dart.job import Address, Evaluate
from dart.rundir import RunDirectory
from dart.store.database import Database, sqlite_url
from dart.store.records import GroupState, RunState

MINIWOB = Path(__file__).parents[3] / "configs" / "miniwob_cpu.yaml"
SMALL = ("--tasks", "click-dialog,enter-text", "--seeds", "2000000:2000003", "--samples", "2")


async def finished(config: Config, directory: Path, rate: float, fail_first: bool = False) -> Evaluation:
    """An evaluation as `Run` makes it, with episodes that succeed at a rate."""
    async with await Database.open(sqlite_url(directory / "run.db"), directory / "blobs") as database:
        await database.start_run(directory.name, "e", {}, started=1.0)
        settings = config.evaluation
        source = Evaluation("eval", config, database, environments(), Failures(), 1.0, settings.samples)
        await source.open()
        rng = random.Random(rate)
        while (order := await source.next()) is not None:
            if fail_first:
                source.failed(order, InfrastructureError("the page crashed"))
                fail_first = False
                continue
            await source.finished(order, episode(order, rng.random() < rate))
        await source.close()
        return source


def episode(order: Order, success: bool) -> Trajectory:
    made = trajectory(order.trajectory_id, order.group_id, order.task)
    end = Termination.ENVIRONMENT if success else Termination.STEP_LIMIT
    return replace(made, success=success, reward=float(success), termination=end)


async def test_samples_of_an_instance_are_kept_together_and_rewards_reported(tmp_path: Path) -> None:
    """Where each instance is solved always or never, five samples of it say no more than one."""
    config = load(MINIWOB, ["evaluation.episodes=20", "evaluation.samples=5", "environment.tasks.names=[a]"])
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "e", {}, started=1.0)
        source = Evaluation("eval", config, database, environments(), Failures(), 1.0, 5)
        await source.open()
        while (order := await source.next()) is not None:
            won = order.task.seed % 2 == 0
            await source.finished(order, replace(episode(order, won), reward=1.0 if won else 0.5))
        found = source.result()
    assert (found["mean"], found["episodes"], found["reward"]) == (0.5, 100, 0.75)
    assert (found["low"], found["high"]) == pytest.approx(wilson(10, 20))
    assert found["per_task"]["a"]["high"] == found["high"]
    document = source.document("run-1")
    assert {one["reward"] for each in document["instances"] for one in each["samples"]} == {1.0, 0.5}
    assert document["protocol"]["settings"]["rollout.max_tokens"] == 40


async def test_episodes_of_other_seeds_are_not_counted_when_it_goes_on(tmp_path: Path) -> None:
    """A run may be resumed with another config: what is stored of the old one is not of this evaluation."""
    tasks = ["environment.tasks.names=[a]"]
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "e", {}, started=1.0)
        for first, episodes, expected in ((1000000, 3, 0), (1000000, 2, 2), (1000001, 3, 2)):
            seeds = f"environment.tasks.eval_seeds=[{first}, 1010000]"
            config = load(MINIWOB, [*tasks, seeds, f"evaluation.episodes={episodes}"])
            source = Evaluation("after", config, database, environments(), Failures(), 1.0)
            await source.open()
            assert len(source.outcomes) == expected
            while (order := await source.next()) is not None:
                await source.finished(order, episode(order, True))
            assert source.ended == source.total == episodes
            await source.close()
            group = await database.group("eval-after-a")
            assert group is not None and group.state is GroupState.EVALUATED


async def test_an_evaluation_of_which_nothing_could_be_run_has_a_result_too(tmp_path: Path) -> None:
    config = load(MINIWOB, ["evaluation.episodes=2", "evaluation.samples=2", "environment.tasks.names=[a]"])
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "e", {}, started=1.0)
        source = Evaluation("eval", config, database, environments(), Failures(), 1.0, 2)
        await source.open()
        while (order := await source.next()) is not None:
            source.failed(order, SetUpFailed("no such page", "env-0", certain=True))
    found = source.result()
    assert (found["episodes"], found["low"], found["high"]) == (0, 0.0, 1.0)
    assert sum(one["episodes"] for one in found["not_evaluated"]) == 4


async def test_the_last_episode_is_made_again_too(tmp_path: Path) -> None:
    config = load(MINIWOB, ["evaluation.episodes=2", "environment.tasks.names=[a]"])
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "e", {}, started=1.0)
        source = Evaluation("eval", config, database, environments(), Failures(), 1.0)
        await source.open()
        first, second = await source.next(), await source.next()
        assert first is not None and second is not None
        more = asyncio.create_task(source.next())
        await asyncio.sleep(0)
        assert not more.done(), "one of the two may fail"
        await source.finished(first, episode(first, True))
        source.failed(second, InfrastructureError("the page crashed"))
        again = await more
        assert again is not None and again == second.again()
        last = asyncio.create_task(source.next())
        await source.finished(again, episode(again, True))
        assert await last is None
        assert len(source.outcomes) == 2


def test_a_roll_out_is_given_up_when_it_failed_everywhere() -> None:
    order = Order("t", "g", Task("miniwob", "a", 1), 9)
    for _ in range(4):
        order = order.failed("env-0").again()
    assert order.attempt == 5 and not order.failed("env-0").hopeless, "that machine may be to blame"
    assert order.failed("env-1").hopeless
    for _ in range(7):
        order = order.failed("env-0").again()
    assert order.failed("env-0").hopeless, "there may be no other"


async def test_samples_times_instances_orders_with_ids_of_their_own(tmp_path: Path) -> None:
    config = load(MINIWOB, ["evaluation.episodes=10", "evaluation.samples=3", "environment.tasks.names=[a, b, a]"])
    source = await finished(config, tmp_path, 0.5, fail_first=True)
    assert source.total == len(source.outcomes) == 30
    assert len({outcome.trajectory_id for outcome in source.outcomes}) == 30
    instances = [outcome.task.id for outcome in source.outcomes]
    assert {instances.count(one) for one in instances} == {3}
    document = source.document("r")
    assert document["protocol"]["tasks"] == ["a", "b"]
    assert document["protocol"]["seeds"] == [1_000_000, 1_000_005]
    assert [len(each["samples"]) for each in document["instances"]] == [3] * 10
    success = document["success"]
    assert success["infrastructure_attempts"] == 1
    assert success["episodes"] == 30
    assert success["failures"]["step_limit"] == round(30 * (1 - success["mean"]))
    assert document["pass_at_k"]["1"]["mean"] == pytest.approx(success["mean"])


async def test_one_sample_is_named_as_before(tmp_path: Path) -> None:
    source = await finished(load(MINIWOB, ["evaluation.episodes=4"]), tmp_path, 1.0)
    assert source.outcomes[0].trajectory_id == "eval-eval-click-color-1000000"
    assert source.result()["mean"] == 1.0


async def test_a_training_run_evaluates_with_each_decoding_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temperatures: list[float] = []

    async def sample(source: Evaluation, *_: object) -> None:
        temperatures.append(source.temperature)
        while (order := await source.next()) is not None:
            await source.finished(order, episode(order, source.temperature == 0))

    monkeypatch.setattr(evaluations, "sample", sample)
    config = load(MINIWOB, ["evaluation.episodes=4", "evaluation.temperature=0.5"])
    journal, policy = Journal(tmp_path / "metrics.jsonl", 1), cast("RolloutPool", None)
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run(tmp_path.name, "e", {}, started=1.0)
        known = {"before": {"sampled": cast("Success", {"mean": 0.25})}}
        made = evaluations.Evaluations(config, database, environments(), policy, journal, Failures(), known)
        await made.trained("before", 0)
        assert temperatures == [0.0], "an earlier process of the run has made the other one"
        await made.trained("after", 7)
        assert temperatures == [0.0, 0.5, 0.0]
        assert await database.group("eval-after-greedy-v7-click-color") is not None
        # Killed, resumed from a checkpoint before it, and trained to the same version: these are other weights.
        for version in (7, 5, 6, 7):
            journal.event("update", update=version, version=version)
        again = evaluations.Evaluations(config, database, environments(), policy, journal, Failures(), {})
        await again.trained("after", 7)
        assert temperatures == [0.0, 0.5, 0.0, 0.5, 0.0], "no episode of the weights that were given up counts"
        assert await database.group("eval-after-greedy-v7-made-2-times-click-color") is not None
    means = {label: {name: each["mean"] for name, each in by.items()} for label, by in made.results.items()}
    assert means == {"before": {"sampled": 0.25, "greedy": 1.0}, "after": {"sampled": 0.0, "greedy": 1.0}}
    journal.close()
    _, read = read_metrics(RunDirectory(tmp_path))
    assert {name: sorted(by) for name, by in read.items()} == {"greedy": ["after", "before"], "sampled": ["after"]}


async def test_an_evaluation_that_was_cut_off_goes_on_and_every_episode_has_its_fate(tmp_path: Path) -> None:
    config = load(MINIWOB, ["evaluation.episodes=6", "environment.tasks.names=[a, b]"])

    async def evaluated(rig: Rig, episodes: int) -> Evaluation:
        source = Evaluation("after", config, rig.database, environments(), Failures(), 0.0)
        await source.open()
        while len(source.outcomes) < episodes and (order := await source.next()):
            await source.finished(order, episode(order, True))
        return source

    async with Rig(tmp_path) as rig:
        await evaluated(rig, 5)
    async with Rig(tmp_path) as again:  # which trains, before it evaluates
        assert await fates(again.database) == {"evaluated": 5}
        source = await evaluated(again, 6)
        assert len(source.outcomes) == source.total == 6
        await source.close()
        assert await fates(again.database) == {"evaluated": 6}
        for name in ("a", "b"):
            group = await again.database.group(f"eval-after-{name}")
            assert group and (group.state, group.detail) == (GroupState.EVALUATED, "evaluated") and group.closed
    async with Rig(tmp_path) as third:
        assert (await evaluated(third, 6)).total == 6, "it is over, and nothing of it is made again"


def test_a_finished_run_of_an_earlier_version_is_shown() -> None:
    flat = cast("ByDecoding", {"mean": 0.5})
    assert _rises(flat, flat) == "sampled 50.0% -> 50.0%"
    both = cast("ByDecoding", {"sampled": {"mean": 0.5}, "greedy": {"mean": 0.75}})
    assert _rises({}, both) == "sampled 50.0%, greedy 75.0%"
    assert _rises(both, both) == "sampled 50.0% -> 50.0%, greedy 75.0% -> 75.0%"


def test_a_config_that_lacks_seeds_is_told_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"240 episodes of 4 tasks need 60 held-out seeds, and .* has 10: widen it"):
        load(MINIWOB, ["environment.tasks.eval_seeds=[1000000, 1000010]"])


# ---- the command ----


@pytest.fixture
def run_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`dart eval` with everything of its own but workers: episodes are made up, better for other weights."""

    def run_in_loop(wanted: JobRun) -> dict[str, Any]:
        config, directory = wanted.config, wanted.directory
        source = asyncio.run(finished(config, directory.path, 0.3 if config.model.path.startswith("builtin") else 0.9))
        assert isinstance(wanted.job, Evaluate)
        seen = config.environment.tasks.not_held_out_from(wanted.job.trained)
        write_json(directory.evaluation, source.document(directory.name, None, seen))
        return {"evaluation": source.result()}

    monkeypatch.setattr(command, "run_in_loop", run_in_loop)
    monkeypatch.setattr(command, "check_before", lambda *_: None)
    monkeypatch.chdir(tmp_path)


def dart_eval(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["eval", str(MINIWOB), "--quiet", *arguments], catch_exceptions=False)


def newest(pattern: str) -> Path:
    return max(Path("runs").glob(pattern), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.usefixtures("run_for_real")
def test_two_checkpoints_and_then_one_against_a_finished_evaluation() -> None:
    Path("better").mkdir()
    both = dart_eval("--checkpoint", "better", "--against", "builtin:tiny-qwen3vl", *SMALL)
    assert both.exit_code == 0, both.output
    assert "A - B: +" in both.output
    assert "pass@2" in both.output
    directory = newest("*-eval-2*")
    document = json.loads((directory / "evaluation.json").read_text())
    against = document["against"]
    assert against["checkpoint"] == "builtin:tiny-qwen3vl"
    assert against["difference"]["mean"] == pytest.approx(document["success"]["mean"] - against["success"]["mean"])
    assert against["better"] + against["worse"] <= 6
    pytest.importorskip("matplotlib")
    assert (directory / "evaluation.png").read_bytes().startswith(b"\x89PNG")

    for other in (newest("*-eval-against-*"), newest("*-eval-against-*") / "evaluation.json"):
        again = dart_eval("--checkpoint", "better", "--against", str(other), *SMALL)
        assert again.exit_code == 0, again.output
        made = json.loads((newest("*-eval-2*") / "evaluation.json").read_text())["against"]
        assert made == against, "the same evaluations compare the same"

    runs = len(list(Path("runs").iterdir()))
    other = dart_eval("--against", str(directory), *SMALL, "--samples", "3")
    assert other.exit_code == 2
    assert "6 of them the same, 3 samples each; only these can be paired" in other.output
    assert "add --tasks click-dialog,enter-text --seeds 2000000:2000003 --episodes 6 --samples 2" in other.output
    assert len(list(Path("runs").iterdir())) == runs, "nothing was begun"


@pytest.mark.usefixtures("run_for_real")
def test_a_held_out_task_is_told_so_beside_a_trained_one() -> None:
    trained, held_out = "click-dialog", "enter-text"
    lists = {"names": trained, "eval_names": held_out, "single_instance": f"{trained}, {held_out}"}
    settings = [word for name, listed in lists.items() for word in ("--set", f"environment.tasks.{name}=[{listed}]")]
    done = dart_eval(*settings, "--set", "evaluation.episodes=0", "--tasks", f"{trained},{held_out}")
    assert done.exit_code == 0, done.output
    assert f"not held out, because training has their only instance: {trained}\n" in done.output
    protocol = json.loads((newest("*-eval-2*") / "evaluation.json").read_text())["protocol"]
    assert (protocol["tasks"], protocol["not_held_out"]) == ([trained, held_out], [trained])

    against = (*settings, "--against", str(newest("*-eval-2*")), "--set", "evaluation.episodes=0")
    other = dart_eval(*against, "--samples", "2")
    remedy = other.output.strip().rpartition("these can be paired: add ")[2]
    assert remedy == f"--tasks {trained},{held_out} --episodes 2 --samples 1", "their only seed is no choice"
    done = dart_eval(*against, *remedy.split())
    assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("run_for_real")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "click-test,,enter-text"], "--tasks 'click-test,,enter-text' has an empty name"),
        (["--seeds", "5"], "--seeds '5' is not FIRST:LAST"),
        (["--seeds", "7:7"], "--seeds '7:7' is not FIRST:LAST"),
        (["--seeds", "2000000:9223372036854775809"], "is not FIRST:LAST with FIRST below LAST, up to 2^63"),
        (["--seeds", "2000000:" + "9" * 5000], "is not FIRST:LAST with FIRST below LAST, up to 2^63"),
        (["--seeds", "10:20"], "--seeds 10:20: environment.tasks.train_seeds is [0, 1000000), so these are not held"),
        (["--seeds", "2000000:2000010", "--episodes", "44"], "44 episodes of 4 tasks need 11 held-out seeds"),
        (["--episodes", "0"], "Invalid value for '--episodes': 0"),
        (["--samples", "none"], "Invalid value for '--samples': 'none'"),
        (["--temperature", "-1"], "Invalid value for '--temperature': -1"),
        (["--temperature", "nan"], "evaluation.temperature (it is nan)"),
        (["--endpoint-model", "m"], "evaluating an endpoint needs --endpoint URL: add it"),
        (["--endpoint", "http://x/v1"], "evaluating an endpoint needs --endpoint-model NAME: add it"),
        (["--endpoint", "http://x/v1", "--checkpoint", "c"], "--checkpoint c and --endpoint are two policies"),
        (["--endpoint", "http://127.0.0.1:1/v1", "--endpoint-model", "m"], "--endpoint http://127.0.0.1:1/v1 does not"),
        (["--against", "none"], "--against none does not exist: name a checkpoint's folder (builtin:desktop"),
        (
            ["--against", "builtin:tiny-qwen3vl", "--external-workers"],
            "evaluate each separately, then compare with --against RUN",
        ),
        (["--against", "run"], "--against run is a run directory without evaluation.json"),
        (["--against", "broken"], "broken/evaluation.json is not an evaluation (KeyError('instances'))"),
        (["--against", "odd"], "odd/evaluation.json is not an evaluation (TypeError("),
        (["--against", "broken/evaluation.json"], "name an evaluation.json that `dart eval` wrote"),
        (["--against", "endless"], "endless/evaluation.json is not an evaluation (OSError("),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_choices_are_one_message_and_begin_nothing(arguments: list[str], message: str) -> None:
    odd = json.dumps(
        {"instances": [], "protocol": {"tasks": 5, "seeds": [1, 2], "episodes": 1, "samples": 1}}
        | dict.fromkeys(("run", "checkpoint", "success", "pass_at_k"), 1)
    )
    files = (("run", "run.db", ""), ("broken", "evaluation.json", "{}"), ("odd", "evaluation.json", odd),
             ("endless", "evaluation.json", ""))  # fmt: skip
    for folder, file, text in files:
        Path(folder).mkdir()
        (Path(folder) / file).write_text(text)
    os.truncate(Path("endless") / "evaluation.json", 1 << 40)
    done = dart_eval(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ((), ""),
        (("rollout.replicas=1", "environment.slots=3"), ""),
        (("rollout.temperature=0.5",), "rollout.temperature 1.0, and this is 0.5"),
        (("evaluation.episodes=9",), "it was begun with evaluation "),
        (("agent.history_screenshots=1",), "agent.history_screenshots 2, and this is 1"),
        (("environment.tasks.eval_seeds=[1000001, 1010000]",), "it was begun with environment.tasks "),
    ],
)
async def test_an_evaluation_is_continued_with_what_it_was_begun_with(
    tmp_path: Path, changed: tuple[str, ...], problem: str
) -> None:
    wanted = running.JobRun(load(MINIWOB, changed), RunDirectory(tmp_path), Evaluate())
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await running._begun(replace(wanted, config=load(MINIWOB)), database)
        await database.set_run_state(RunState.INTERRUPTED, 1.0)
        if problem:
            with pytest.raises(UserError, match=re.escape(problem)):
                await running._continued(wanted, database)
            return
        assert (await running._continued(wanted, database)).first_event == 1 + MOST_UNWRITTEN_EVENTS
        assert (await database.run()).state is RunState.RUNNING
        await database.set_run_state(RunState.FINISHED, 2.0)
        with pytest.raises(UserError, match="it is finished: its result is in"):
            await running._continued(wanted, database)


async def test_an_endpoint_is_part_of_what_an_evaluation_was_begun_with(tmp_path: Path) -> None:
    first, second = (Evaluate(Address("http://127.0.0.1:1/v1", name, key="sk-secret")) for name in ("small", "large"))
    wanted = running.JobRun(load(MINIWOB), RunDirectory(tmp_path), first)
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await running._begun(wanted, database)
        assert "sk-secret" not in str((await database.run()).config)
        await database.set_run_state(RunState.INTERRUPTED, 1.0)
        with pytest.raises(UserError, match=r"it was begun with endpoint .*small.*, and this is .*large"):
            await running._continued(replace(wanted, job=second), database)
