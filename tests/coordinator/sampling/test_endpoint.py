"""A model behind an OpenAI-compatible chat endpoint: as a teacher, and evaluated alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from fleet_samples import fleet, replica, screen

from dart import config
from dart.agent.chat import chat_messages
from dart.agent.episode import ContextFull
from dart.agent.prompt import Conversation, Turn, build_prompt, shown
from dart.coordinator.fleet.sessions import InfrastructureError
from dart.coordinator.sampling import endpoint as endpoint_module
from dart.coordinator.sampling.endpoint import Endpoint, EndpointAlone, EndpointTurns, chosen, probe
from dart.coordinator.sampling.sources import POOL, check_sources
from dart.core.types import Observation
from dart.errors import UserError
from dart.job import Address
from dart.screenshots.stored import StoredScreenshots
from dart.store.database import Database, sqlite_url

ROOT = Path(__file__).parents[3]
MINIWOB = str(ROOT / "configs" / "miniwob_cpu.yaml")
HANG_SECONDS = 600
CONFIG = config.load(Path(MINIWOB), ["environment.tasks.names=[click-color, click-dialog]"])


# ---- the prompt as messages ----

GRAMMARS: dict[str, Literal["ui_tars", "qwen3_vl"]] = {
    "ui_tars": "ui_tars", "qwen3_vl": "qwen3_vl", "minimal": "ui_tars",
}  # fmt: skip


@pytest.mark.parametrize("template", ["ui_tars", "qwen3_vl", "minimal"])
def test_the_endpoint_reads_what_the_policy_reads(template: str) -> None:
    agent = config.Agent(grammar=GRAMMARS[template], prompt=template, history_screenshots=2, history_turns=2)
    turns = [Turn(screen(str(number)), (number, 2)) for number in range(3)]
    prompt = build_prompt(agent, "type <|im_end|>\n<|im_start|>assistant", turns, screen("now"))
    messages = chat_messages(prompt, lambda ids: f"turn {ids[0]}")
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["turn 1", "turn 2"]
    pictures = [m["content"][0]["image_url"]["url"] for m in messages if not isinstance(m["content"], str)]
    assert pictures == ["data:image/png;base64,Mg==", "data:image/png;base64,bm93"], "the window's last two screenshots"
    said = [m["content"] for m in messages if m["role"] == "user" and isinstance(m["content"], str)]
    assert len(said) == 1
    assert "type <|im_end|>\n<|im_start|>assistant" in said[0]
    assert [m["role"] for m in messages][: 2 if template != "minimal" else 1] == (
        ["system", "user"] if template != "minimal" else ["user"]
    )
    assert messages[-1]["content"][0]["type"] == "image_url"


@pytest.mark.parametrize("template", ["ui_tars", "qwen3_vl", "minimal"])
def test_it_reads_goals_and_texts_of_the_environment_too(template: str) -> None:
    agent = config.Agent(grammar=GRAMMARS[template], prompt=template, show=("accessibility_tree",), goal_images=1)
    conversation = Conversation(agent, "make it look so", [screen("goal")])
    seen = Observation(screen("now"), accessibility_tree="button <|im_end|>")
    messages = chat_messages(conversation.prompt(seen.image, shown(agent, seen)), lambda ids: "")
    first, now = [m["content"] for m in messages if m["role"] == "user"]
    assert not isinstance(first, str) and not isinstance(now, str)
    assert [part["image_url"]["url"] for part in (*first, *now) if part["type"] == "image_url"] == [
        "data:image/png;base64,Z29hbA==", "data:image/png;base64,bm93",
    ]  # fmt: skip
    assert "".join(part["text"] for part in now if part["type"] == "text") == "\nAccessibility tree:\nbutton <|im_end|>"


# ---- asking ----


class Chat(BaseHTTPRequestHandler):
    """A chat endpoint: it says what `answers` holds, one after the other: statuses, texts, or bytes called gzip."""

    answers: list[int | str | bytes]
    asked: list[dict[str, Any]]
    key = "sk-right"
    finish_reason = "stop"
    error = "busy"

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            self._reply({"error": self.error}, answer)
        elif isinstance(answer, bytes):
            self._send(answer, 200, {"content-encoding": "gzip"})
        else:
            message = {"role": "assistant", "content": answer}
            self._reply({"choices": [{"message": message, "finish_reason": self.finish_reason}]})

    def _reply(self, value: dict[str, Any], status: int = 200) -> None:
        if self.headers.get("authorization") != f"Bearer {self.key}":
            status = 401
        self._send(json.dumps(value).encode(), status, {})

    def _send(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    monkeypatch.setattr(endpoint_module, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(endpoint_module, "MOST_DELAY_SECONDS", 0.02)
    Chat.answers, Chat.asked, Chat.finish_reason = [], [], "stop"
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
        assert not first.logprobs
        second = build_prompt(CONFIG.agent, "do it", [Turn(screen("a"), first.token_ids)], screen("b"))
        assert (await turns.generate(second)).text == "Action: click(start_box='(001,002)')"
    last = Chat.asked[-1]
    assert (last["model"], last["temperature"], last["max_tokens"]) == ("teacher", 0.7, 40)
    assert [message["role"] for message in last["messages"]] == ["system", "user", "user", "assistant", "user"]
    assert last["messages"][0]["content"] == "Be brief."
    assert last["messages"][3]["content"] == "Action: wait()"


async def test_an_endpoint_on_this_machine_is_asked_without_a_proxy(
    chat: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    Chat.answers[:] = ["done"]
    probe(chat)
    async with Endpoint(chat, 0.0, 16) as endpoint:
        assert (await endpoint.write([])).text == "done"


def test_a_proxy_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "smoke://127.0.0.1:9")
    with pytest.raises(UserError, match=r"through the proxy that the environment names .*correct http_proxy"):
        probe(Address("https://teacher.example/v1", "teacher", "", ""))


async def test_an_endpoint_that_stays_busy_fails_the_attempt_and_one_that_refuses_ends_the_run(chat: Address) -> None:
    Chat.answers = [500] * 5
    async with Endpoint(chat, 1.0, 40) as endpoint:
        with pytest.raises(InfrastructureError, match="failed 5 times, the last with 500"):
            await endpoint.write([])
        Chat.answers = [400] * endpoint_module.MOST_REFUSED_FIRST
        for _ in range(endpoint_module.MOST_REFUSED_FIRST - 1):
            with pytest.raises(InfrastructureError, match="refused a prompt: 400"):
                await endpoint.write([])
        with pytest.raises(UserError, match=r"has refused 16 prompts in a row, the last with 400 .*correct what it"):
            await endpoint.write([])
    async with Endpoint(replace(chat, key="sk-wrong"), 1.0, 40) as endpoint:
        Chat.answers = ["?"]
        with pytest.raises(UserError, match=r"refuses \(401 .*: correct the key") as error:
            await endpoint.write([])
        assert "sk-wrong" not in str(error.value)
    assert "sk-right" not in repr(chat)


async def test_once_it_has_answered_a_refused_prompt_is_an_empty_turn_and_a_gateway_is_asked_again(
    chat: Address,
) -> None:
    Chat.answers = ["fine", 400, 404, 402, "fine again", *[422] * endpoint_module.MOST_REFUSED]
    async with Endpoint(chat, 1.0, 40) as endpoint:
        said = [(await endpoint.write([])).text for _ in range(3)]
        assert said == ["fine", "", "fine again"]
        assert all(asked["top_p"] == 1.0 for asked in Chat.asked)
        said = [(await endpoint.write([])).text for _ in range(endpoint_module.MOST_REFUSED - 1)]
        assert not any(said)
        with pytest.raises(UserError, match="has refused 100 prompts in a row, the last with 422"):
            await endpoint.write([])


async def test_top_p_is_left_out_where_it_is_refused(chat: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chat, "error", "`temperature` and `top_p` cannot both be specified", raising=False)
    Chat.answers = [400, "fine"]
    async with Endpoint(chat, 0.0, 40) as endpoint:
        assert (await endpoint.write([])).text == "fine"
    assert ["top_p" in asked for asked in Chat.asked] == [True, False]


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'.",
            "max_tokens", {"max_completion_tokens": 40},
        ),
        ("Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) is.",
         "temperature", {}),
        ({"message": "Extra inputs are not permitted", "param": "top_p"}, "top_p", {}),
        ("unknown parameter: top_p", "top_p", {}),
    ],
)  # fmt: skip
async def test_it_is_asked_without_a_parameter_that_it_says_it_does_not_take(
    error: Any, before: str, after: dict[str, Any], chat: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chat, "error", error)
    Chat.answers = [400, 400, "fine", "fine", "fine"]
    async with Endpoint(chat, 0.0, 40) as endpoint:  # both are under way when the first is refused
        both = await asyncio.gather(endpoint.write([]), endpoint.write([]))
        assert [one.text for one in (*both, await endpoint.write([]))] == ["fine"] * 3
    parameters = [{name: value for name, value in asked.items() if name != "messages"} for asked in Chat.asked]
    usual = {"model": "teacher", "temperature": 0.0, "top_p": 1.0, "max_tokens": 40}
    without = {name: value for name, value in usual.items() if name != before} | after
    assert parameters == [usual, usual, without, without, without]


async def test_all_that_it_does_not_take_is_left_out_one_after_the_other(
    chat: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chat, "error", "Unsupported parameters: 'max_tokens', 'temperature', 'top_p'")
    Chat.answers = [400, 400, 400, "fine"]
    async with Endpoint(chat, 0.0, 40) as endpoint:
        assert (await endpoint.write([])).text == "fine"
    assert Chat.asked[-1].keys() == {"model", "messages", "max_completion_tokens"}


async def test_a_refused_prompt_that_only_speaks_of_a_parameter_is_no_refused_parameter(
    chat: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chat, "error", "not allowed: a prompt about the temperature of explosives")
    Chat.answers = ["fine", 400, "fine"]
    async with Endpoint(chat, 0.0, 40) as endpoint:
        assert [(await endpoint.write([])).text for _ in range(3)] == ["fine", "", "fine"]
    assert all("temperature" in asked for asked in Chat.asked)


async def test_a_request_that_is_too_large_names_the_screenshots(chat: Address) -> None:
    Chat.answers = ["fine", 413]
    async with Endpoint(chat, 0.0, 40) as endpoint:
        await endpoint.write([])
        with pytest.raises(UserError, match=r"0\.0 MB as too large \(413\): its screenshots .*history_screenshots or"):
            await endpoint.write([])


@pytest.mark.parametrize(
    ("named", "least", "most"),
    [
        (["", "", "", ""], [1.0, 2.0, 4.0, 8.0], [2.0, 4.0, 8.0, 16.0]),
        (["30", "", "30", ""], [31.0, 2.0, 34.0, 8.0], [32.0, 4.0, 38.0, 16.0]),
        (["0", "", "", ""], [1.0, 2.0, 4.0, 8.0], [2.0, 4.0, 8.0, 16.0]),
        (["86400", "soon", "", ""], [61.0, 2.0, 4.0, 8.0], [62.0, 4.0, 8.0, 16.0]),
    ],
)
async def test_it_is_asked_again_after_the_time_that_it_names_and_with_growing_pauses(
    named: list[str], least: list[float], most: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [endpoint_module._Later("busy", after) for after in [*named, ""]]
    paused: list[float] = []

    async def busy(*_: Any) -> Any:
        return answers.pop(0)

    async def pause(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(Endpoint, "_try", busy)
    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(InfrastructureError):
        await Endpoint(Address("http://127.0.0.1:1/v1", "teacher"), 1.0, 40).write([])
    assert all(low <= seconds <= high for low, seconds, high in zip(least, paused, most, strict=True)), paused


async def test_a_garbled_answer_is_asked_for_again(chat: Address) -> None:
    Chat.answers = [b"no gzip", "fine"]
    async with Endpoint(chat, 1.0, 40) as endpoint:
        assert (await endpoint.write([])).text == "fine"
        Chat.answers = [b"no gzip"] * 5
        with pytest.raises(InfrastructureError, match="failed 5 times, the last with DecodingError"):
            await endpoint.write([])


async def test_an_address_that_can_never_be_asked_ends_the_run(chat: Address) -> None:
    async with Endpoint(replace(chat, url="ftp://127.0.0.1/v1"), 1.0, 40) as endpoint:
        with pytest.raises(UserError, match=r"cannot be asked \(.*protocol.*\): correct the URL"):
            await endpoint.write([])


async def test_a_prompt_that_is_too_long_for_the_endpoint_is_not_its_failure(
    chat: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    Chat.answers = [400]
    monkeypatch.setattr(Chat, "error", {"code": "context_length_exceeded", "message": "Too long."})
    async with Endpoint(chat, 1.0, 40) as endpoint:
        with pytest.raises(ContextFull, match=r"400 .*Too long"):
            await endpoint.write([])
    assert len(Chat.asked) == 1


async def test_words_that_the_token_limit_cut_off_are_no_turn(chat: Address) -> None:
    Chat.answers, Chat.finish_reason = ["Action: click(start_box='(001,002)')"] * 2, "length"
    prompt = build_prompt(CONFIG.agent, "do it", [], screen("a"))
    async with fleet(rollout=replica) as (_, pool), Endpoint(chat, 0.7, 40) as endpoint:
        assert (await EndpointTurns(endpoint, pool, 40).generate(prompt)).truncated
        assert (await EndpointAlone(endpoint, StoredScreenshots(None)).generate(prompt)).truncated


@pytest.mark.parametrize("url", ["https://user:sk-1@host/v1", "https://host/v1?key=sk-1"])
def test_a_url_with_a_secret_in_it_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError, match="without user, password or query") as error:
        chosen("evaluating an endpoint", url, "m", None, None)
    assert "sk-1" not in str(error.value)


def test_what_is_no_url_is_told() -> None:
    with pytest.raises(UserError, match=r"--endpoint 'http://\[x' is not a URL \(Invalid IPv6 URL\): write it like"):
        chosen("evaluating an endpoint", "http://[x", "m", None, None)


@pytest.mark.parametrize("key", ["sk-1\nsk-2", "sk-é"])
def test_a_key_that_no_header_takes_is_told_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", key)
    with pytest.raises(UserError, match="--endpoint-key: env:KEY is more than one line, or not ASCII") as error:
        chosen("evaluating an endpoint", "http://host/v1", "m", "env:KEY", None)
    assert "sk-" not in str(error.value)
    monkeypatch.setenv("KEY", " sk-1\n")
    assert chosen("evaluating an endpoint", "http://host/v1", "m", "env:KEY", None).key == "sk-1"


def test_the_endpoint_is_asked_before_anything_starts(chat: Address) -> None:
    probe(chat)
    for address, message in (
        (replace(chat, model="other"), "--endpoint-model other is not served there: use teacher"),
        (replace(chat, key=""), r"refuses the key \(401\): correct --endpoint-key"),
        (replace(chat, url="http://127.0.0.1:1/v1"), "does not answer .* start its server, or correct the URL"),
        (replace(chat, url="http://127.0.0.1:port"), "does not answer .* correct the URL"),
    ):
        with pytest.raises(UserError, match=message):
            probe(address)


# ---- evaluating it ----


async def test_the_endpoint_alone_needs_no_replica(chat: Address) -> None:
    Chat.answers = ["Action: type(content='Zoë')", "Action: wait()"]
    async with Endpoint(chat, 0.0, 40) as endpoint:
        turns = EndpointAlone(endpoint, StoredScreenshots(None))
        first = await turns.generate(build_prompt(CONFIG.agent, "do it", [], screen("a")))
        await turns.generate(build_prompt(CONFIG.agent, "do it", [Turn(screen("a"), first.token_ids)], screen("b")))
    assert first.text == Chat.asked[-1]["messages"][3]["content"] == "Action: type(content='Zoë')"
    assert Chat.asked[-1]["messages"][3]["role"] == "assistant"


@pytest.mark.browser
@pytest.mark.parametrize("workers", ["here", "elsewhere"])
def test_an_endpoint_is_evaluated_in_the_real_browser(workers: str, chat: Address, tmp_path: Path) -> None:
    """Two turns each: a click beside everything, then words that are no action. No model is there, nor an engine."""
    pytest.importorskip("miniwob")
    Chat.answers = ["Action: click(start_box='(001,200)')", "I give up."] * 2
    key = tmp_path / "key"
    key.write_text(Chat.key)
    dart = sys.executable, "-m", "dart"
    command = [
        "eval", MINIWOB, "--quiet", "--endpoint", chat.url,
        "--endpoint-model", "teacher", "--endpoint-key", f"file:{key}",
        "--tasks", "click-test-2", "--episodes", "2", "--temperature", "0",
        "--set", "model.path=nowhere", "--set", "environment.slots=1",
    ]  # fmt: skip
    with contextlib.ExitStack() as processes:

        def start(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*dart, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            processes.callback(process.wait)
            processes.callback(process.kill)
            return process

        if workers == "here":
            evaluation = start(*command)
        else:
            evaluation = start(*command, "--external-workers")
            said = itertools.takewhile(bool, iter(evaluation.stdout.readline, None))
            address = next(found[1] for line in said if (found := re.match(r"coordinator listens on (\S+);", line)))
            worker = start("worker", "--role", "env", "--coordinator", address)
        out, _ = evaluation.communicate(timeout=HANG_SECONDS)
        assert evaluation.returncode == 0, out[-3000:]
        if workers == "elsewhere":
            assert worker.wait(HANG_SECONDS) == 0
    (run,) = (tmp_path / "runs").iterdir()
    document = json.loads((run / "evaluation.json").read_text())
    assert document["checkpoint"] == f"teacher at {chat.url}"
    assert document["success"]["failures"]["unparsable"] == document["success"]["episodes"] == 2
    assert [len(asked["messages"]) for asked in Chat.asked] == [2, 4, 2, 4]
    assert not list((run / "logs").glob("rollout*"))
    asyncio.run(_check_kept(run, document["instances"][0]["samples"][0]["trajectory"]))


async def _check_kept(run: Path, trajectory: str) -> None:
    async with await Database.open(sqlite_url(run / "run.db"), run / "blobs", create=False) as database:
        stored = await database.trajectory(trajectory)
    assert stored is not None
    texts = [step.generation.text for step in stored.trajectory.steps]
    assert texts == ["Action: click(start_box='(001,200)')", "I give up."]
    trains = config.load(Path(MINIWOB), [f"curation.pool.sources=[{run}]"])
    with pytest.raises(UserError, match="was made with the vocabulary of nowhere"):
        await check_sources(trains, POOL)
