"""The task files: their form, what the seed draws, and that each can be done, and is not done by anything else."""

from __future__ import annotations

import io
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from desktop_samples import needs_desktop
from PIL import Image as Picture

from dart.core.action import Action, Finish, Observe
from dart.core.types import Task
from dart.errors import UserError
from dart.workers.env.desktop import tasks
from dart.workers.env.desktop.tasks import OracleStep, TaskFile, load, task_names
from dart.worlds.plugs import find

TINY = (160, 96)
"""The screen that the tasks of colours are made for."""
SIZES = {"yad": (320, 240), "chromium": (800, 600), "soffice": (1024, 768), "gimp": (1024, 768)}
LIGHT = [name for name in task_names() if not {"chromium", "soffice", "gimp"} & set(load(name).needs)]
HEAVY = [name for name in task_names() if name not in LIGHT]
OTHER_STEPS = {"calc-sum": {"type": "=SUM(B1:B2)\n"}}
"""Wrong steps for tasks whose right ones are the same for every seed."""


def test_there_are_enough_tasks_and_each_has_an_oracle() -> None:
    assert len(task_names()) >= 20
    assert len([name for name in task_names() if name.startswith("dialog-")]) >= 6
    assert len([name for name in task_names() if name.startswith("colour-")]) == 7
    assert set(find("desktop").oracle_tasks()) == set(task_names())


@pytest.mark.parametrize("name", task_names())
def test_the_seed_decides_everything_and_changes_something(name: str) -> None:
    task = load(name)
    assert task.id == name
    seen = [task.instance(seed).model_dump_json() for seed in range(30)]
    assert seen == [task.instance(seed).model_dump_json() for seed in range(30)]
    assert len(set(seen)) >= (4 if name == "colour-type" else 25)  # it has six
    assert set(task.needs) <= set(tasks.PROGRAMS)
    from dart.workers.env.desktop.grading.checks import CHECKS

    assert {one for one, _, _ in task.evaluator.checks()} <= set(CHECKS)
    assert "{" not in task.instance(1).instruction


def test_what_is_wrong_with_a_task_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no task 'dialog-pres': did you mean dialog-press-"):
        tasks.check_task("dialog-pres")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"needs gimp: run `apt-get install --no-install-recommends gimp`, or leave"):
        tasks.check_task("gimp-flip")


def test_a_step_and_a_parameter_are_one_thing_each() -> None:
    with pytest.raises(ValueError, match="give one of click"):
        OracleStep.model_validate({"click": "a", "type": "b"})
    with pytest.raises(ValueError, match="give one of choose"):
        tasks.Draw.model_validate({"choose": ["a"], "between": [1, 2]})


def wrong(name: str, seed: int) -> TaskFile:
    """The task with the oracle's steps of another seed, or with wrong ones."""
    right = load(name).instance(seed)
    if name in OTHER_STEPS:
        mistake = OracleStep.model_validate(OTHER_STEPS[name])
        steps = tuple(mistake if one.type is not None else one for one in right.oracle)
    else:
        others = (load(name).instance(other).oracle for other in range(seed + 1, seed + 100))
        steps = next(oracle for oracle in others if oracle != right.oracle)
    return right.model_copy(update={"oracle": steps})


def play(name: str, seed: int = 7) -> dict[str, float]:
    """Rewards of doing nothing, of the oracle, and of the oracle's steps for another seed."""
    from dart.workers.env.desktop.environment import DesktopEnv
    from dart.workers.env.desktop.oracle import Oracle
    from dart.workers.env.desktop.world import DesktopOptions

    size = next((size for program, size in SIZES.items() if program in load(name).needs), (640, 480))
    if name.startswith("colour-"):
        size = TINY
    env = DesktopEnv(DesktopOptions(), size)

    def finish(oracle: Oracle) -> float:
        last: Action | None = Observe()
        while (last := oracle.next()) is not None and not isinstance(last, Finish):
            if (seen := env.act(last)).done:
                return seen.reward
        return env.judge(last or Finish(), False).reward

    try:
        task = Task("desktop", name, seed)
        assert env.reset(task).instruction
        assert env.session is not None
        nothing = env._grade(Finish()).reward
        if load(name).evaluator.postconfig:  # it has closed the application
            env.reset(task)
        right = finish(Oracle(load(name).instance(seed), env.session))
        env.reset(task)
        return {"nothing": nothing, "right": right, "wrong": finish(Oracle(wrong(name, seed), env.session, 2.0))}
    finally:
        env.close()


@pytest.fixture(scope="module")
def played() -> dict[str, dict[str, float] | Exception]:
    """All light tasks, four at a time."""

    def attempt(name: str) -> dict[str, float] | Exception:
        try:
            return play(name)
        except Exception as error:  # noqa: BLE001  the task's own test shows it
            return error

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(LIGHT, pool.map(attempt, LIGHT), strict=True))


RIGHT = {"nothing": 0.0, "right": 1.0, "wrong": 0.0}


@pytest.mark.desktop
@needs_desktop
def test_what_follows_a_dialog_is_seen() -> None:
    """Never the empty screen between a dialog and the next one."""
    from dart.workers.env.desktop.environment import DesktopEnv
    from dart.workers.env.desktop.session import BACKGROUND
    from dart.workers.env.desktop.world import DesktopOptions

    env = DesktopEnv(DesktopOptions(rest_seconds=1.5), TINY)  # a busy machine paints late
    try:
        for seed in range(4):
            env.reset(Task("desktop", "colour-confirm", seed))
            action = env.suggest()
            assert action is not None
            seen = env.act(action)
            assert not seen.done
            picture = Picture.open(io.BytesIO(seen.image.data)).convert("RGB")
            background = (BACKGROUND >> 16, BACKGROUND >> 8 & 255, BACKGROUND & 255)
            colours = {colour: count for count, colour in picture.getcolors(TINY[0] * TINY[1]) or []}
            assert colours.get(background, 0) < 0.1 * TINY[0] * TINY[1]
    finally:
        env.close()


@pytest.mark.desktop
@needs_desktop
@pytest.mark.parametrize("name", LIGHT)
def test_only_the_right_answer_counts(played: dict[str, dict[str, float] | Exception], name: str) -> None:
    assert played[name] == RIGHT


@pytest.mark.desktop
@needs_desktop
@pytest.mark.parametrize("name", HEAVY)
def test_only_the_right_answer_counts_in_large_applications(name: str) -> None:
    if missing := load(name).missing():
        pytest.skip(f"{', '.join(missing)} is not installed: make desktop-apps")
    assert play(name) == RIGHT
