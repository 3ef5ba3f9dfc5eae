"""`dart collect`: who may teach, what is kept, the data set, and what a training run takes from it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fleet_samples import World, fleet, replica, screen
from PIL import Image as Picture
from run_processes.data_rig import CONFIG as TRAINING
from run_processes.data_rig import Rig
from store_samples import fates, trajectory

from dart import config
from dart.agent.grammar import make_grammar
from dart.agent.vocabulary import vocabulary_digest
from dart.cli import main
from dart.coordinator.fleet.environments import EnvPool, EnvSession
from dart.coordinator.fleet.sessions import Fleet, InfrastructureError, Rejected
from dart.coordinator.run import Run
from dart.coordinator.sampling.collecting import Collection, OracleTurns, teacher
from dart.coordinator.sampling.episodes import sample
from dart.coordinator.start import Start
from dart.core.action import Click, Point
from dart.core.curation.orders import FAILING_SECONDS, Failures, Order
from dart.core.evaluation.quota import Quota
from dart.core.types import Block, Image, Prompt, Task
from dart.errors import UserError
from dart.job import Collect
from dart.rundir import RunDirectory
from dart.store.database import Database, sqlite_url
from dart.store.dataset import write_dataset
from dart.store.records import GroupKind
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto

ROOT = Path(__file__).parents[3]
MINIWOB = str(ROOT / "configs" / "miniwob_cpu.yaml")
MODEL = ROOT / "dart" / "assets" / "tiny-qwen3vl"
HANG_SECONDS = 600
CONFIG = config.load(Path(MINIWOB), ["environment.tasks.names=[click-color, click-dialog]"])
ORACLE = Collect("oracle", (0, 50), per_task=3, most_attempts=6, samples=1, temperature=1.0)


# ---- what is tried ----


def test_a_teacher_that_always_succeeds_is_asked_as_often_as_is_needed() -> None:
    quota = Quota("s", ["a", "b"], (10, 99), wanted=3, most_attempts=30, samples=1)
    begun = []
    while (order := quota.next()) is not None:
        begun.append((order[0].name, order[0].seed, order[1]))
    assert begun == [("a", 10, 1), ("b", 10, 1), ("a", 11, 1), ("b", 11, 1), ("a", 12, 1), ("b", 12, 1)]
    assert not quota.done, "nothing more to begin, and nothing is known yet"
    for name, *_ in begun:
        with quota.finishing(name, True) as keep:
            assert keep
    assert quota.done


@pytest.mark.parametrize("seed", range(20))
def test_attempts_end_and_no_more_is_kept_than_wanted(seed: int) -> None:
    chance = random.Random(seed)
    quota = Quota("s", ["easy", "hard", "never"], (0, 40), wanted=4, most_attempts=25, samples=3)
    rates, running, tried = {"easy": 0.9, "hard": 0.3, "never": 0.0}, [], []
    while not quota.done:
        if len(running) < 8 and (begun := quota.next()):
            running.append(begun)
            continue
        task, number = running.pop(chance.randrange(len(running)))
        tried.append((task, number))
        with quota.finishing(task.name, chance.random() < rates[task.name]):
            pass
    tallies = quota.tallies
    assert tallies["easy"].kept == 4
    assert (tallies["never"].kept, tallies["never"].finished) == (0, 25)
    assert all(tally.begun <= 25 and tally.kept <= 4 <= 4 + tally.successes for tally in tallies.values())
    assert len(set(tried)) == len(tried)
    assert {number for task, number in tried if task.seed < 3} == {1, 2, 3}, "each concrete task three times"


# ---- what is kept ----


async def test_the_oracles_successes_are_kept_and_its_failures_counted(tmp_path: Path) -> None:
    async with (
        await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database,
        fleet(env=World(), rollout=replica) as (envs, pool),
    ):
        await database.start_run("run-1", "c", {}, started=0.0)
        source = Collection(ORACLE, CONFIG, database, envs, Failures())
        async with teacher(ORACLE, pool, CONFIG) as writer:
            await sample(source, envs, pool, CONFIG, writer)
        result = await source.close()
        for counts in result["per_task"].values():
            assert counts["kept"] == 3
            assert counts["attempts"] == counts["successes"] + counts["failures"] <= 6
        kept = await database.newest_successes()
        assert len(kept) == 6
        assert {success.task.seed % 2 for success in kept} == {0}
        assert await fates(database) == {"collected": 6}
        stored = await database.trajectory(kept[0].trajectory_id, with_images=True)
        assert stored is not None
        (step,) = stored.trajectory.steps
        assert not step.generation.logprobs
        assert step.generation.text == "Action: click(start_box='(040,112)')"
        assert step.images[-1].data


async def test_one_concrete_task_may_give_several_successes_of_the_policy(tmp_path: Path) -> None:
    plan = replace(ORACLE, teacher="policy", samples=3)
    async with (
        await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database,
        fleet(env=World(), rollout=replica) as (envs, pool),
    ):
        await database.start_run("run-1", "c", {}, started=0.0)
        source = Collection(plan, CONFIG, database, envs, Failures())
        async with teacher(plan, pool, CONFIG) as writer:
            assert writer is None, "the policy samples, as in training"
            await sample(source, envs, pool, CONFIG, writer)
        await source.close()
        assert {success.task.seed for success in await database.newest_successes()} == {0}
        assert await database.group_count(GroupKind.COLLECTED) == 2


async def failed_five_times(source: Collection, order: Order | None) -> Order | None:
    """The order after its fifth failure: its next attempt, or another one."""
    for attempt in range(1, 6):
        assert order is not None and order.attempt == attempt
        source.failed(order, InfrastructureError("the page died"))
        order = await source.next()
    return order


def collection(database: Database) -> Collection:
    return Collection(ORACLE, CONFIG, database, EnvPool(Fleet(60.0)), Failures())


async def test_an_attempt_that_infrastructure_ends_is_made_again_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("dart.coordinator.sampling.collecting.time.monotonic", lambda: now)
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        source = collection(database)
        first, *others = [await source.next() for _ in range(6)]
        assert all(others), "new attempts come before old ones"
        order = await failed_five_times(source, first)
        assert order is not None and order.attempt == 6, "nothing has finished yet: it is not known who is to blame"
        now += FAILING_SECONDS
        with pytest.raises(UserError, match="8 attempts in a row failed, the last with: the page died: look at"):
            for _ in range(3):
                source.failed(order, InfrastructureError("the page died"))


async def test_an_attempt_that_fails_while_others_finish_is_given_up(tmp_path: Path) -> None:
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "c", {}, started=0.0)
        source = collection(database)
        good, bad, *_ = [await source.next() for _ in range(6)]
        assert good is not None and bad is not None
        await source.finished(good, trajectory(good.trajectory_id, good.group_id))
        following = await failed_five_times(source, bad)
        assert following is not None and following.trajectory_id != bad.trajectory_id
        counts = (await source.close())["per_task"][bad.task.name]
        assert (counts["given_up"], counts["attempts"], counts["failures"]) == (1, 0, 0)


async def test_workers_that_cannot_do_it_are_turned_away(tmp_path: Path) -> None:
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "c", {}, started=0.0)
        run = Run(CONFIG, RunDirectory(tmp_path), database, ORACLE, Start())
        for role, capability in ((pb.ROLE_ENV, "oracle"), (pb.ROLE_ROLLOUT, "forced_text")):
            with pytest.raises(Rejected, match=f"needs the capability {capability}"):
                run._welcome(pb.Hello(role=role))
            assert json.loads(run._welcome(pb.Hello(role=role, capabilities=[capability])))
        with pytest.raises(Rejected, match="does not train"):
            run._welcome(pb.Hello(role=pb.ROLE_TRAIN))
        run.journal.close()


async def test_what_the_grammar_has_no_words_for_fails_the_attempt_and_names_the_worker() -> None:
    def env(command: Any) -> Any:
        return pb.Suggested(action=action_to_proto(Click(Point(0.5, 0.5), "middle")))

    async with fleet(env=env, rollout=replica) as (envs, pool):
        session = EnvSession(envs, await envs.acquire(), Order("t", "g", Task("s", "a"), 3))
        turns = OracleTurns(session, pool, make_grammar(CONFIG.agent), 40)
        with pytest.raises(InfrastructureError, match="cannot express the oracle's next action") as told:
            await turns.generate(Prompt((Block((screen(),)),), (screen(),)))
        assert told.value.worker == "env", "this environment may be wrong about it, and others right"


async def test_sampled_tokens_without_log_probabilities_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dart.core.fleet.replicas.FIRST_RETRY_SECONDS", 0.01)

    def forgetful(command: Any) -> Any:
        reply = replica(command)
        del reply.logprobs[:1]
        return reply

    def too_old(command: pb.Generate) -> Any:
        sampling = pb.Generate.FromString(command.SerializeToString())
        sampling.ClearField("forced_text")
        return replica(sampling)

    prompt = Prompt((Block((screen(),)),), (screen(),))
    async with fleet(rollout=forgetful) as (_, pool):
        with pytest.raises(InfrastructureError, match=r"rollout broke a rule: Generated\.logprobs is 36 entries"):
            await pool.generate(prompt, 1.0, 40, None)
    async with fleet(rollout=too_old) as (_, pool):
        with pytest.raises(
            InfrastructureError, match=r"rollout broke a rule: Generated\.logprobs is 37 entries, and must be 0"
        ):
            await pool.generate(prompt, 1.0, 40, None, "")


# ---- the data set ----


async def collected(directory: Path, tasks: list[Task], **changed: Any) -> Path:
    """A run directory as `dart collect` leaves it."""
    settings = config.parse(TRAINING.model_dump() | changed)
    record = json.loads(settings.model_dump_json()) | {"vocabulary": vocabulary_digest(settings.model.folder)}
    directory.mkdir()
    async with await Database.open(sqlite_url(directory / "run.db"), directory / "blobs") as database:
        await database.start_run(directory.name, "collect", record, started=0.0)
        for number, task in enumerate(tasks):
            group = f"collect-{task.name}-{task.seed}"
            await database.open_group(group, task, 1, 0.0, kind=GroupKind.COLLECTED)
            picture = io.BytesIO()
            Picture.new("RGB", (160, 224), (number, 0, 0)).save(picture, "png")
            image = Image.of(picture.getvalue(), "image/png", 160, 224)
            made = trajectory(f"{group}-1", group, task, finished=float(number), steps=2)
            steps = tuple(
                replace(
                    step, images=(image, image), accessibility_tree=f"tree {step.index}",
                    generation=replace(step.generation, logprobs=()),
                )
                for step in made.steps
            )  # fmt: skip
            await database.add_trajectory(replace(made, steps=steps, goal_images=1))
    return directory


async def test_the_data_set_has_a_row_per_step_and_loads_as_images(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    tasks = [Task("miniwob", "click-color", 3), Task("miniwob", "click-dialog", 4)]
    directory = await collected(tmp_path / "made", tasks)
    path = directory / "dataset" / "train.parquet"
    async with await Database.open(sqlite_url(directory / "run.db"), directory / "blobs") as database:
        assert await write_dataset(database, path, "oracle") == 4
    rows = pq.read_table(path).to_pylist()
    last = rows[-1]
    assert [row["step"] for row in rows] == [0, 1, 0, 1]
    assert (last["task"], last["seed"], last["instruction"], last["reward"]) == ("click-dialog", 4, "Click red", 1.0)
    assert last["history"] == [rows[-2]["text"]]
    assert json.loads(last["action"]) == {
        "kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": [],
    }  # fmt: skip
    assert Picture.open(io.BytesIO(last["image"]["bytes"])).size == (160, 224)

    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset(str(path.parent), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded[3]["image"].getpixel((0, 0)) == (1, 0, 0)
    assert loaded[3]["history"] == last["history"]
    assert (loaded[3]["accessibility_tree"], loaded[3]["last_action_error"]) == ("tree 1", "")
    assert [goal.getpixel((0, 0)) for goal in loaded[3]["goal_images"]] == [(1, 0, 0)]


# ---- curation.pool.sources ----


def training_with(*sources: Path) -> config.Config:
    pool = config.Pool(sources=sources)
    return TRAINING.model_copy(update={"curation": TRAINING.curation.model_copy(update={"pool": pool})})


async def test_what_was_collected_stands_in_where_all_fail_and_a_restart_needs_it_no_more(tmp_path: Path) -> None:
    tasks = [Task("miniwob", "click-color", seed) for seed in (3, 4)] + [Task("miniwob", "click-dialog", 5)]
    made = await collected(tmp_path / "made", tasks)
    (tmp_path / "run").mkdir()
    async with Rig(tmp_path / "run", training_with(made)) as rig:
        assert await fates(rig.database) == {"collected": 2}, "of this run's tasks"
        assert rig.events("pool_filled")[0]["successes"] == 2
        failed = await rig.group(False, False, False, False)
        (used,) = rig.events("pooled")
        assert used["success"] == "collected-1-collect-click-color-4-1", "the newest"
        await rig.group(True, False, False, False)
        first, _ = await rig.batch()
        copy = first.trajectories[-1]
        assert copy.pooled_from == used["success"]
        assert [len(step.generation.logprobs) for step in copy.steps] == [0, 0]
        assert copy.steps[0].images[0].sha256
        assert used["replaced"] == failed[-1].trajectory_id
    made.rename(tmp_path / "elsewhere")
    async with Rig(tmp_path / "run", training_with(made)) as again:
        assert len(again.events("pool_filled")) == 1, "not read again"
        await again.batch()
        await again.group(False, False, False, False)
        assert again.events("pooled")[-1]["success"] != used["success"], "uses were counted from the database"


async def test_collected_pooled_and_own_successes_count_once_each_for_the_length(tmp_path: Path) -> None:
    made = await collected(tmp_path / "made", [Task("miniwob", "click-color", seed) for seed in (3, 4)])
    trains = training_with(made)
    length = trains.curation.dynamic_length.model_copy(update={"window": 9})
    trains = trains.model_copy(update={"curation": trains.curation.model_copy(update={"dynamic_length": length})})
    (tmp_path / "run").mkdir()

    def lengths(rig: Rig) -> list[int]:
        return list(rig.data._planner.histories["click-color"].lengths)

    async with Rig(tmp_path / "run", trains) as rig:
        assert lengths(rig) == [2, 2], "the collected ones"
        assert (await rig.order()).step_limit == 3, "two steps and a margin of one"
    async with Rig(tmp_path / "run", trains) as rig:
        await rig.group(False, False, False, False)
        assert len(rig.events("pooled")) == 1 and lengths(rig) == [2, 2], "the copy's original counts already"
        await rig.group(True, False, False, False, steps=5)
        await rig.batch()
        assert lengths(rig) == [2, 2, 5]
    async with Rig(tmp_path / "run", trains) as again:
        assert lengths(again) == [2, 2, 5]
        assert (await again.order()).step_limit == 6


async def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    color = [Task("miniwob", "click-color", 3)]
    small = tmp_path / "small"
    small.mkdir()
    (small / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": []}')
    agent = TRAINING.agent.model_dump() | {"history_screenshots": 2}
    for name, changed, message in (
        ("window", {"agent": agent}, "made with agent.history_screenshots 2, and this run has 5: set agent.history_sc"),
        ("model", {"model": {"path": str(small)}}, f"vocabulary of {small}, and model.path builtin:tiny-qwen3vl has"),
        ("tasks", {}, "holds no success of click-color .there are of click-dialog.: collect these"),
    ):
        made = await collected(tmp_path / name, color if changed else [Task("miniwob", "click-dialog", 1)], **changed)
        with pytest.raises(UserError, match=message):
            async with Rig(tmp_path, training_with(made)):
                pass
    with pytest.raises(UserError, match=r"curation\.pool\.sources: .*none is not a run directory: it has no run\.db"):
        async with Rig(tmp_path, training_with(tmp_path / "none")):
            pass


def test_a_checkpoint_saved_again_has_the_same_vocabulary(tmp_path: Path) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"padding": {"direction": "Left"}}))
    assert vocabulary_digest(tmp_path) == vocabulary_digest(MODEL) is not None
    tokenizer["model"]["vocab"]["one more"] = 9999
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert vocabulary_digest(tmp_path) != vocabulary_digest(MODEL)
    assert vocabulary_digest(tmp_path / "none") is None


# ---- the command ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("collect --from oracle --samples 4", "--samples 4 does not apply to --from oracle: omit it"),
        ("collect --from policy --endpoint http://x", "--endpoint http://x does not apply to --from policy"),
        ("collect --from endpoint", "--from endpoint needs --endpoint URL: add it"),
        ("collect --from endpoint --endpoint http://x", "--from endpoint needs --endpoint-model NAME"),
        ("collect --from endpoint --endpoint x --endpoint-model m", "--endpoint 'x' is not a URL"),
        ("collect --from endpoint --endpoint http://x --endpoint-model m --endpoint-key sk-1", "must be env:NAME or"),
        ("collect --from policy --temperature nan", "--temperature nan is not a finite number"),
        ("collect --from policy --seeds 9", "--seeds '9' is not FIRST:LAST"),
        ("collect --from policy --seeds 999990:1000001", "environment.tasks.eval_seeds [1000000, 1010000)"),
        ("collect --from policy --per-task 5 --seeds 0:3", "seeds 0:3 with 1 samples each allow 3: widen --seeds"),
        (
            "collect --from policy --per-task 5 --seeds 0:3 "
            "--set environment.tasks={names:[click-color],eval_names:[a,b],single_instance:[a,b]} "
            "--set evaluation.episodes=0",
            "seeds 0:3 with 1 samples each allow 3: widen --seeds",
        ),
        ("collect --from policy --most-attempts 2", "--most-attempts 2 is less than --per-task 8"),
        ("collect --from oracle --set environment.tasks.names=[click-pie]", "the oracle does not know click-pie; it"),
        ("collect --from policy --checkpoint none", "--checkpoint none: the folder does not exist"),
        ("train --set curation.pool.sources=[none]", "curation.pool.sources: none is not a run directory"),
    ],
)
def test_wrong_choices_are_one_message_and_begin_nothing(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("vllm", "miniwob", "pyarrow"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    command, *options = arguments.split()
    done = CliRunner().invoke(main, [command, MINIWOB, *options])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.engine
@pytest.mark.browser
@pytest.mark.torch
def test_the_oracle_fills_a_run_directory(tmp_path: Path) -> None:
    """Real Chromium, a real replica: prompts and tokens are those of training."""
    pq = pytest.importorskip("pyarrow.parquet")
    done = subprocess.run(
        [
            sys.executable, "-m", "dart", "collect", MINIWOB, "--from", "oracle", "--per-task", "2", "--quiet",
            "--set", "environment.tasks.names=[click-color, enter-text]", "--set", "rollout.replicas=1",
            "--set", "environment.slots=4",
        ],
        cwd=tmp_path, env={**os.environ, "DART_TEST_RUN": str(tmp_path)}, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"train from it: dart train {MINIWOB} --set" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    counts = json.loads((run / "summary.json").read_text())["collected"]["per_task"]
    assert {name: count["kept"] for name, count in counts.items()} == {"click-color": 2, "enter-text": 2}
    rows = pq.read_table(run / "dataset" / "train.parquet").to_pylist()
    assert [row["step"] for row in rows if row["task"] == "enter-text"] == [0, 1, 2] * 2
    assert {row["source"] for row in rows} == {"oracle"}
    asyncio.run(_check_tokens(run))


async def _check_tokens(run: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    image_pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    async with await Database.open(sqlite_url(run / "run.db"), run / "blobs", create=False) as database:
        for success in await database.newest_successes():
            stored = await database.trajectory(success.trajectory_id)
            assert stored is not None
            for step in stored.trajectory.steps:
                generation = step.generation
                assert not generation.logprobs
                assert tokenizer.decode(generation.token_ids) == generation.text + "<|im_end|>"
                # 160 x 224 pixels in merged patches of 32
                assert generation.prompt_token_ids.count(image_pad) == 35 * len(step.images)
