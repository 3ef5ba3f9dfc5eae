"""Values that no verb of a world may return, and texts that no message takes: they cost their attempt alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dart.config import Environment, EnvWorkerConfig
from dart.core import action as a
from dart.core.types import Image
from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, task_to_proto
from dart.wire.role import CommandError
from dart.workers.env import places
from dart.workers.env.role import EnvRole
from dart.worlds import Action, Env, Observation, Task, Verdict, World, WorldOptions, from_pixels

PICTURE = from_pixels(bytes(3), 1, 1)
LONG = from_pixels(bytes(3 * 300), 300, 1)
CLAIMS_MUCH = PICTURE.data[:16] + b"\xff" * 8 + PICTURE.data[24:]
UNENCODABLE = b"caf\xe9.txt".decode("utf-8", "surrogateescape")
SHOWN = "caf?.txt"

returns: dict[str, object] = {}
"""By verb, what it returns, or raises, in the place of something good. The tests fill it."""


def _answer(verb: str, good: object) -> object:
    value = returns.get(verb, good)
    if isinstance(value, Exception):
        raise value
    return value


class Odd(Env):
    async def reset(self, task: Task) -> Observation:
        return _answer("reset", Observation(PICTURE, "do it"))  # type: ignore[return-value]

    async def act(self, action: Action) -> Observation:
        return _answer("act", Observation(PICTURE))  # type: ignore[return-value]

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        return _answer("judge", Verdict(1.0))  # type: ignore[return-value]

    async def suggest(self) -> Action | None:
        return _answer("suggest", None)  # type: ignore[return-value]


class NotAsync(Env):
    """Its verbs are plain methods, which raise before anything is awaited."""

    async def reset(self, task: Task) -> Observation:
        return Observation(PICTURE, "do it")

    def act(self, action: Action) -> Observation:  # type: ignore[override]
        raise KeyError("at once")

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        return Verdict(1.0)

    def renew(self) -> bool:  # type: ignore[override]
        raise OSError("at once as well")


class Nothing(World):
    """Its first lease returns nothing, and its second one fails in words that no message takes."""

    def __init__(self) -> None:
        self.leases: list[object] = [None, OSError(f"no {UNENCODABLE}"), Odd(WorldOptions(), (1, 1))]

    async def lease(self) -> Env:
        returns["lease"] = self.leases.pop(0)
        return _answer("lease", None)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    returns.clear()
    monkeypatch.setattr(places, "FIRST_DELAY_SECONDS", 0.01)


@asynccontextmanager
async def hosted(world: type = Odd) -> AsyncIterator[tuple[EnvRole, list[pb.Slots]]]:
    raw = {"kind": f"{__name__}:{world.__name__}", "tasks": {"names": ["a"]}, "slots": 1}
    role, said = EnvRole(), list[pb.Slots]()
    try:
        await role.prepare(EnvWorkerConfig(environment=Environment.model_validate(raw)).model_dump_json())
        running = asyncio.create_task(role.run(said.append))
        yield role, said
        assert not running.done(), "the environments are kept as before"
        running.cancel()
        await asyncio.wait({running})
    finally:
        await role.close()


def _assignment(name: str) -> pb.Assignment:
    return pb.Assignment(assignment_id=name, attempt=1)


async def reset(role: EnvRole, name: str = "e") -> pb.Observed:
    task = task_to_proto(Task(role._suite, "a", 1))
    seen = await role.handle(pb.Reset(assignment=_assignment(name), task=task))
    assert isinstance(seen, pb.Observed)
    return seen


async def act(role: EnvRole, action: Action) -> pb.Observed:
    seen = await role.handle(pb.Act(assignment=_assignment("e"), action=action_to_proto(action)))
    assert isinstance(seen, pb.Observed)
    return seen


def suggestion(name: str = "e") -> pb.Suggest:
    return pb.Suggest(assignment=_assignment(name))


async def an_episode(role: EnvRole) -> None:
    await reset(role)
    await role.handle(suggestion())
    await act(role, a.Click(None))
    await act(role, a.Finish())


@pytest.mark.parametrize(
    ("verb", "value", "message"),
    [
        ("reset", None, "reset returned None (NoneType), where an Observation is expected"),
        ("act", None, "act returned None (NoneType), where an Observation is expected"),
        ("act", (PICTURE, 0.0, False), "where an Observation is expected"),
        ("act", Observation(None), "whose image is None (NoneType), where an Image"),  # type: ignore[arg-type]
        ("act", Observation(PICTURE, accessibility_tree=["a"]), "whose accessibility_tree is ['a'] (list), where a"),  # type: ignore[arg-type]
        ("act", Observation(PICTURE, last_action_error=OSError("x")), "whose last_action_error is OSError('x')"),  # type: ignore[arg-type]
        ("reset", Observation(PICTURE, 7), "whose instruction is 7 (int), where a str is expected"),  # type: ignore[arg-type]
        ("reset", Observation(PICTURE, goal_images=None), "whose goal_images are None (NoneType), where a tuple"),  # type: ignore[arg-type]
        ("reset", Observation(PICTURE, goal_images=(b"png",)), "whose goal_images hold b'png' (bytes), where an"),  # type: ignore[arg-type]
        ("reset", Observation(PICTURE), "without an instruction: nothing says what the task is"),
        ("reset", Observation(PICTURE, "do it", done=True), "reset returned an Observation that is done"),
        ("act", Observation(Image("abc", "image/png", 1, 1)), "Act cannot be answered with what the world returned"),  # type: ignore[arg-type]
        ("act", Observation(Image.of(PICTURE.data, "image/png", 2, 1)), "called 2×1, but its bytes say 1×1"),
        ("act", Observation(Image.of(PICTURE.data[:40], "image/png", 1, 1)), "is a PNG that is cut short"),
        ("act", Observation(Image.of(CLAIMS_MUCH, "image/png", 1, 1)), "a picture that claims 4294967295×4294967295"),
        ("act", Observation(Image.of(b"RIFF", "image/webp", 70_000, 70_000)), "a picture that claims 70000×70000"),
        ("act", Observation(LONG), "a picture of 300×1 pixels: a side has at most 32,768, and at most 200 times"),
        ("act", Observation(PICTURE, reward="much"), "whose reward is 'much' (str), where a number is expected"),  # type: ignore[arg-type]
        ("judge", None, "judge returned None (NoneType), where a Verdict is expected"),
        ("judge", 1.0, "judge returned 1.0 (float), where a Verdict is expected"),
        ("suggest", "click", "suggest returned 'click' (str), where an action"),
        ("suggest", a.TypeText(UNENCODABLE), "Suggest cannot be answered with what the world returned (UnicodeEnc"),
    ],
)  # fmt: skip
async def test_a_value_of_another_type_costs_the_attempt_alone(verb: str, value: object, message: str) -> None:
    async with hosted() as (role, said):
        returns[verb] = value
        with pytest.raises(CommandError, match=re.escape(message)) as failed:
            await an_episode(role)
        assert failed.value.code == pb.FAILURE_CODE_ENVIRONMENT
        assert message in role._held["e", 1].failure, "so that it must answer its probe before the next episode"
        await role.handle(pb.Release(assignment=_assignment("e")))
        returns.clear()
        await an_episode(role)
        assert said[-1].count == 1


async def test_texts_that_utf8_cannot_encode_are_told_without_what_it_cannot() -> None:
    async with hosted() as (role, _):
        returns["reset"] = Observation(PICTURE, f"open {UNENCODABLE}")
        assert (await reset(role)).instruction == f"open {SHOWN}"
        returns["act"] = Observation(PICTURE, accessibility_tree=UNENCODABLE, last_action_error=f"no {UNENCODABLE}")
        seen = await act(role, a.Click(None))
        assert (seen.accessibility_tree, seen.last_action_error) == (SHOWN, f"no {SHOWN}")
        returns["judge"] = Verdict(1.0, {UNENCODABLE: ["🙂", UNENCODABLE]})
        assert json.loads((await act(role, a.Finish())).evidence_json) == {SHOWN: ["🙂", SHOWN]}


@pytest.mark.parametrize("error", [OSError(f"no {UNENCODABLE}"), UserError(f"no {UNENCODABLE}")])
async def test_a_failure_in_words_that_utf8_cannot_encode_is_sent(error: Exception) -> None:
    async with hosted() as (role, _):
        returns["reset"] = error
        with pytest.raises(CommandError) as failed:
            await reset(role)
        assert pb.Failure(message=str(failed.value)).message.endswith(f"no {SHOWN}")
        code = pb.FAILURE_CODE_TASK if isinstance(error, UserError) else pb.FAILURE_CODE_ENVIRONMENT
        assert failed.value.code == code


async def test_verbs_that_are_not_async_cost_the_attempt_alone() -> None:
    async with hosted(NotAsync) as (role, said):
        await reset(role)
        with pytest.raises(CommandError, match="act failed: KeyError: 'at once'"):
            await act(role, a.Click(None))
        await role.handle(pb.Release(assignment=_assignment("e")))
        await reset(role, "f")
        assert any("OSError: at once as well" in one.reason for one in said)


async def test_a_lease_of_nothing_is_retried_and_told() -> None:
    async with hosted(Nothing) as (role, said):
        await reset(role)
        reasons = [one.reason for one in said]
        assert any("the probe of a new environment failed: AttributeError" in reason for reason in reasons)
        assert any(reason.endswith(f"no {SHOWN}") for reason in reasons)


async def test_cancelling_a_command_still_cancels_it() -> None:
    async with hosted() as (role, _):
        returns["reset"] = Observation(PICTURE, "do it")
        role._delay = role._delay.model_copy(update={"reset_seconds": (60.0, 60.0)})
        resetting = asyncio.ensure_future(reset(role))
        await asyncio.sleep(0.05)
        resetting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resetting


@pytest.mark.parametrize("reward", [-0.1, 5.0, float("nan")])
async def test_the_reward_of_a_step_is_ignored_whatever_its_range(reward: float) -> None:
    async with hosted() as (role, _):
        await reset(role)
        returns["act"] = Observation(PICTURE, reward=reward)
        assert (await act(role, a.Click(None))).reward == 0
        returns["act"] = Observation(PICTURE, done=True, reward=reward)
        assert (await act(role, a.Click(None))).reward == 1.0, "as the world judges"
