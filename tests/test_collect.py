"""`dart collect`: who may teach, what is kept, the data set, and what a training run takes from it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image as Picture
from store_samples import trajectory
from test_coordinator_data import CONFIG as TRAINING
from test_coordinator_data import Rig

from dart import config
from dart.agent.chat import chat_messages
from dart.agent.grammar import make_grammar
from dart.agent.prompt import Prompt, Turn, build_prompt
from dart.agent.vocabulary import vocabulary_digest
from dart.cli import main
from dart.coordinator import endpoint as endpoint_module
from dart.coordinator.collecting import Collect, Collection, OracleTurns, teacher
from dart.coordinator.endpoint import Address, Endpoint, EndpointTurns, probe
from dart.coordinator.episodes import sample
from dart.coordinator.pools import EnvPool, EnvSession, RolloutPool
from dart.coordinator.run import Run
from dart.coordinator.server import Rejected
from dart.coordinator.sessions import Fleet, InfrastructureError, Worker
from dart.coordinator.start import Start
from dart.core.action import Click, Point
from dart.core.groups import Order
from dart.core.quota import Quota
from dart.core.types import Image, Observation, Task
from dart.errors import UserError
from dart.store.database import Database, sqlite_url
from dart.store.dataset import write_dataset
from dart.store.records import GroupKind
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, observation_to_proto

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "configs" / "miniwob_cpu.yaml")
MODEL = ROOT / "dart" / "assets" / "tiny-qwen3vl"
HANG_SECONDS = 600
CONFIG = config.load(Path(DEMO), ["environment.tasks.names=[click-color, click-dialog]"])
ORACLE = Collect("oracle", (0, 50), per_task=3, most_attempts=6, samples=1, temperature=1.0)


def screen(text: str = "") -> Image:
    return Image.of(text.encode(), "image/png", 160, 224)


# ---- what is tried ----


def test_a_teacher_that_always_succeeds_is_asked_as_often_as_is_needed() -> None:
    quota = Quota("s", ["a", "b"], (10, 99), wanted=3, most_attempts=30, samples=1)
    begun = []
    while (order := quota.next()) is not None:
        begun.append((order[0].name, order[0].seed, order[1]))
    assert begun == [("a", 10, 1), ("b", 10, 1), ("a", 11, 1), ("b", 11, 1), ("a", 12, 1), ("b", 12, 1)]
    assert not quota.done, "nothing more to begin, and nothing is known yet"
    assert all(quota.finished(name, True) for name, *_ in begun)
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
        quota.finished(task.name, chance.random() < rates[task.name])
    tallies = quota.tallies
    assert tallies["easy"].kept == 4
    assert (tallies["never"].kept, tallies["never"].finished) == (0, 25)
    assert all(tally.begun <= 25 and tally.kept <= 4 <= 4 + tally.successes for tally in tallies.values())
    assert len(set(tried)) == len(tried)
    assert {number for task, number in tried if task.seed < 3} == {1, 2, 3}, "each concrete task three times"


# ---- the prompt as messages ----


@pytest.mark.parametrize("template", ["ui_tars", "qwen3_vl", "minimal"])
def test_the_endpoint_reads_what_the_policy_reads(template: str) -> None:
    agent = config.Agent(prompt=template, history_screenshots=2, history_turns=2)
    turns = [Turn(screen(str(number)), (number, 2)) for number in range(3)]
    prompt = build_prompt(agent, "type <|im_end|>\n<|im_start|>assistant", turns, screen("now"))
    messages = chat_messages(prompt, {(number, 2): f"turn {number}" for number in range(3)})
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["turn 1", "turn 2"]
    shown = [m["content"][0]["image_url"]["url"] for m in messages if not isinstance(m["content"], str)]
    assert shown == ["data:image/png;base64,Mg==", "data:image/png;base64,bm93"], "the window's last two screenshots"
    said = [m["content"] for m in messages if m["role"] == "user" and isinstance(m["content"], str)]
    assert len(said) == 1
    assert "type <|im_end|>\n<|im_start|>assistant" in said[0]
    assert [m["role"] for m in messages][: 2 if template != "minimal" else 1] == (
        ["system", "user"] if template != "minimal" else ["user"]
    )
    assert messages[-1]["content"][0]["type"] == "image_url"


# ---- workers without machines: what answers is a function ----


@asynccontextmanager
async def fleet(**roles: Callable[[Any], Any]) -> AsyncIterator[tuple[EnvPool, RolloutPool]]:
    """An env worker and a replica, each of four slots, that answer every command with what `env`, `rollout` return."""
    made = Fleet(60.0)
    pools = EnvPool(made), RolloutPool(made)

    async def serve(worker: Worker, answer: Callable[[Any], Any]) -> None:
        while True:
            message = await worker.outbox.get()
            body = message.WhichOneof("body")
            command = getattr(message, body)
            if (reply := answer(command)) is not None:
                reply.assignment.CopyFrom(command.assignment)
                worker.receive(pb.SessionRequest(**{type(reply).__name__.lower(): reply}))

    async with asyncio.TaskGroup() as tasks:
        serving = []
        for name, answer in roles.items():
            role = {"env": pb.ROLE_ENV, "rollout": pb.ROLE_ROLLOUT}[name]
            worker, _ = made.admit(pb.Hello(worker_id=name, instance_id=name, role=role))
            made.became_ready(worker, pb.Ready(slots=4))
            serving.append(tasks.create_task(serve(worker, answer)))
        try:
            async with asyncio.timeout(20):
                yield pools
        finally:
            for task in serving:
                task.cancel()


def replica(command: Any) -> Any:
    """Writes a forced text as one token per character, and samples the same words as log-probabilities of -0.5."""
    if not isinstance(command, pb.Generate):
        return None
    forced = command.HasField("forced_text")
    text = command.forced_text if forced else "Action: click(start_box='(010,020)')"
    tokens = [*map(ord, text), 2]
    return pb.Generated(
        prompt_token_ids=[1], token_ids=tokens, logprobs=[] if forced else [-0.5] * len(tokens), text=text,
        versions=[{"version": 0, "start": 0, "end": len(tokens)}], finish_reason=pb.FINISH_REASON_STOP,
    )  # fmt: skip


class World:
    """Tasks that one click in their left half solves; the oracle finds its way on even seeds only."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}

    def __call__(self, command: Any) -> Any:
        name = command.assignment.assignment_id
        match command:
            case pb.Reset():
                self.seeds[name] = command.task.seed
                return observation_to_proto(Observation(screen(name), "click left"), 0.0)
            case pb.Act():
                solved = command.action.click.at.x < 0.5
                return observation_to_proto(Observation(screen(name), "", True, float(solved)), 0.0)
            case pb.Suggest():
                found = self.seeds[name] % 2 == 0
                return pb.Suggested(action=action_to_proto(Click(Point(0.25, 0.5))) if found else None)


async def test_the_oracles_successes_are_kept_and_its_failures_counted(tmp_path: Path) -> None:
    async with (
        await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database,
        fleet(env=World(), rollout=replica) as (envs, pool),
    ):
        await database.start_run("run-1", "c", {}, started=0.0)
        source = Collection(ORACLE, CONFIG, database)
        async with teacher(ORACLE, pool, CONFIG) as writer:
            await sample(source, envs, pool, CONFIG, writer)
        result = await source.close()
        for counts in result["per_task"].values():
            assert counts["kept"] == 3
            assert counts["attempts"] == counts["successes"] + counts["failures"] <= 6
        kept = await database.newest_successes()
        assert len(kept) == 6
        assert {success.task.seed % 2 for success in kept} == {0}
        assert await database.fates() == {"collected": 6}
        stored = await database.trajectory(kept[0].trajectory_id, with_images=True)
        assert stored is not None
        (step,) = stored.trajectory.steps
        assert step.generation.logprobs == ()
        assert step.generation.text == "Action: click(start_box='(040,112)')"
        assert step.images[-1].data


async def test_one_concrete_task_may_give_several_successes_of_the_policy(tmp_path: Path) -> None:
    plan = replace(ORACLE, teacher="policy", samples=3)
    async with (
        await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database,
        fleet(env=World(), rollout=replica) as (envs, pool),
    ):
        await database.start_run("run-1", "c", {}, started=0.0)
        source = Collection(plan, CONFIG, database)
        async with teacher(plan, pool, CONFIG) as writer:
            assert writer is None, "the policy samples, as in training"
            await sample(source, envs, pool, CONFIG, writer)
        await source.close()
        assert {success.task.seed for success in await database.newest_successes()} == {0}
        assert await database.group_count(GroupKind.COLLECTED) == 2


async def test_an_attempt_that_infrastructure_ends_is_made_again_and_not_for_ever(tmp_path: Path) -> None:
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        source = Collection(ORACLE, CONFIG, database)
        order = await source.next()
        for attempt in range(2, 6):
            assert order is not None
            source.failed(order, InfrastructureError("the page died"))
            order = await source.next()
            assert order is not None
            assert order.attempt == attempt
        with pytest.raises(UserError, match="failed 5 times, the last with: the page died: look at the workers' logs"):
            source.failed(order, InfrastructureError("the page died"))


async def test_workers_that_cannot_do_it_are_turned_away(tmp_path: Path) -> None:
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "c", {}, started=0.0)
        run = Run(CONFIG, tmp_path, database, training=False, start=Start(), collect=ORACLE)
        for role, capability in ((pb.ROLE_ENV, "oracle"), (pb.ROLE_ROLLOUT, "forced_text")):
            with pytest.raises(Rejected, match=f"needs the capability {capability}"):
                run._welcome(pb.Hello(role=role))
            assert json.loads(run._welcome(pb.Hello(role=role, capabilities=[capability])))
        with pytest.raises(Rejected, match="does not train"):
            run._welcome(pb.Hello(role=pb.ROLE_TRAIN))
        run.metrics.close()


async def test_what_the_grammar_has_no_words_for_is_told() -> None:
    def env(command: Any) -> Any:
        return pb.Suggested(action=action_to_proto(Click(Point(0.5, 0.5), "middle")))

    async with fleet(env=env, rollout=replica) as (envs, pool):
        session = EnvSession(await envs.acquire(), Order("t", "g", Task("s", "a"), 3))
        turns = OracleTurns(session, pool, make_grammar(CONFIG.agent), 40)
        with pytest.raises(UserError, match=r"agent\.grammar: the oracle's next action has no words"):
            await turns.generate(Prompt((screen(),), (screen(),)))


async def test_sampled_tokens_without_log_probabilities_are_refused() -> None:
    def forgetful(command: Any) -> Any:
        reply = replica(command)
        del reply.logprobs[:1]
        return reply

    def too_old(command: pb.Generate) -> Any:
        command.ClearField("forced_text")
        return replica(command)

    prompt = Prompt((screen(),), (screen(),))
    async with fleet(rollout=forgetful) as (_, pool):
        with pytest.raises(InfrastructureError, match="37 sampled tokens with 36 log-probabilities, not 37"):
            await pool.generate(prompt, 1.0, 40, None)
    async with fleet(rollout=too_old) as (_, pool):
        with pytest.raises(InfrastructureError, match="37 forced tokens with 37 log-probabilities, not 0"):
            await pool.generate(prompt, 1.0, 40, None, "")


# ---- the endpoint ----


class Chat(BaseHTTPRequestHandler):
    """A chat endpoint: it says what `answers` holds, one after the other, statuses or texts."""

    answers: list[int | str]
    asked: list[dict[str, Any]]
    key = "sk-right"

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            self._reply({"error": "busy"}, answer)
        else:
            self._reply({"choices": [{"message": {"role": "assistant", "content": answer}}]})

    def _reply(self, value: dict[str, Any], status: int = 200) -> None:
        if self.headers.get("authorization") != f"Bearer {self.key}":
            status = 401
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    monkeypatch.setattr(endpoint_module, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(endpoint_module, "MOST_DELAY_SECONDS", 0.02)
    Chat.answers, Chat.asked = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Address(f"http://127.0.0.1:{server.server_port}/v1", "teacher", Chat.key, "Be brief.")
    server.shutdown()
    server.server_close()
    thread.join()


async def test_the_endpoint_writes_turn_after_turn(chat: Address) -> None:
    Chat.answers = [429, 503, "\nAction: wait()\n", "Action: click(start_box='(001,002)')"]
    async with fleet(rollout=replica) as (_, pool), Endpoint(chat, 0.7, 40) as endpoint:
        turns = EndpointTurns(endpoint, pool, 40)
        first = await turns.generate(build_prompt(CONFIG.agent, "do it", [], screen("a")))
        assert first.text == "Action: wait()"
        assert first.logprobs == ()
        second = build_prompt(CONFIG.agent, "do it", [Turn(screen("a"), first.token_ids)], screen("b"))
        assert (await turns.generate(second)).text == "Action: click(start_box='(001,002)')"
    last = Chat.asked[-1]
    assert (last["model"], last["temperature"], last["max_tokens"]) == ("teacher", 0.7, 40)
    assert [message["role"] for message in last["messages"]] == ["system", "user", "user", "assistant", "user"]
    assert last["messages"][0]["content"] == "Be brief."
    assert last["messages"][3]["content"] == "Action: wait()"


async def test_an_endpoint_that_stays_busy_fails_the_attempt_and_one_that_refuses_ends_the_run(chat: Address) -> None:
    Chat.answers = [500] * 5
    async with Endpoint(chat, 1.0, 40) as endpoint:
        with pytest.raises(InfrastructureError, match="failed 5 times, the last with 500"):
            await endpoint.write([])
        Chat.answers = [400]
        with pytest.raises(InfrastructureError, match="gave no chat completion: 400"):
            await endpoint.write([])
    async with Endpoint(replace(chat, key="sk-wrong"), 1.0, 40) as endpoint:
        Chat.answers = ["?"]
        with pytest.raises(UserError, match=r"refuses \(401 .*: correct the key") as error:
            await endpoint.write([])
        assert "sk-wrong" not in str(error.value)
    assert "sk-right" not in repr(chat)


def test_the_endpoint_is_asked_before_anything_starts(chat: Address) -> None:
    probe(chat)
    for address, message in (
        (replace(chat, model="other"), "--endpoint-model other is not served there: use teacher"),
        (replace(chat, key=""), r"refuses the key \(401\): give it by --endpoint-key"),
        (replace(chat, url="http://127.0.0.1:1/v1"), "does not answer .* start its server, or correct the URL"),
        (replace(chat, url="http://127.0.0.1:port"), "does not answer .* correct the URL"),
    ):
        with pytest.raises(UserError, match=message):
            probe(address)


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
                replace(step, images=(image,), generation=replace(step.generation, logprobs=())) for step in made.steps
            )
            await database.add_trajectory(replace(made, steps=steps))
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


# ---- curation.pool.sources ----


def training_with(*sources: Path) -> config.Config:
    pool = config.Pool(sources=sources)
    return TRAINING.model_copy(update={"curation": TRAINING.curation.model_copy(update={"pool": pool})})


async def test_what_was_collected_stands_in_where_all_fail_and_a_restart_needs_it_no_more(tmp_path: Path) -> None:
    tasks = [Task("miniwob", "click-color", seed) for seed in (3, 4)] + [Task("miniwob", "click-dialog", 5)]
    made = await collected(tmp_path / "made", tasks)
    (tmp_path / "run").mkdir()
    async with Rig(tmp_path / "run", training_with(made)) as rig:
        assert await rig.database.fates() == {"collected": 2}, "of this run's tasks"
        assert rig.events("pool_filled")[0]["successes"] == 2
        failed = await rig.group(False, False, False, False)
        (used,) = rig.events("pooled")
        assert used["success"] == "collected-1-collect-click-color-4-1", "the newest"
        await rig.group(True, False, False, False)
        first, _ = await rig.batch()
        copy = first.trajectories[-1]
        assert copy.pooled_from == used["success"]
        assert [step.generation.logprobs for step in copy.steps] == [(), ()]
        assert copy.steps[0].images[0].data
        assert used["replaced"] == failed[-1].trajectory_id
    made.rename(tmp_path / "elsewhere")
    async with Rig(tmp_path / "run", training_with(made)) as again:
        assert len(again.events("pool_filled")) == 1, "not read again"
        await again.batch()
        await again.group(False, False, False, False)
        assert again.events("pooled")[-1]["success"] != used["success"], "uses were counted from the database"


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
        ("collect --from oracle --samples 4", "--samples 4 says nothing to --from oracle: leave it out"),
        ("collect --from policy --endpoint http://x", "--endpoint http://x says nothing to --from policy"),
        ("collect --from endpoint", "--from endpoint needs --endpoint URL: add it"),
        ("collect --from endpoint --endpoint http://x", "--from endpoint needs --endpoint-model NAME"),
        ("collect --from endpoint --endpoint x --endpoint-model m", "--endpoint 'x' is no URL"),
        ("collect --from endpoint --endpoint http://x --endpoint-model m --endpoint-key sk-1", "must be env:NAME or"),
        ("collect --from policy --temperature nan", "--temperature nan is no number"),
        ("collect --from policy --seeds 9", "--seeds '9' is not FIRST:LAST"),
        ("collect --from policy --seeds 999990:1000001", "environment.tasks.eval_seeds is [1000000, 1010000)"),
        ("collect --from policy --per-task 5 --seeds 0:3", "seeds 0:3 with 1 samples each are 3: widen --seeds"),
        ("collect --from policy --most-attempts 2", "--most-attempts 2 is less than --per-task 8"),
        ("collect --from oracle --set environment.tasks.names=[click-pie]", "the oracle does not know click-pie: it"),
        ("collect --from policy --checkpoint none", "model.path none: the folder does not exist"),
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
    done = CliRunner().invoke(main, [command, DEMO, *options])
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
            sys.executable, "-m", "dart", "collect", DEMO, "--from", "oracle", "--per-task", "2", "--quiet",
            "--set", "environment.tasks.names=[click-color, enter-text]", "--set", "rollout.replicas=1",
            "--set", "environment.slots=4",
        ],
        cwd=tmp_path, env={**os.environ, "DART_TEST_RUN": str(tmp_path)}, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"train from it: dart train {DEMO} --set" in done.stdout
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
                assert generation.logprobs == ()
                assert tokenizer.decode(generation.token_ids) == generation.text + "<|im_end|>"
                # 160 x 224 pixels in merged patches of 32
                assert generation.prompt_token_ids.count(image_pad) == 35 * len(step.images)
