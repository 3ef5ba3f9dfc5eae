"""The env worker as the host of any world: boots, leases, renewals, verdicts and failures, without a browser."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from hosting.worlds import PICTURE, Actor, Threads, assignment, hosted, script

from dart.core import action as a
from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.wire import rules
from dart.wire.role import CommandError
from dart.workers.env import places
from dart.worlds import (
    Action,
    Full,
    Observation,
    SyncEnv,
    Task,
    Verdict,
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "FIRST_DELAY_SECONDS", 0.01)
    script.begin_anew()
    Threads.made.clear()
    Threads.hang.clear()


# ---- episodes ----


async def test_an_episode_that_the_world_ends() -> None:
    async with hosted() as host:
        await host.until(1, 1)
        seen = await host.reset("e")
        assert (seen.instruction, seen.image.data, seen.done) == ("do a", PICTURE.data, False)
        assert not (await host.act("e", a.Click(None))).done
        over = await host.act("e", a.Wait(1.0))
        assert (over.done, over.reward, over.image.data) == (True, 0.5, PICTURE.data)
        assert json.loads(over.evidence_json) == {"seen": "twice"}
        await host.release("e")
        await host.until(1, 2)
    assert script.log == ["lease", "reset", "act Click", "acted", "act Wait", "acted", "judge Wait False", "renew"]


class Teller(SyncEnv):
    """Tells more than a screenshot: a tree of as many characters as the seed says, and as many pictures."""

    def reset(self, task: Task) -> Observation:
        self.size = int(task.name)
        return Observation(PICTURE, "do it", goal_images=(PICTURE,) * self.size)

    def act(self, action: Action) -> Observation:
        tree = "x" * ((1 << 18) + self.size - 1)
        return Observation(PICTURE, accessibility_tree=tree, last_action_error="no" * self.size * 4096)

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        return Verdict(0.0)


async def test_texts_are_cut_to_what_a_message_takes_and_too_many_pictures_are_the_tasks_fault() -> None:
    async with hosted(Teller) as host:
        seen = await host.reset("e", "2")
        assert [image.data for image in seen.goal_images] == [PICTURE.data] * 2
        acted = await host.act("e", a.Click(None))
        assert rules.BODIES["observed"].violation(acted) is None
        assert acted.accessibility_tree.endswith("of 262,145 characters)")
        assert acted.last_action_error.endswith("of 16,384 characters)")
        await host.release("e")
        with pytest.raises(CommandError, match="its instruction has 17 pictures, and 16 can be sent") as error:
            await host.reset("f", "17")
        assert error.value.code == pb.FAILURE_CODE_TASK


async def test_an_action_that_the_world_does_not_offer_is_told() -> None:
    async with hosted() as host:
        await host.reset("e")
        told = await host.act("e", a.Code("sh", "ls"))
        assert told.last_action_error == "this environment does not offer the action code"


@pytest.mark.parametrize(
    ("last", "log"),
    [
        (a.Finish(answer="7"), ["judge Finish False"]),
        (a.Click(None), ["act Click", "acted", "judge Click True"]),
        (a.Code("sh", "rm -r /"), ["act Observe", "acted", "judge Code True"]),
    ],
)
async def test_the_last_action(last: Action, log: list[str]) -> None:
    """A finish is the judge's; at the limit the action counts; what the world does not offer is not carried out."""
    async with hosted() as host:
        await host.reset("e")
        script.log.clear()
        assert (await host.act("e", last, last=True)).done
    assert script.log == log


async def test_a_zero_is_believed_only_of_one_that_is_alive() -> None:
    script.reward = 0.0
    async with hosted() as host:
        await host.reset("e")
        assert (await host.act("e", a.Finish(), last=True)).reward == 0.0
        await host.release("e")
        await host.reset("f")
        script.alive = False
        with pytest.raises(CommandError, match="verdict of 0 is discarded") as failed:
            await host.act("f", a.Finish(), last=True)
    assert failed.value.code == pb.FAILURE_CODE_ENVIRONMENT


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), "act failed: KeyError: 'x'"),
        (UserError("no"), "act failed: UserError"),
        (TimeoutError("no answer"), "act failed: TimeoutError: no answer"),
        (None, "than 0.3 s"),
    ],
)
async def test_what_a_world_raises_costs_the_attempt_alone(error: Exception | None, message: str) -> None:
    script.raises = error
    limits: dict[str, float] = {}
    if error is None:
        script.gate.clear()  # it hangs
        limits["act"] = 0.3
    async with hosted(timeouts=limits) as host:
        await host.reset("e")
        with pytest.raises(CommandError, match=message) as failed:
            await host.act("e", a.Click(None))
        assert failed.value.code == pb.FAILURE_CODE_ENVIRONMENT
        await host.release("e")
        assert (await host.reset("f")).instruction == "do a"


class Asks(SyncEnv):
    """Notes the thread on which the tasks are checked, which may take as long as a server takes to answer."""

    checked_on: list[int] = []  # noqa: RUF012

    @classmethod
    def check_task(cls, name: str) -> None:
        cls.checked_on.append(threading.get_ident())

    def reset(self, task: Task) -> Observation:
        return Observation(PICTURE, "do it")

    def act(self, action: Action) -> Observation:
        return Observation(PICTURE)

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        return Verdict(0.0)


async def test_the_loop_does_not_wait_for_the_check_of_the_tasks() -> None:
    async with hosted(Asks):
        pass
    assert Asks.checked_on and threading.get_ident() not in Asks.checked_on


async def test_a_verdict_that_is_none_is_the_worlds_failure() -> None:
    script.reward = float("nan")
    async with hosted() as host:
        await host.reset("e")
        with pytest.raises(CommandError, match="a reward is a number in") as failed:
            await host.act("e", a.Finish(), last=True)
    assert failed.value.code == pb.FAILURE_CODE_ENVIRONMENT


async def test_what_the_command_has_wrong() -> None:
    async with hosted() as host:
        for wrong, message in (
            (host.reset("e", suite="other"), "is of suite 'other', this worker runs"),
            (host.reset("e", task="none"), "there is no task none: use a"),
            (host.act("f", a.Click(None)), "send Reset first"),
            (host.role.handle(pb.Suggest(assignment=assignment("e"))), "send Reset first"),
        ):
            with pytest.raises(CommandError, match=message) as refused:
                await wrong
            wrong_task = "there is no task" in message
            assert refused.value.code == (pb.FAILURE_CODE_TASK if wrong_task else pb.FAILURE_CODE_INVALID)
        await host.reset("e")
        with pytest.raises(CommandError, match="has no oracle: collect from a policy or an endpoint"):
            await host.role.handle(pb.Suggest(assignment=assignment("e")))


# ---- what there is ----


async def test_a_release_never_overtakes_a_verb_that_is_running() -> None:
    script.gate.clear()
    async with hosted() as host:
        await host.reset("e")
        acting = asyncio.ensure_future(host.act("e", a.Click(None)))
        while "act Click" not in script.log:
            await asyncio.sleep(0)
        await host.release("e")
        await host.until(1, 1)
        assert "renew" not in script.log
        script.gate.set()
        await acting
        await host.until(1, 2)
    assert script.log[-2:] == ["acted", "renew"]


async def test_a_release_while_its_reset_waits_for_an_environment_leaves_none_held() -> None:
    async with hosted() as host:
        await host.reset("e")
        waiting = asyncio.ensure_future(host.reset("f"))
        await asyncio.sleep(0)
        await host.release("f")
        await host.release("e")
        with pytest.raises(CommandError, match=r"assignment f \(attempt 1\) was released before its Reset was over"):
            await waiting
        await host.reset("g")
        with pytest.raises(CommandError, match=r"assignment f .* holds no environment"):
            await host.act("f", a.Click(None))


async def test_a_release_during_its_reset_leaves_no_episode() -> None:
    script.opening.clear()
    async with hosted() as host:
        resetting = asyncio.ensure_future(host.reset("e"))
        while "reset" not in script.log:
            await asyncio.sleep(0)
        await host.release("e")
        script.opening.set()
        with pytest.raises(CommandError, match="was released before its Reset was over"):
            await resetting
        with pytest.raises(CommandError, match=r"assignment e .* holds no environment"):
            await host.act("e", a.Click(None))
        await host.reset("f")


async def test_each_environment_is_offered_when_it_has_booted_and_answered_its_probe() -> None:
    script.alive = False
    async with hosted(slots=3) as host:
        while len(host.said) < 9:
            await asyncio.sleep(0.005)
        assert host.now.count == host.now.granted == 0
        assert "did not answer its probe" in host.now.reason
        script.alive = True
        told = await host.until(3, 3)
        assert told.reason == ""


async def test_no_room_is_no_failure_and_is_asked_for_again() -> None:
    script.leases = [None, Full("429: 1 of 1 in use"), Full("429: 1 of 1 in use"), None]
    async with hosted(slots=2) as host:
        await host.until(1, 1)
        assert any(told.reason == "429: 1 of 1 in use" for told in host.said)
        await host.until(2, 2)
        assert host.now.reason == ""


async def test_one_that_cannot_be_renewed_is_replaced() -> None:
    script.renews = False
    async with hosted() as host:
        await host.reset("e")
        script.leases = [OSError("no address left")]
        await host.release("e")
        await host.until(1, 2)
    reasons = [told.reason for told in host.said]
    assert "an environment could not be renewed" in reasons
    assert any("OSError: no address left" in reason for reason in reasons)
    assert script.log == ["lease", "reset", "renew", "dispose", "lease"]


async def test_a_world_that_cannot_be_used_at_all_ends_the_worker() -> None:
    script.leases = [UserError("no image: name one in environment.options.image")]
    with pytest.raises(ExceptionGroup, match="unhandled") as ended:
        async with hosted() as host:
            await host.role.run(host.say)
    assert isinstance(ended.value.exceptions[0], UserError)


async def test_one_that_cannot_be_used_once_others_have_been_is_only_one() -> None:
    """A machine whose screen an episode has resized, say: no mistake in the config, and the others go on."""
    script.renews = False
    async with hosted() as host:
        await host.reset("e")
        script.leases = [UserError("the screen has another size")]
        await host.release("e")
        await host.until(1, 2)
    assert any(told.reason == "the screen has another size" for told in host.said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"color": "blue"}}, r"environment\.options\.color is not a known field.*did you mean colour\?"),
        ({"options": {"colour": 3}}, r"environment\.options\.colour \(it is 3\)"),
        ({"kind": "no_such_module_anywhere:World"}, "no_such_module_anywhere cannot be imported"),
        ({"kind": "hosting.worlds:Script"}, "Script is not a World, Env or SyncEnv of dart.worlds"),
        ({"kind": "hosting.worlds:Nothing"}, "Nothing does not exist in"),
        ({"kind": "dart.worlds:SyncEnv"}, "SyncEnv lacks act, judge, reset"),
        ({"kind": "waa"}, "or module:Class for one of your own"),
    ],
)
async def test_a_bad_config_is_one_message(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        async with hosted(**changes):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize("verb", ["reset", "act", "judge"])
async def test_a_world_that_awaits_what_it_has_cancelled_fails_as_any_other(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has cancelled the worker's task: without an answer the coordinator would wait for ten minutes."""
    async with hosted() as host:
        if verb != "reset":
            await host.reset("e")
        last = a.Finish() if verb == "judge" else a.Wait(1.0)
        monkeypatch.setattr(Actor, verb, cancelled)
        with pytest.raises(CommandError, match=f"{verb} failed: something that it awaited was cancelled"):
            await (host.reset("e") if verb == "reset" else host.act("e", last, last=verb == "judge"))


@pytest.mark.parametrize("verb", ["renew", "probe"])
async def test_an_environment_whose_renewal_is_cancelled_from_within_is_replaced(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its slot would be gone for good, with no word of it."""
    async with hosted() as host:
        await host.reset("e")
        if verb == "probe":
            script.raises = RuntimeError("it broke")
            with pytest.raises(CommandError, match="it broke"):
                await host.act("e", a.Wait(1.0))
        with monkeypatch.context() as once:
            once.setattr(Actor, verb, cancelled)
            await host.release("e")
            while "dispose" not in script.log:
                await asyncio.sleep(0.01)
        script.raises = None
        await host.reset("f")


async def cancelled(*_: object) -> None:
    own = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    own.cancel()
    await own


# ---- threads ----


async def test_a_plain_environment_lives_on_one_thread() -> None:
    async with hosted(Threads, slots=2) as host:
        await asyncio.gather(host.reset("e"), host.reset("f"))
        for name in ("e", "f"):
            await host.act(name, a.Click(None))
            await host.act(name, a.Finish(), last=True)
            await host.release(name)
        await host.until(2, 4)
    one, other = Threads.made
    assert (len(one.threads), len(other.threads)) == (1, 1)
    assert one.threads != other.threads and threading.get_ident() not in one.threads
    assert (one.closed, other.closed) == (1, 1)


async def test_one_that_hangs_is_replaced_and_keeps_nobody_waiting() -> None:
    began = time.monotonic()
    async with hosted(Threads, timeouts={"act": 0.3}) as host:
        await host.reset("e")
        with pytest.raises(CommandError, match="act took longer"):
            await host.act("e", a.Wait(1.0))
        await host.release("e")
        await host.until(1, 2)
        await host.reset("f")
        assert time.monotonic() - began < 20, "hang guard: it hangs for 30 s"
        Threads.hang.set()
    assert len(Threads.made) == 2


# ---- records ----


def test_evidence_is_bounded_and_is_always_json() -> None:
    assert Verdict(1.0).evidence_json() == ""
    assert json.loads(Verdict(1.0, {"a": "ö", "b": [1, None]}).evidence_json()) == {"a": "ö", "b": [1, None]}
    for odd in ({"a": float("nan")}, {"a": {1, 2}}, {("a", 1): 2}):
        json.loads(Verdict(0.0, odd).evidence_json())  # type: ignore[arg-type]
    long = Verdict(0.0, {"log": '"\\ö' * 100_000}).evidence_json()
    assert len(long.encode()) <= 64 << 10
    assert json.loads(long)["bytes"] > 64 << 10
