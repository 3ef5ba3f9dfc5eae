"""A model behind an OpenAI-compatible chat endpoint: a teacher that collects, or a policy that is evaluated.

`probe` asks for its models before anything starts. `Endpoint.write` asks for one turn. If the endpoint is busy or
fails, it retries with growing pauses, and in the end raises InfrastructureError, so that the attempt is given out
again. At most one request per environment is in progress, because an episode waits for its turn.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from dart.agent.chat import ChatMessage, chat_messages
from dart.agent.episode import ContextFull
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import InfrastructureError
from dart.core.loopback import is_loopback
from dart.core.types import Generation, Prompt
from dart.errors import UserError
from dart.job import Address
from dart.screenshots.stored import ScreenshotLost, StoredScreenshots
from dart.wire.channel import read_token

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)
PROBE_SECONDS = 10.0
ANSWER_SECONDS = 120.0
TRIES = 5
FIRST_DELAY_SECONDS, MOST_DELAY_SECONDS = 1.0, 60.0
REFUSED = (401, 403, 404)
"""If nothing was ever answered, a retry would fail in the same way: the key, the model or the URL is wrong."""
LATER = (402, 408, 409, 425, 429)
"""Status codes that are not the prompt's fault (credit, time, conflicts, load): the request is made again later."""
OF_A_PROMPT = (400, 422, 451)
TOO_LARGE = 413
NEWER_NAMES = {"max_tokens": "max_completion_tokens"}
OPTIONAL = ("top_p", "temperature")
"""Parameters that servers may refuse, and that can be left out."""
NOT_TAKEN = re.compile(
    r"unsupported|not supported|n.t support|not support|unrecogni[sz]ed|unknown|unexpected|not permitted|not allowed|"
    r"deprecated|cannot both|only the default", re.IGNORECASE
)  # fmt: skip
MOST_REFUSED_FIRST, MOST_REFUSED = 16, 100
"""Prompts in a row that it may refuse before it has answered any, and afterwards."""
TOO_LONG = (
    "context_length_exceeded", "exceed_context_size", "maximum context length", "longer than the maximum",
    "model's context length",
)  # fmt: skip
"""What servers say when a prompt does not fit: OpenAI, llama.cpp, vLLM twice, SGLang."""


def chosen(asker: str, url: str | None, model: str | None, key: str | None, system: Path | None) -> Address:
    """The address from the command line's `--endpoint...` options. Raises UserError."""
    if url is None or model is None:
        missing = "--endpoint URL" if url is None else "--endpoint-model NAME"
        raise UserError(f"{asker} needs {missing}: add it, for example --endpoint http://127.0.0.1:8000/v1")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--endpoint {url!r} is not a URL: write it like http://127.0.0.1:8000/v1")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UserError(f"--endpoint {url!r} is not a URL ({error}): write it like http://127.0.0.1:8000/v1") from None
    if parts.query or "@" in parts.netloc:
        raise UserError(
            "--endpoint must be a base URL without user, password or query, because it is shown and stored: "
            "give the key with --endpoint-key"
        )
    if key is not None and not key.startswith(("env:", "file:")):
        raise UserError("--endpoint-key must be env:NAME or file:PATH, so that no secret is on a command line")
    try:
        words = system.read_text(encoding="utf-8") if system else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--endpoint-system {system} cannot be read ({error}): name a text file") from None
    return Address(url.rstrip("/"), model, read_token(key, "--endpoint-key") if key else "", words)


def probe(address: Address) -> None:
    """Check that the endpoint answers and serves the model. Raises UserError."""
    if importlib.util.find_spec("httpx") is None:
        raise UserError("an endpoint needs the package httpx: run `pip install 'dart-gui-rl[endpoint]'`")
    import httpx

    try:
        answer = httpx.get(
            f"{address.url}/models", headers=address.headers, timeout=PROBE_SECONDS, trust_env=_may_use_proxy(address)
        )
    except (ImportError, ValueError) as error:  # of httpx, for a kind of proxy that it does not speak
        raise UserError(
            f"--endpoint {address.url} cannot be asked through the proxy that the environment names ({error}): correct "
            "http_proxy, https_proxy or all_proxy, or name the host in no_proxy"
        ) from None
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise UserError(
            f"--endpoint {address.url} does not answer ({error}): start its server, or correct the URL, which is "
            "OpenAI's base URL, for example http://127.0.0.1:8000/v1"
        ) from None
    try:
        served = [str(model["id"]) for model in answer.json()["data"]] if answer.is_success else []
    except (ValueError, KeyError, TypeError):
        served = []
    if answer.status_code in REFUSED[:2]:
        raise UserError(f"--endpoint {address.url} refuses the key ({answer.status_code}): correct --endpoint-key")
    if not served:
        raise UserError(
            f"--endpoint {address.url} lists no models (GET {address.url}/models gave {answer.status_code}): "
            "name the base URL of an OpenAI-compatible server, for example http://127.0.0.1:8000/v1"
        )
    if address.model not in served:
        raise UserError(f"--endpoint-model {address.model} is not served there: use {', '.join(served[:10])}")


def _names(said: str, parameter: str) -> bool:
    """Whether the text means the parameter, and does not just contain the word."""
    return re.search(rf"(?:[`'\"*]|parameters?\W{{1,4}}){parameter}\b", said, re.IGNORECASE) is not None


def _may_use_proxy(address: Address) -> bool:
    """Whether the environment's proxies are for this endpoint. One on this machine is asked directly."""
    return not is_loopback(urlsplit(address.url).hostname or "")


@dataclass(frozen=True, slots=True)
class Words:
    text: str
    cut_off: bool = False
    """The token limit cut them off."""


@dataclass(frozen=True, slots=True)
class _Later:
    """Worth a retry, after `after` seconds if the endpoint names a time."""

    why: str
    after: str = ""

    @property
    def named(self) -> float:
        """Seconds, at most `MOST_DELAY_SECONDS`; 0 if it names none."""
        return min(float(self.after), MOST_DELAY_SECONDS) if self.after.isdecimal() else 0.0


class Endpoint:
    """An open client; an async context manager."""

    def __init__(
        self, address: Address, temperature: float, max_tokens: int, as_written: Callable[[str], str] = str
    ) -> None:
        """`as_written`: of the grammar (`dart.agent.grammar.Grammar`), for the turns that come back."""
        self._address, self._as_written = address, as_written
        # Sent explicitly, because servers have their own defaults, such as the model's generation_config.json.
        self._body = {"model": address.model, "temperature": temperature, "top_p": 1.0, "max_tokens": max_tokens}
        self._answered = False
        """It has given a completion, so key, model, URL and parameters are right."""
        self._refused_in_a_row = 0
        self._client: httpx.AsyncClient

    async def __aenter__(self) -> Self:
        import httpx

        self._client = httpx.AsyncClient(
            headers=self._address.headers,
            timeout=ANSWER_SECONDS,
            limits=httpx.Limits(max_connections=None),
            trust_env=_may_use_proxy(self._address),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def write(self, messages: list[ChatMessage]) -> Words:
        """One turn. Raises InfrastructureError after `TRIES`, UserError if retries are pointless, ContextFull."""
        if self._address.system:
            messages = [{"role": "system", "content": self._address.system}, *messages]
        delay, failed = FIRST_DELAY_SECONDS, _Later("")
        for number in range(TRIES):
            if number:
                delay = min(2 * delay, MOST_DELAY_SECONDS)
                # Not all at the same moment: every environment's turn may have been told the same time.
                await asyncio.sleep(failed.named + delay * random.uniform(0.5, 1.0))
            said = await self._try(messages)
            if isinstance(said, Words):
                return said
            failed = said
        why = f"--endpoint {self._address.url} failed {TRIES} times, the last with {failed.why}"
        raise InfrastructureError(why, f"--endpoint {self._address.url}")

    async def _try(self, messages: list[ChatMessage]) -> Words | _Later:
        import httpx

        try:
            sent = self._body | {"messages": messages}
            answer = await self._client.post(f"{self._address.url}/chat/completions", json=sent)
        except (httpx.UnsupportedProtocol, httpx.TooManyRedirects) as error:
            raise UserError(f"--endpoint {self._address.url} cannot be asked ({error}): correct the URL") from None
        except httpx.RequestError as error:  # of the network, or an answer that does not decode
            return _Later(f"{type(error).__name__} {error}")
        said = f"{answer.status_code} {answer.text[:200]}"
        if answer.status_code in LATER or answer.status_code >= 500:
            return _Later(said, answer.headers.get("retry-after", ""))
        if answer.status_code in REFUSED:
            if self._answered:  # a gateway whose server starts again
                return _Later(said)
            raise UserError(f"--endpoint {self._address.url} refuses ({said}): correct the key, the model or the URL")
        if answer.is_client_error and any(words in answer.text for words in TOO_LONG):
            raise ContextFull(f"--endpoint {self._address.url}: {said}")
        if answer.status_code == TOO_LARGE:
            raise UserError(
                f"--endpoint {self._address.url} refuses a request of {len(answer.request.content) / 1e6:.1f} MB as "
                "too large (413): its screenshots are too large for that server, or for a proxy before it: lower "
                "agent.history_screenshots or environment.viewport, or raise the server's limit on requests (of nginx, "
                "client_max_body_size)"
            )
        if answer.status_code in OF_A_PROMPT:
            return _Later(said) if self._does_without(sent, answer.text) else self._refused(said)
        try:
            choice = answer.json()["choices"][0]
            text = str(choice["message"]["content"] or "").strip()
        except (ValueError, KeyError, IndexError, TypeError):
            return _Later(f"no chat completion: {said}")
        self._answered, self._refused_in_a_row = True, 0
        text = self._as_written(text.encode("utf-8", "replace").decode())
        return Words(text, choice.get("finish_reason") == "length")

    def _does_without(self, sent: Mapping[str, object], said: str) -> bool:
        """Whether the server has named a parameter of ours that it does not take; later requests do without it."""
        if not NOT_TAKEN.search(said):
            return False
        refused = [name for name in (*NEWER_NAMES, *OPTIONAL) if name in sent and _names(said, name)]
        for name in refused[:1]:
            value = self._body.pop(name, None)  # None: another request has been told the same
            if value is not None and name in NEWER_NAMES:
                self._body[NEWER_NAMES[name]] = value
            elif value is not None:
                log.warning("--endpoint %s does not take %s %s, and uses its own", self._address.url, name, value)
        return bool(refused)

    def _refused(self, said: str) -> Words | _Later:
        """A content filter may refuse this prompt: the policy's turn is then empty, which is no action. To try again
        until it passes would count only the attempts that do.

        Raises UserError if it refuses whatever it is asked, and InfrastructureError while that is not clear.
        """
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= (MOST_REFUSED if self._answered else MOST_REFUSED_FIRST):
            raise UserError(
                f"--endpoint {self._address.url} has refused {self._refused_in_a_row} prompts in a row, the last with "
                f"{said}: correct what it names, for example rollout.max_tokens, --temperature, or the number of "
                "images that its server allows (agent.history_screenshots)"
            )
        if not self._answered:
            why = f"--endpoint {self._address.url} refused a prompt: {said}"
            raise InfrastructureError(why, f"--endpoint {self._address.url}")
        log.warning("--endpoint %s refused a prompt, which counts as an empty answer: %s", self._address.url, said)
        return Words("")


class EndpointTurns:
    """`dart.agent.episode.Policy`: the teacher writes, a replica makes the tokens."""

    def __init__(self, endpoint: Endpoint, policy: RolloutPool, max_tokens: int) -> None:
        self._endpoint, self._policy, self._max_tokens = endpoint, policy, max_tokens
        self._replica: str | None = None
        self._said: dict[tuple[int, ...], str] = {}

    async def generate(self, prompt: Prompt) -> Generation:
        stored = await _bytes_of(prompt, self._policy.screenshots)
        words = await self._endpoint.write(chat_messages(prompt, lambda ids: self._said[tuple(ids)], stored))
        generation, self._replica = await self._policy.generate(
            prompt, 0.0, self._max_tokens, self._replica, words.text
        )
        self._said[tuple(generation.token_ids)] = words.text
        return replace(generation, truncated=generation.truncated or words.cut_off)


class EndpointAlone:
    """`dart.agent.episode.Policy`: the endpoint is the policy, and there is no replica.

    The bytes of its text serve as a turn's tokens, which only the history of later turns reads. A run made of them has
    no vocabulary, so nothing can train on it.
    """

    def __init__(self, endpoint: Endpoint, screenshots: StoredScreenshots) -> None:
        self._endpoint, self._screenshots = endpoint, screenshots

    async def generate(self, prompt: Prompt) -> Generation:
        stored = await _bytes_of(prompt, self._screenshots)
        words = await self._endpoint.write(chat_messages(prompt, lambda ids: bytes(ids).decode(), stored))
        return Generation((), tuple(words.text.encode()), (), (), words.text, truncated=words.cut_off)


async def _bytes_of(prompt: Prompt, screenshots: StoredScreenshots) -> Mapping[bytes, bytes]:
    """Digest → bytes, for the screenshots whose `data` is empty. Raises InfrastructureError."""
    try:
        return await screenshots.missing(prompt.images)
    except ScreenshotLost as error:
        raise InfrastructureError(str(error)) from error
