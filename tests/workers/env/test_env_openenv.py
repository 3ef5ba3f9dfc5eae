"""A client of OpenEnv servers: templates and paths, a foreign server over a real socket, and servers that fail."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import tracemalloc
from typing import Any

import pytest
from foreign.openenv_server import Clicks, serving

from dart.core import action as a
from dart.core.action_json import KINDS
from dart.errors import UserError
from dart.testing import ACTIONS, conform
from dart.workers.env.openenv.link import Link
from dart.workers.env.openenv.reading import MOST_VALUES, Rows, picture, read_answer
from dart.workers.env.openenv.templates import EXAMPLES, fill, find, values_of
from dart.workers.env.openenv.world import OpenEnv, OpenEnvOptions
from dart.worlds import EnvironmentFailure, Full, Task, from_pixels
from dart.worlds.plugs import check

PNG = from_pixels(bytes(3 * 4 * 2), 4, 2).data
FOREIGN = {
    "reset": {"seed": "{seed}", "options": {"level": "level {task}"}},
    "actions": {
        "click": {"command": "click({px}, {py}, {button!r})", "times": "{count}"},
        "type_text": {"command": "type {text!j}"},
        "finish": {"command": "submit {answer}"},
    },
    "screenshot": "observation.screen",
    "instruction_at": "observation.goal.1",
    "evidence_at": "observation.note",
    "reward_range": [0, 0.5],
}
TASK = Task("openenv", "one", 7)


async def leased(url: str, **options: Any) -> tuple[OpenEnv, Any]:
    world = OpenEnv()
    await world.start(OpenEnvOptions.model_validate({"url": url, **FOREIGN, **options}), (20, 10))
    return world, await world.lease()


# ---- templates ----


def values(action: a.Action) -> dict[str, object]:
    return values_of(action, a.Point(0.5, 0.5), (100, 50))


def test_there_is_an_example_of_every_kind() -> None:
    assert EXAMPLES.keys() == set(KINDS)


def test_a_template_gets_numbers_as_numbers_and_texts_as_texts() -> None:
    click = values(a.Click(a.Point(0.25, 0.5), "right", 2, ("Control_L",)))
    template = {
        "at": ["{px}", "{py}"],
        "x": "{x}",
        "text": "{button}-{count} at {x:.3f}",
        "held": "{modifiers}",
        "n": 5,
    }
    filled = fill(template, click)
    assert filled == {"at": [25, 25], "x": 0.25, "text": "right-2 at 0.250", "held": ["Control_L"], "n": 5}
    assert fill("{{px}} {text!r} {text!j}", values(a.TypeText('it\'s "é"'))) == (
        "{px} " + repr('it\'s "é"') + " " + json.dumps('it\'s "é"')
    )


def test_places_and_chords() -> None:
    drag = values(a.Drag((a.Point(0.1, 0.2), a.Point(0.9, 0.8))))
    assert fill(["{px}", "{py}", "{to_px}", "{to_py}"], drag) == [10, 10, 90, 40]
    assert fill(["{px}", "{to_px}"], values(a.Drag((a.Point(0.9, 0.8),)))) == [50, 90], "it starts at the pointer"
    assert fill(["{px}", "{dy}"], values(a.Scroll(None, 0, 3))) == [50, 3], "at the pointer"
    assert fill("{chord}", values(a.Keys(("Control_L", "a")))) == "Control_L+a"
    assert a.pointer_after(a.Drag((a.Point(0.1, 0.2), a.Point(0.9, 0.8))), a.Point(0, 0)) == a.Point(0.9, 0.8)
    assert a.pointer_after(a.TypeText("x"), a.Point(0.3, 0)) == a.Point(0.3, 0)


def test_every_action_of_the_conformance_suite_has_values() -> None:
    for action in ACTIONS:
        json.dumps(values(action))


@pytest.mark.parametrize("template", ["{nonsense}", "{text.__class__}", "{}", "{text", "{count:s}"])
def test_a_wrong_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError):
        fill(template, values(a.TypeText("x")) | {"count": 1})


def test_values_are_found_by_path() -> None:
    data: Any = {"a": [{"b": 1}]}
    assert find("a.0.b", data) == 1
    for path, message in (
        ("a.1", "no '1' of a.1, only: list"),
        ("c", "no 'c' of c, only: a"),
        ("a.0.b.c", "only: int"),
    ):
        with pytest.raises(LookupError, match=message):
            find(path, data)


def test_screenshots_in_every_form() -> None:
    text = base64.b64encode(PNG).decode()
    assert picture(text) == picture(f"data:image/png;base64,{text}")
    assert (picture(text).width, picture(text).height, picture(text).data) == (4, 2, PNG)
    rows = picture([[[0, 0, 0]] * 4] * 2)
    assert (rows.width, rows.height, rows.data) == (4, 2, PNG)


HUGE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 700_000_000, 700_000_000) + bytes(9)
MANY = 700_000_000


@pytest.mark.parametrize(
    "value",
    [
        None, 7, True, {}, "", "not base64!", "data:image/png;base64,", base64.b64encode(b"GIF89a").decode(),
        base64.b64encode(HUGE).decode(), [], [1, 2], [[]], [[[]]], [[MANY, MANY]], [[[MANY, MANY, MANY]]], [[[0, 0]]],
        [[[0, 0, 0], [0, 0]]], [[[0, 0, 0]], [[0, 0, 0], [0, 0, 0]]], [[[0, 0, 256]]], [[[0, 0, -1]]], [[[0, 0, 0.5]]],
        [[[0, 0, None]]], [[["0", "0", "0"]]], [[[[0, 0, 0]]]], [[{"0": 1}]], ["abc"],
        Rows("[[[0,0," + "1" * 5000 + "]]]"),
        Rows("[[[0,0,0]],"), Rows("[" * 100_000 + "]" * 100_000), Rows("[[[" + "0,0,0],[" * 40_000 + "0,0,0]]]"),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_what_is_no_screenshot_is_refused_before_it_takes_memory(value: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            picture(value)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_screenshot_in_rows_of_pixels_takes_no_object_for_each_pixel() -> None:
    """The pixels of a screen as lists would be hundreds of megabytes; here it is a small one."""
    width, height = 160, 90
    row = [[x % 256, 7, 255] for x in range(width)]
    message = {"type": "observation", "data": {"observation": {"goal": "x", "screen": [row] * height}, "done": False}}
    for indent in (None, 1):
        text = json.dumps(message, indent=indent)
        tracemalloc.start()
        answer, rows = read_answer(text)
        shown = picture(rows[str(answer.data["observation"]["screen"])])  # type: ignore[index, call-overload]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert shown == from_pixels(bytes(value for pixel in row for value in pixel) * height, width, height)
        assert answer.data["observation"]["goal"] == "x" and answer.data["done"] is False  # type: ignore[index, call-overload]
        assert peak < 4 * len(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * (1 << 20), '{"type": "a", "data": ' + "[" * (1 << 20), '{"a": [' + "[1]," * (1 << 20) + "[1]]}",
        '{"type": "a", "data": {"a": [' + "{}," * MOST_VALUES + "{}]}}", '{"a":' * 100_000, "[[[1,[[" * 100_000,
        '{"type": "a", "data": {"a": ' + ("[" * 65_000 + "x") * 30 + "}}",
        '{"type": "a", "data": {"a": ' + " ]" * 500_000 + "}}",
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_message_of_any_shape_is_refused_in_one_pass(text: str) -> None:
    with pytest.raises(ValueError):
        read_answer(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "environment.options.url"),
        ({"actions": {"clack": {}}}, "clack is not a kind of action: use one of move"),
        ({"actions": {"click": {"at": "{text}"}}}, "{text} is unknown: use one of {kind}, {button}"),
        ({"actions": {"click": "click({px})"}}, "template of click is not an object"),
        ({"reset": {"level": "{level}"}}, "{level} is unknown: use one of {task}, {seed}"),
        ({"token": "secret"}, "environment.options.token"),
        ({"reward_range": [1, 1]}, "is not a range"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        check("openenv", {"url": "http://127.0.0.1:1", **options}, ["one"])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("url", "socket"),
    [
        ("http://a:1/", "ws://a:1/ws"),
        ("https://a/env", "wss://a/env/ws"),
        ("ws://a:1", "ws://a:1/ws"),
        ("wss://a/env/", "wss://a/env/ws"),
    ],
)
def test_the_address_of_the_socket(url: str, socket: str) -> None:
    assert OpenEnvOptions(url=url).socket == socket


async def test_a_token_must_be_set_and_does_not_travel_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, message in (("http://127.0.0.1:1", "env:OE_TOKEN, which is not set"), ("http://a.b:1", "unencrypted")):
        with pytest.raises(UserError, match=message):
            await leased(url, token="env:OE_TOKEN")


# ---- a foreign server ----


@pytest.mark.parametrize("rows", [False, True])
def test_a_foreign_environment_conforms(rows: bool) -> None:
    with serving(Clicks(rows=rows)) as (url, _):
        conform("openenv", "one", options={"url": url, **FOREIGN}, screen=(20, 10))


async def test_what_a_foreign_environment_hears_and_what_becomes_of_its_answers() -> None:
    clicks = Clicks()
    with serving(clicks) as (url, _):
        world, env = await leased(url)
        first = await env.reset(TASK)
        assert (first.instruction, first.image.width, first.image.height) == ("thrice", 20, 10)
        seen = await env.act(a.Click(a.Point(0.25, 0.5), "right", 2))
        assert not seen.done
        assert seen.image.sha256 != first.image.sha256
        same = await env.act(a.Wait(1.0))
        assert same.image == seen.image, "no template: nothing is sent"
        await env.act(a.TypeText('say "hi"'))
        verdict = await env.judge(a.Finish(answer="42"), False)
        assert verdict.reward == pytest.approx(0.2)
        assert verdict.evidence == {"reward": 0.1, "steps": 3, "done": False, "evidence": "1 so far"}
        await world.close()
    assert clicks.heard == [
        {"type": "state"},
        {"type": "reset", "data": {"seed": 7, "options": {"level": "level one"}}},
        {"type": "step", "data": {"command": "click(5, 5, 'right')", "times": 2}},
        {"type": "step", "data": {"command": 'type "say \\"hi\\""'}},
        {"type": "step", "data": {"command": "submit 42"}},
        {"type": "close"},
    ]


async def test_texts_are_read_where_the_environment_gives_them() -> None:
    shot = base64.b64encode(PNG).decode()
    seen = {"screen": shot, "goal": ["Click", "thrice"], "accessibility_tree": "button", "told": {"error": "no link"}}
    clicks = Clicks()
    with serving(clicks) as (url, _):
        world, env = await leased(url, last_action_error_at="observation.told.error")
        clicks.says = {"type": "observation", "data": {"observation": seen}}
        first = await env.reset(TASK)
        assert (first.accessibility_tree, first.last_action_error) == ("button", "")
        acted = await env.act(a.Click(None))
        assert (acted.accessibility_tree, acted.last_action_error) == ("button", "no link")
        assert (await env.act(a.Wait(1.0))).last_action_error == "", "nothing was sent"
        clicks.says = {"type": "observation", "data": {"observation": seen | {"told": True}}}
        assert (await env.act(a.Click(None))).last_action_error == ""
        await world.close()


async def test_a_task_that_the_server_refuses_is_the_tasks_fault() -> None:
    clicks = Clicks()
    with serving(clicks) as (url, _):
        world, env = await leased(url)
        clicks.says = {"type": "error", "data": {"code": "TASK_REFUSED", "message": "there is no task up"}}
        with pytest.raises(UserError, match="refuses the task: there is no task up"):
            await env.reset(TASK)
        await world.close()


@pytest.mark.parametrize(
    ("options", "reward"),
    [({}, 0.3 / 0.6), ({"reward": "sum"}, 1.0), ({"success_at": 0.25}, 1.0), ({"success_at": 0.35}, 0.0)],
)
async def test_an_episode_that_the_environment_ends(options: dict[str, object], reward: float) -> None:
    clicks = Clicks()
    with serving(clicks) as (url, _):
        world, env = await leased(url, reward_range=[0, 0.6], **options)
        await env.reset(TASK)
        done = [(await env.act(a.Click(None))).done for _ in range(4)]
        assert done == [False, False, True, True]
        heard = len(clicks.heard)
        assert (await env.judge(a.Finish(), False)).reward == pytest.approx(reward)
        assert len(clicks.heard) == heard, "an episode that is over is told nothing"
        await world.close()


async def test_a_server_that_is_full_is_asked_again_later() -> None:
    with serving(Clicks(most=1)) as (url, _):
        world, env = await leased(url)
        with pytest.raises(Full, match="4 of 4"):
            await world.lease()
        assert await env.probe()
        await world.close()


async def test_a_server_that_dies_is_an_environment_failure_and_its_session_is_replaced() -> None:
    with serving(Clicks()) as (url, server):
        world, env = await leased(url)
        await env.reset(TASK)
        await asyncio.to_thread(server.shutdown)  # it waits for the sessions, whose other end is here
        with pytest.raises(EnvironmentFailure, match="closed the session"):
            for _ in range(100):
                await env.act(a.Click(None))
                await env.reset(TASK)
        assert not await env.probe()
        assert not await env.renew()
        with pytest.raises(EnvironmentFailure, match="cannot be reached"):
            await world.lease()
        await world.close()


async def test_a_request_that_was_given_up_spoils_the_session() -> None:
    """Its answer may still come, and would be taken for the next one's."""
    with serving(Clicks()) as (url, _):
        link = await Link.open(f"{url.replace('http', 'ws')}/ws", None)
        link._asking = True  # as after a cancelled call
        assert not link.usable
        with pytest.raises(EnvironmentFailure, match="never answered"):
            await link.ask("state")
        await link.close()


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "it broke"}}, "EXECUTION_ERROR: it broke"),
        ({"type": "observation", "data": {"reward": "much"}}, "with no observation"),
        ({"type": "observation", "data": {"observation": {}}}, "there is no 'screen' of observation.screen"),
        ({"type": "observation", "data": {"observation": {"screen": 1}}}, "the value at observation.screen is int"),
        ({"type": "observation", "data": {"observation": {"screen": [[MANY, MANY]]}}}, "not of rows of pixels"),
        (
            {"type": "observation", "data": {"observation": {str(n): 1 for n in range(10_000)}}},
            r"no 'screen'[\s\S]*cut: 500",
        ),
        ({"type": "error", "data": {"code": "x" * 9999, "message": ["y"] * 9999}}, "cut: 500 of 9,999"),
        *(
            (
                {"type": "observation", "data": {"observation": {}, "reward": reward}},
                "the reward (inf|-inf|nan)",
            )
            for reward in (float("inf"), float("-inf"), float("nan"))
        ),
        ({"type": "observation", "data": {"observation": {}, "reward": 10**400}}, "OpenEnv"),
        ({"hello": 1}, "sent no OpenEnv message"),
    ],
)
async def test_answers_that_make_no_sense_are_environment_failures(says: dict[str, Any], message: str) -> None:
    clicks = Clicks()
    with serving(clicks) as (url, _):
        world, env = await leased(url)
        clicks.says = says
        with pytest.raises(EnvironmentFailure, match=message):
            await env.reset(TASK)
        await world.close()
