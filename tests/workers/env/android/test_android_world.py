"""The world whole, on fake devices: its contract, tasks from a folder, locks, and what follows an episode."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from android.daemon import Device
from android.phone import SWITCH
from android.programs import SCREEN, TASKS, device, folder, leased, options

from dart.core.action import Click, Finish, Observe, Point
from dart.core.types import Image, Task
from dart.errors import UserError
from dart.testing import conform
from dart.workers.env.android import reachable
from dart.workers.env.android.adb import DeviceError
from dart.workers.env.android.device import Phone
from dart.workers.env.android.options import AndroidOptions
from dart.workers.env.android.options import Device as Named
from dart.workers.env.android.tasks import Folder, TaskFile
from dart.workers.env.android.world import Android
from dart.worlds import Full
from dart.worlds.plugs import check, find, read_options

SWITCH_AT = Point((SWITCH[0] + SWITCH[2]) / 2, (SWITCH[1] + SWITCH[3]) / 2)


def test_the_world_keeps_to_its_contract(adb: None, tmp_path: Path) -> None:
    with Device(tmp_path / "one", SCREEN) as one, Device(tmp_path / "two", SCREEN) as two:
        conform("android", "switch", options=options(tmp_path, [one.serial, two.serial]), screen=SCREEN)


async def test_a_task_is_won_by_touches_and_by_nothing_else(phone: Device, tmp_path: Path) -> None:
    async with leased(tmp_path, [phone.serial]) as env:
        first = await env.reset(Task("android", "switch"))
        assert first.instruction == TASKS["switch"]["instruction"]  # type: ignore[index]
        assert (await env.judge(Finish(), False)).reward == 0.0
        await env.act(Click(Point(0.5, 0.9)))
        assert (await env.judge(Finish(), False)).reward == 0.0
        await env.act(Click(SWITCH_AT))
        verdict = await env.judge(Observe(), True)
        assert verdict.reward == 1.0
        assert verdict.evidence["output"] == "1"
        again = await env.reset(Task("android", "switch"))
        assert (await env.judge(Finish(), False)).reward == 0.0
        assert again.image.sha256 == first.image.sha256


async def test_the_answer_is_a_variable_of_the_check(phone: Device, tmp_path: Path) -> None:
    async with leased(tmp_path, [phone.serial]) as env:
        for answer, reward in (("it's 42", 1.0), ("it's 5", 0.0), ("", 0.0), ("$(echo it\\'s 42)", 0.0)):
            await env.reset(Task("android", "question"))
            assert (await env.judge(Finish(answer=answer), False)).reward == reward, answer


async def test_a_tasks_own_step_limit_ends_the_episode_once_the_screen_is_still(
    phone: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, settled = [], Phone.settled

    async def counted(self: Phone, still: float, most: float) -> Image:
        waits.append((still, most))
        return await settled(self, still, most)

    monkeypatch.setattr(Phone, "settled", counted)
    async with leased(tmp_path, [phone.serial]) as env:
        for _ in range(2):
            waits.clear()
            await env.reset(Task("android", "short"))
            assert [(await env.act(Observe())).done for _ in range(2)] == [False, True]
            assert waits == [(0.0, 5.0)] * 3, "after the reset and each action, the last one too"


async def test_a_set_up_that_fails_voids_the_attempt_and_a_tear_down_that_fails_replaces_the_device(
    phone: Device, tmp_path: Path
) -> None:
    async with leased(tmp_path, [phone.serial]) as env:
        with pytest.raises(DeviceError, match="setup 'nonsense 1' ended with 127"):
            await env.reset(Task("android", "broken"))
        await env.reset(Task("android", "left"))
        with pytest.raises(DeviceError, match="tear_down 'exit 4' ended with 4"):
            await env.renew()
        with pytest.raises(UserError, match="did you mean"):
            await env.reset(Task("android", "swich"))


async def test_renewing_tears_down_stops_apps_and_goes_home(phone: Device, tmp_path: Path) -> None:
    async with leased(tmp_path, [phone.serial], stop=["com.example.notes", "com.b"]) as env:
        await env.reset(Task("android", "switch"))
        await env.act(Click(SWITCH_AT))
        before = len(phone.events())
        assert await env.renew()
        assert phone.events()[before:] == [
            ["settings", "put", "global", "demo", "0"], ["am", "force-stop", "com.example.notes"],
            ["am", "force-stop", "com.b"], ["input", "keyevent", "KEYCODE_HOME"],
        ]  # fmt: skip


async def test_renewing_by_a_command_of_the_users(phone: Device, tmp_path: Path) -> None:
    note = tmp_path / "note"
    command = f"""{sys.executable} -c "open('{note}', 'w').write('{{serial}}')" """
    async with leased(tmp_path, [phone.serial], renew=command) as env:
        assert note.read_text() == phone.serial, "before the first episode too: who knows who had it"
        note.unlink()
        assert await env.renew()
        assert note.read_text() == phone.serial
    for wrong, said in (("no-such-program", "cannot be started"), ("sh -c 'echo no >&2; exit 3'", "ended with 3: no")):
        with pytest.raises(DeviceError, match=said):
            async with leased(tmp_path, [phone.serial], renew=wrong):
                pass


async def test_two_workers_never_share_a_device(phone: Device, tmp_path: Path) -> None:
    with Device(tmp_path / "other", SCREEN) as other:
        given = [phone.serial, other.serial]
        async with leased(tmp_path, given) as one, leased(tmp_path, given) as two:
            assert {one.phone.name, two.phone.name} == set(given)
            with pytest.raises(Full, match="all 2 devices"):
                async with leased(tmp_path, given):
                    pass
        async with leased(tmp_path, [phone.serial]):
            pass


@contextlib.contextmanager
def lock_holder(tmp_path: Path, phone: Device) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the device's lock."""
    words = (
        "import sys; from pathlib import Path; from dart.worlds.locks import Locks; "
        "from dart.workers.env.android.options import Device; "
        "print(Locks(Path(sys.argv[1])).take(Device(serial=sys.argv[2]).lock), flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", words, str(tmp_path / "locks"), phone.serial],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


async def test_a_lock_ends_with_the_process_that_holds_it(phone: Device, tmp_path: Path) -> None:
    with lock_holder(tmp_path, phone), pytest.raises(Full):
        async with leased(tmp_path, [phone.serial]):
            pass
    async with leased(tmp_path, [phone.serial]):
        pass


async def test_a_device_that_does_not_boot_makes_way_for_the_next(phone: Device, tmp_path: Path) -> None:
    world = Android()
    await world.start(AndroidOptions.model_validate(options(tmp_path, ["127.0.0.1:1", phone.serial])), SCREEN)
    try:
        with pytest.raises(DeviceError, match="adb cannot connect to"):
            await world.lease()
        assert await (await world.lease()).probe()
        assert world.versions["adb"]
    finally:
        await world.close()


def test_the_module_is_found_by_its_name_and_the_tasks_are_checked_before_a_run(tmp_path: Path) -> None:
    assert find("android") is Android
    given = options(tmp_path, ["emulator-5554"])
    check("android", given, ["switch", "question"])
    with pytest.raises(UserError, match=r"no task 'swich': did you mean switch"):
        check("android", given, ["swich"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": []}, "devices"),
        ({"devices": ["a", "a"]}, "named twice"),
        ({"devices": ["a b"]}, "devices.0.serial"),
        ({"tasks_folder": None}, "there are no tasks"),
        ({"devices": [{"serial": "a", "android_world": "http://x"}]}, "two sources"),
        ({"devices": [{"serial": "a", "android_world": "x"}]}, "is not an address"),
        ({"devices": [{"serial": "a", "adb_server": "x"}]}, "HOST:PORT"),
        (
            {"tasks_folder": None, "devices": [{"serial": one, "android_world": "http://x"} for one in "ab"]},
            "serves two",
        ),
        ({"renew": "sh -c 'x"}, "correct its quotes"),
        ({"renew": "snapshot:"}, "names nothing to do"),
        ({"renew": ""}, "names nothing to do"),
        ({"renew": "snapshot:a", "devices": ["10.0.0.5:5555"]}, "and 10.0.0.5:5555 is elsewhere: write a command"),
        (
            {"renew": "snapshot:a", "devices": [{"serial": "emulator-5554", "adb_server": "127.0.0.1:5100"}]},
            "chooses the host by {adb_server} and runs there: adb -s emulator-5554 emu avd snapshot load a",
        ),
        ({"stop": ["a; reboot"]}, "is not a package name"),
        ({"settle_seconds": 9.0}, "max_settle_seconds"),
        ({"speed": 1}, "speed"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as error:
        read_options(Android, options(tmp_path, ["a"]) | changes)
    assert said in str(error.value)


def test_the_servers_of_all_devices_are_asked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take its time not to answer."""
    asked = threading.Barrier(2)

    def listed(url: str) -> set[str]:
        asked.wait(60)
        return {"Known"} if url == "http://two" else set()

    monkeypatch.setattr(reachable, "_listed", listed)
    given = [{"serial": name, "android_world": f"http://{name}"} for name in ("one", "two")]
    check("android", options(tmp_path, list(given)), ["Known"])
    with pytest.raises(UserError, match="server http://two has no task Other: it has 1, such as Known"):
        check("android", options(tmp_path, list(given)), ["Other"])


def test_a_snapshot_is_loaded_on_emulators_of_this_machine(tmp_path: Path) -> None:
    read = read_options(Android, options(tmp_path, ["emulator-5554", "emulator-5556"], renew="snapshot:a b"))
    assert isinstance(read, AndroidOptions) and read.renew == "snapshot:a b"


@pytest.mark.parametrize(
    ("device", "own"),
    [
        ({"serial": "emulator-5554"}, True),
        ({"serial": "127.0.0.1:5555"}, True),
        ({"serial": "emulator-5554", "adb_server": "localhost:5100"}, True),
        ({"serial": "10.0.0.5:5555"}, False),
        ({"serial": "emulator-5554", "adb_server": "10.0.0.5:5037"}, False),
    ],
)
def test_a_device_of_this_machines_own_is_locked_for_this_machine_alone(
    device: dict[str, str], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the locks may be on a network file system."""
    locks = set()
    for host in ("one", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        locks.add(Named.model_validate(device).lock)
    assert len(locks) == (2 if own else 1)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"instruction": "x"}, "check"),
        ({"instruction": "x", "check": {"shell": "a"}}, "one of expect and matches"),
        ({"instruction": "x", "check": {"shell": "a", "expect": "", "matches": ""}}, "one of expect and matches"),
        ({"instruction": "x", "check": {"shell": "a", "matches": "("}}, "is not a regular expression"),
        ({"instruction": "", "check": {"shell": "a", "expect": ""}}, "instruction"),
        ({"instruction": "x", "check": {"shell": "a", "expect": ""}, "stepz": 1}, "stepz"),
        ("text", "the file"),
    ],
)
def test_wrong_task_files_are_named(tmp_path: Path, task: object, said: str) -> None:
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(task))
    with pytest.raises(UserError) as error:
        Folder(tmp_path).check(["one"])
    assert said in str(error.value) and "one.yaml" in str(error.value)


def test_folders_and_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no task files"):
        Folder(tmp_path / "nothing")
    (folder(tmp_path / "tasks") / "odd.json").write_text("{")
    with pytest.raises(UserError, match=r"odd\.json cannot be read"):
        Folder(tmp_path / "tasks").load("odd")
    assert Folder(tmp_path / "tasks").load("short").step_limit == 2


def test_the_documented_task_is_valid() -> None:
    text = (Path(__file__).parents[4] / "docs" / "android.md").read_text(encoding="utf-8")
    example = textwrap.dedent(text.split("# tasks/airplane.yaml\n")[1].split("   ```")[0])
    assert TaskFile.model_validate(yaml.safe_load(example)).check.done("1\n")


async def test_an_old_device_is_the_same_world(adb: None, tmp_path: Path) -> None:
    with device(tmp_path, old=True) as phone:
        async with leased(tmp_path, [phone.serial]) as env:
            await env.reset(Task("android", "switch"))
            await env.act(Click(SWITCH_AT))
            assert (await env.judge(Finish(), False)).reward == 1.0
