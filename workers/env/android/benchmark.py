"""A client of AndroidWorld's own server (`server/android_server.py` in google-research/android_world), for one device.

The server prepares tasks and grades them; actions and screenshots go by adb (`gestures` says why; the server sends a
screenshot as a list of eight million numbers). It has no sessions: whoever asks last changes the one suite and the one
device, so a device in use here must be in use nowhere else.

An episode is what AndroidWorld's own runner makes of it (`suite_utils.py`, `episode_runner.py`): prepare the task, go
home, act, grade, tear down. The grade counts only if the policy declared the end, whichever status it gave; at the step
limit it is 0. An answer is sent before the grade. What the server answers with an error 500 while grading is code of a
task that could not cope with the state that the policy left: 0, with the error as evidence, if server and device are
well afterwards.
"""

from __future__ import annotations

import logging
import math
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from dart.core.action import Action, Finish
from dart.errors import UserError
from dart.workers.env.android.adb import DeviceError
from dart.workers.env.android.options import Family
from dart.worlds import Verdict

log = logging.getLogger(__name__)
M = TypeVar("M", bound=BaseModel)
Parameters = dict[str, str | int | bool]
HEALTH_SECONDS = 20.0
INDEX = 0
"""Of the instance in its suite: each suite is made with one instance of each task."""


class Tasks(BaseModel):
    task_list: list[str]


class _Goal(BaseModel):
    goal: str


class _Length(BaseModel):
    length: int


class _Score(BaseModel):
    score: float


class Benchmark:
    """The episodes of one device, of AndroidWorld's tasks."""

    step_limit: int | None = None

    def __init__(self, url: str, family: Family, seconds: float, client: httpx.AsyncClient) -> None:
        self._url, self._family, self._seconds, self._client = url, family, seconds, client
        self._goal = ""
        self._name = ""
        """Of the task that is prepared and not torn down; empty if there is none."""

    async def begin(self, name: str, seed: int) -> str:
        """Prepare the task; returns its goal. Raises UserError for a task that the server does not have.

        The seed is that of AndroidWorld's suite, as in its `run.py --task_random_seed`, and the instance is the first:
        what a suite of one instance each has.
        """
        made: Parameters = {"n_task_combinations": 1, "seed": seed, "task_family": self._family}
        await self._ask("GET", "/suite/reinitialize", made)
        names = _read(Tasks, await self._ask("GET", "/suite/task_list", {"max_index": -1})).task_list
        if name not in names:
            raise UserError(f"environment.tasks.names: the AndroidWorld server {self._url} has no task {name!r}")
        task: Parameters = {"task_type": name, "task_idx": INDEX}
        self._name = name  # also if it fails halfway, so that it is torn down
        await self._ask("POST", "/task/initialize", task)
        await self._ask("POST", "/reset", {"go_home": True})
        self._goal = _read(_Goal, await self._ask("GET", "/task/goal", task)).goal
        return self._goal

    async def verdict(self, last: Action, at_limit: bool) -> Verdict:
        declared = isinstance(last, Finish) and not at_limit
        if isinstance(last, Finish) and last.answer:
            await self._ask("POST", "/execute_action", body={"action_type": "answer", "text": last.answer})
        task: Parameters = {"task_type": self._name, "task_idx": INDEX}
        answer = await self._send("GET", "/task/score", task)
        if answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
            await self._same_suite(task)
            log.warning("%s: AndroidWorld's grading of %s failed, which counts as 0", self._url, self._name)
            return Verdict(0.0, {"score_error": answer.text[-500:], "declared": declared})
        score = _read(_Score, _good(answer)).score
        if not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise DeviceError(f"{self._url} graded {self._name} with {score}, which is not in [0, 1]")
        return Verdict(score if declared else 0.0, {"score": score, "declared": declared})

    async def _same_suite(self, task: Parameters) -> None:
        """Raises DeviceError if the server has lost the task: it was restarted, or somebody else uses it."""
        length = _read(_Length, await self._ask("GET", "/suite/task_length", {"task_type": self._name})).length
        goal = _read(_Goal, await self._ask("GET", "/task/goal", task)).goal if length else ""
        if length != INDEX + 1 or goal != self._goal:
            raise DeviceError(f"{self._url} has another suite now: was it restarted, or does somebody else use it?")

    async def end(self) -> None:
        """Tear the task down. Raises DeviceError."""
        if self._name:
            name, self._name = self._name, ""
            await self._ask("POST", "/task/tear_down", {"task_type": name, "task_idx": INDEX})

    async def open_app(self, name: str) -> str:
        """By the name that AndroidWorld knows it by; one that it does not know, it takes for a package."""
        answer = await self._send("POST", "/execute_action", body={"action_type": "open_app", "app_name": name})
        return "" if answer.is_success else f"AndroidWorld's server could not open {name[:80]!r}"

    async def alive(self) -> bool:
        try:
            return (await self._send("GET", "/health", seconds=HEALTH_SECONDS)).is_success
        except DeviceError:
            return False

    async def _ask(
        self, method: str, route: str, parameters: Parameters | None = None, body: dict[str, str] | None = None
    ) -> httpx.Response:
        return _good(await self._send(method, route, parameters, body))

    async def _send(
        self, method: str, route: str, parameters: Parameters | None = None, body: dict[str, str] | None = None,
        seconds: float | None = None,
    ) -> httpx.Response:  # fmt: skip
        try:
            return await self._client.request(
                method, self._url + route, params=parameters, json=body, timeout=seconds or self._seconds
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DeviceError(f"{self._url}{route} did not answer: {type(error).__name__}: {error}") from error


def _read(form: type[M], answer: httpx.Response) -> M:
    """Raises DeviceError for an answer of another form."""
    try:
        return form.model_validate_json(answer.content)
    except ValidationError:
        raise DeviceError(
            f"{answer.url} did not answer as an AndroidWorld server does: {answer.text[:200]!r}"
        ) from None


def _good(answer: httpx.Response) -> httpx.Response:
    """Raises DeviceError for an answer that is an error."""
    if not answer.is_success:
        raise DeviceError(f"{answer.url} answered {answer.status_code}: {answer.text[-300:]}")
    return answer
