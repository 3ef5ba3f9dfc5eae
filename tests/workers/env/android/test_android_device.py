"""The real adb program and a device that speaks its protocol: touches, text, screenshots, and a device that dies."""

from __future__ import annotations

import asyncio
import io
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from android.daemon import Device
from android.phone import BOX, GROUND, LINE, MARK, SWITCH
from android.programs import SCREEN, device, leased, options
from PIL import Image as Picture

from dart.core.action import Action, Click, Drag, Keys, Observe, Point, Scroll, System, TypeText, Wait
from dart.core.types import Image, Task
from dart.errors import UserError
from dart.workers.env.android.adb import Adb, DeviceError
from dart.workers.env.android.environment import AndroidEnv
from dart.workers.env.android.options import AndroidOptions
from dart.workers.env.android.options import Device as Named
from dart.workers.env.android.world import Android

SWITCH_AT, BOX_AT = (Point((x1 + x2) / 2, (y1 + y2) / 2) for x1, y1, x2, y2 in (SWITCH, BOX))


def pixels(image: Image, colour: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Where the screenshot has this colour."""
    picture = Picture.open(io.BytesIO(image.data)).convert("RGB")
    raw, wide = picture.tobytes(), picture.width
    return [(at % wide, at // wide) for at in range(len(raw) // 3) if raw[3 * at : 3 * at + 3] == bytes(colour)]


@pytest.fixture
async def env(phone: Device, tmp_path: Path) -> AsyncIterator[AndroidEnv]:
    async with leased(tmp_path, [phone.serial]) as made:
        await made.reset(Task("android", "switch"))
        yield made


async def shell(env: AndroidEnv, command: str) -> str:
    return (await env.phone.adb.shell(command)).output


@pytest.mark.parametrize("at", [(0, 0), (123, 457), (269, 599), (1, 598)])
async def test_a_click_touches_exactly_its_pixel(env: AndroidEnv, at: tuple[int, int]) -> None:
    seen = await env.act(Click(Point(at[0] / SCREEN[0], at[1] / SCREEN[1])))
    assert pixels(seen.image, MARK) == [at]
    assert not seen.last_action_error


async def test_coordinates_count_in_the_overridden_size_and_in_the_turned_screen(adb: None, tmp_path: Path) -> None:
    with device(tmp_path, override=(180, 400)) as phone:
        async with leased(tmp_path, [phone.serial], (180, 400)) as env:
            first = await env.reset(Task("android", "switch"))
            assert (first.image.width, first.image.height) == (180, 400)
            assert pixels((await env.act(Click(Point(90 / 180, 399 / 400)))).image, MARK) == [(90, 399)]
            await shell(env, "settings put system user_rotation 1")
            turned = (await env.act(Observe())).image
            assert (turned.width, turned.height) == (400, 180)
            assert (399, 90) in pixels((await env.act(Click(Point(399 / 400, 90 / 180)))).image, MARK)


async def test_a_drag_and_a_long_press_go_from_place_to_place_in_their_time(env: AndroidEnv) -> None:
    seen = await env.act(Drag((Point(0.1, 0.05), Point(0.9, 0.05)), duration_seconds=0.15))
    line = pixels(seen.image, LINE)
    assert (min(line), max(line)) == ((27, 30), (243, 30))
    assert await shell(env, "settings get test ms") == "150"
    path = await env.act(Drag((Point(0.5, 0.02), Point(0.6, 0.02), Point(0.6, 0.1))))
    assert {(135, 12), (162, 12), (162, 60)} <= set(pixels(path.image, LINE))
    await env.act(Click(Point(0.5, 0.5), hold_seconds=0.1))
    assert await shell(env, "settings get test ms") == "100"


async def test_scrolling_moves_the_content(env: AndroidEnv, phone: Device) -> None:
    await env.act(Scroll(Point(0.5, 0.8), dy=2))
    assert phone.events()[-1] == ["input", "swipe", "135", "480", "135", "360", "500"]


@pytest.mark.parametrize("text", ["two words", 'it\'s "x" $HOME `id` \\ %s 100%sure; reboot', "a\nb", "x" * 300])
async def test_text_reaches_the_device_as_it_is(env: AndroidEnv, text: str) -> None:
    await env.act(Click(BOX_AT))
    seen = await env.act(TypeText(text))
    assert not seen.last_action_error
    env_with_tree = (await env.phone.adb.shell("uiautomator dump /x >/dev/null; cat /x")).output
    assert f'text="{text}"' in env_with_tree


async def test_text_that_input_cannot_type_is_refused_and_the_keyboard_app_types_it(adb: None, tmp_path: Path) -> None:
    with device(tmp_path, keyboard=True) as phone:
        async with leased(tmp_path, [phone.serial]) as env:
            await env.reset(Task("android", "switch"))
            seen = await env.act(TypeText("né"))
            assert "'é'" in seen.last_action_error
            assert not [event for event in phone.events() if event[:2] == ["input", "text"]]
        async with leased(tmp_path, [phone.serial], typing="adb_keyboard", accessibility_tree=True) as env:
            await env.reset(Task("android", "switch"))
            await env.act(Click(BOX_AT))
            seen = await env.act(TypeText("né 日本"))
            assert 'EditText "né 日本"' in seen.accessibility_tree


async def test_the_keyboard_is_chosen_anew_whenever_the_device_is_renewed(adb: None, tmp_path: Path) -> None:
    changes = {"typing": "adb_keyboard", "renew": "adb -s {serial} shell ime reset", "accessibility_tree": True}
    with device(tmp_path, keyboard=True) as phone:
        async with leased(tmp_path, [phone.serial], **changes) as env:
            assert await env.renew()
            await env.reset(Task("android", "switch"))
            await env.act(Click(BOX_AT))
            assert 'EditText "né"' in (await env.act(TypeText("né"))).accessibility_tree


async def test_keyboard_that_is_not_installed_is_named(phone: Device, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"install the ADBKeyBoard app"):
        async with leased(tmp_path, [phone.serial], typing="adb_keyboard"):
            pass


@pytest.mark.parametrize(
    ("action", "event"),
    [
        (System("back"), ["input", "keyevent", "KEYCODE_BACK"]),
        (System("volume_down"), ["input", "keyevent", "KEYCODE_VOLUME_DOWN"]),
        (Keys(("Control_L", "c")), ["input", "keycombination", "KEYCODE_CTRL_LEFT", "KEYCODE_C"]),
        (System("open_url", "https://a.b/?c=d&e=1"), ["am", "start", "-a", "android.intent.action.VIEW", "-d",
                                                      "https://a.b/?c=d&e=1"]),
    ],
)  # fmt: skip
async def test_keys_and_addresses_reach_the_device(
    env: AndroidEnv, phone: Device, action: Action, event: list[str]
) -> None:
    assert not (await env.act(action)).last_action_error
    assert phone.events()[-1] == event


async def test_apps_are_opened_or_the_policy_is_told(env: AndroidEnv) -> None:
    seen = await env.act(System("open_app", "com.example.notes"))
    assert not seen.last_action_error and (0, 0) in pixels(seen.image, GROUND["notes"])
    assert "aborted" in (await env.act(System("open_app", "com.example.nothing"))).last_action_error
    assert "does not exist" in (await env.act(System("open_app", "com.nothing/.Main"))).last_action_error
    assert "no app 'Calendar'" in (await env.act(System("open_app", "Calendar"))).last_action_error


async def test_a_wait_is_bounded(env: AndroidEnv) -> None:
    began = time.monotonic()
    await env.act(Wait(3600.0))
    assert time.monotonic() - began < 60


async def test_the_tree_is_part_of_the_observation(phone: Device, tmp_path: Path) -> None:
    async with leased(tmp_path, [phone.serial], accessibility_tree=True) as env:
        seen = await env.reset(Task("android", "switch"))
        assert seen.accessibility_tree.splitlines()[0] == 'Switch "Demo" #demo [27,120][243,180] clickable'
        seen = await env.act(Click(SWITCH_AT))
        assert "checked" in seen.accessibility_tree.splitlines()[0]


async def test_a_blinking_caret_is_still_and_a_moving_screen_is_not_waited_for_for_ever(
    phone: Device, tmp_path: Path
) -> None:
    async with leased(tmp_path, [phone.serial]) as env:
        await shell(env, "settings put test caret 1")
        began = time.monotonic()
        await env.phone.settled(0.5, 600.0)
        assert time.monotonic() - began < 300
        began = time.monotonic()
        await env.phone.settled(600.0, 0.3)
        assert time.monotonic() - began < 300


async def test_a_screenshot_with_a_warning_before_it(env: AndroidEnv) -> None:
    await shell(env, "settings put test displays 2")
    assert (await env.act(Observe())).image.data.startswith(b"\x89PNG")


async def test_an_old_device_without_shell_v2(adb: None, tmp_path: Path) -> None:
    with device(tmp_path, old=True) as phone:
        async with leased(tmp_path, [phone.serial]) as env:
            await env.reset(Task("android", "switch"))
            assert pixels((await env.act(Click(Point(0.5, 0.5)))).image, MARK) == [(135, 300)]
            assert "aborted" in (await env.act(System("open_app", "com.example.nothing"))).last_action_error
            assert (await env.phone.adb.shell("exit 7")).status == 7
            with pytest.raises(DeviceError, match="was cut off"):
                await env.phone.adb.shell("kill -9 $PPID; sleep 1")


async def test_a_device_that_dies_is_a_failure_and_comes_back(phone: Device, tmp_path: Path) -> None:
    async with leased(tmp_path, [phone.serial]) as env:
        await env.reset(Task("android", "switch"))
        assert await env.probe()
        phone.stop()
        with pytest.raises(DeviceError):
            await env.act(Click(SWITCH_AT))
        assert not await env.probe()
        with pytest.raises(DeviceError):
            await env.renew()
    phone.start()
    async with leased(tmp_path, [phone.serial]) as env:
        assert await env.probe()


async def test_a_device_that_hangs_is_a_failure(phone: Device, tmp_path: Path) -> None:
    async with leased(tmp_path, [phone.serial], command_seconds=5) as env:
        phone.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeviceError, match="took longer than"):
                await env.act(Observe())
        finally:
            phone.process.send_signal(signal.SIGCONT)


async def test_a_device_that_restarts_is_not_alive(env: AndroidEnv) -> None:
    await shell(env, "setprop sys.boot_completed 0")
    assert not await env.probe()


async def test_a_command_that_is_cut_off_is_a_failure_and_not_a_result(env: AndroidEnv) -> None:
    adb = env.phone.adb
    assert (await adb.shell("echo out; echo err >&2; exit 7")).status == 7
    assert (await adb.shell("echo 'dart-status=0'; exit 3")).status == 3
    assert (await adb.shell("this is ( no shell")).status != 0
    with pytest.raises(DeviceError):
        await adb.shell("kill -9 $PPID; sleep 1")


async def test_a_cancelled_call_leaves_no_process(env: AndroidEnv) -> None:
    call = asyncio.create_task(env.phone.adb.shell("echo begun >> /dev/null; sleep 600"))
    await asyncio.sleep(0.5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await env.phone.adb.shell("echo on")).output == "on"


async def test_no_program_and_a_wrong_screen_are_named_before_anything_starts(phone: Device, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"viewport: \[270, 600\]"):
        async with leased(tmp_path, [phone.serial], (1080, 2400)):
            pass
    with pytest.raises(UserError, match="there is no program no-adb: install it"):
        async with leased(tmp_path, [phone.serial], adb="no-adb"):
            pass


def test_doctor_says_what_is_missing(phone: Device, tmp_path: Path) -> None:
    def said(screen: tuple[int, int] = SCREEN, **changes: object) -> dict[str, str]:
        read = AndroidOptions.model_validate(options(tmp_path, [phone.serial]) | changes)
        checks = Android.checks_with_screen(read, screen)
        return {name: problem for name, check in checks.items() if (problem := check())}

    assert said() == {}
    assert "viewport: [270, 600]" in said((1080, 2400))["android devices"]
    assert "make android" in said(adb="no-adb")["adb"]
    assert "127.0.0.1:1" in said(devices=["127.0.0.1:1"])["android devices"]
    assert "no-such-serial" in said(devices=["no-such-serial"])["android devices"]
    assert "no task files" in said(tasks_folder=str(tmp_path / "locks2"))["android tasks"]


async def test_a_device_of_another_adb_server(phone: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    port = os.environ["ANDROID_ADB_SERVER_PORT"]
    await Adb("adb", Named(serial=phone.serial), 20).connect()
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "1")
    async with leased(tmp_path, [{"serial": phone.serial, "adb_server": f"127.0.0.1:{port}"}]) as env:
        assert await env.probe()
