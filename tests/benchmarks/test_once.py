"""What is made once for all runs of an experiment: by one command alone, and refused if it is of something else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trials import once, sweep
from benchmarks.trials.protocol import FOLDER, Protocol, load
from benchmarks.trials.sweep import Plan
from dart.errors import UserError

MARKS = {"protocol_sha256": "p", "config_sha256": "c", "base_sha256": "b"}
PROTOCOL = load(FOLDER / "ablation.yaml", Protocol)
TASKS = PROTOCOL.load_config().environment.tasks.training


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sweep, "UNFINISHED", tmp_path / "unfinished")
    return Plan("learning/x", PROTOCOL.config, {"full": ()}, (0, 1), MARKS)


class Dart:
    """Replaces `dart`: it makes a run directory with an evaluation or a collection, in which tasks may lack successes.

    `killed`: it leaves one behind that is half made, as one that was killed does.
    """

    def __init__(self, lacking: dict[str, int] | None = None) -> None:
        self.kept = {task: 16 for task in TASKS} | (lacking or {})
        self.calls: list[list[str]] = []
        self.killed = False

    def __call__(self, what: str, arguments: Sequence[str], lock: int) -> None:
        self.calls.append(list(arguments))
        (place,) = (one for one in arguments if one.startswith("run.directory="))
        run = Path(place.partition("=")[2]) / f"made-{len(self.calls)}"
        run.mkdir(parents=True)
        per_task = {task: {"kept": number} for task, number in self.kept.items()}
        (run / "summary.json").write_text(json.dumps({"collected": {"per_task": per_task}}))
        if self.killed:
            raise KeyboardInterrupt
        (run / "evaluation.json").write_text(json.dumps({"success": {"mean": 0.5}}))


@pytest.fixture
def dart(monkeypatch: pytest.MonkeyPatch) -> Dart:
    made = Dart()
    monkeypatch.setattr(once, "_dart", made)
    return made


# ---- one command alone ----


def test_two_commands_do_not_make_the_same_thing(tmp_path: Path) -> None:
    pool, told = tmp_path / "x" / "pool", r"being made by process \d+.*: wait until that has ended"
    with once.alone(pool), pytest.raises(UserError, match=told), once.alone(pool):
        raise AssertionError("both make it")
    with once.alone(pool):
        pass


def test_a_command_that_was_started_holds_the_lock_after_its_starter_was_killed(tmp_path: Path) -> None:
    """As `dart collect` does, whose half-made pool nobody may remove."""
    with once.alone(tmp_path / "pool") as lock:
        left = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    try:
        with pytest.raises(UserError, match="or by a command that it has started"), once.alone(tmp_path / "pool"):
            pass
    finally:
        left.kill()
        left.wait()
    with once.alone(tmp_path / "pool"):
        pass


def test_neither_evaluation_nor_pool_is_removed_while_another_makes_it(plan: Plan, dart: Dart) -> None:
    for name, make in (
        ("gate", lambda: once.evaluate(plan, "gate", (), ())),
        ("pool", lambda: once.oracle_pool(plan, PROTOCOL)),
    ):
        half = plan.half_made / name / "half"
        half.mkdir(parents=True)
        with once.alone(plan.half_made / name), pytest.raises(UserError, match="wait until that has ended"):
            make()
        assert half.exists() and not dart.calls


def test_what_was_made_meanwhile_is_not_made_again(plan: Plan, dart: Dart, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other command has it made between the first look and the lock."""
    first = once.evaluate(plan, "gate", ["--temperature", "0"], ["a=1"])
    looks = iter([None])
    kept = once._kept
    monkeypatch.setattr(once, "_kept", lambda *given: next(looks, "again") and kept(*given))
    assert once.evaluate(plan, "gate", ["--temperature", "0"], ["a=1"]) == first
    assert len(dart.calls) == 1
    assert json.loads((plan.results / "gate.json").read_text())["code"]["commit"]


def test_a_failed_command_is_one_error(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 2, "", "no browser: install one\n")

    monkeypatch.setattr(once.sources, "current", lambda: {"commit": "c", "changed": []})
    monkeypatch.setattr(once.subprocess, "run", fails)
    with pytest.raises(UserError, match="the oracle's pool: exit code 2: no browser: install one"):
        once.oracle_pool(plan, PROTOCOL)
    with pytest.raises(UserError, match="gate: exit code 2"):
        once.evaluate(plan, "gate", (), ())


# ---- the oracle's pool ----


def test_the_pool_is_collected_once(plan: Plan, dart: Dart) -> None:
    pool = once.oracle_pool(plan, PROTOCOL)
    assert pool == plan.half_made / "pool" / "made-1" and once.oracle_pool(plan, PROTOCOL) == pool
    (asked,) = dart.calls
    assert asked[:2] == ["collect", str(PROTOCOL.config)] and asked[asked.index("--per-task") + 1] == "16"
    assert "watchdog.end_after_seconds=600" in asked
    marks = json.loads((plan.half_made / "pool" / once.MARKS).read_text())
    assert marks["base_sha256"] == "b" and marks["successes_per_task"] == "16" and marks["code"]["commit"]


def test_a_half_made_pool_is_not_used(plan: Plan, dart: Dart) -> None:
    """It has a summary.json, but its collection did not end well."""
    dart.killed = True
    with pytest.raises(KeyboardInterrupt):
        once.oracle_pool(plan, PROTOCOL)
    dart.killed = False
    assert once.oracle_pool(plan, PROTOCOL).name == "made-2"
    assert not (plan.half_made / "pool" / "made-1").exists()


@pytest.mark.parametrize(
    ("mark", "cause"),
    [
        ("config_sha256", "another config"),
        ("base_sha256", "another base policy"),
        ("world_sha256", "another world"),
        ("successes_per_task", "another number of successes"),
    ],
)
def test_a_pool_of_something_else_is_refused(mark: str, cause: str, plan: Plan, dart: Dart) -> None:
    once.oracle_pool(plan, PROTOCOL)
    path = plan.half_made / "pool" / once.MARKS
    path.write_text(json.dumps(json.loads(path.read_text()) | {mark: "other"}))
    with pytest.raises(UserError, match=rf"was made with {cause} .*: move .*/pool away to start afresh"):
        once.oracle_pool(plan, PROTOCOL)
    assert len(dart.calls) == 1


def test_a_pool_of_another_commit_is_used(plan: Plan, dart: Dart) -> None:
    """Else every commit would give the runs after it another pool than those before it."""
    pool = once.oracle_pool(plan, PROTOCOL)
    path = plan.half_made / "pool" / once.MARKS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": {"commit": "other", "changed": []}}))
    assert once.oracle_pool(plan, PROTOCOL) == pool


def test_a_pool_without_some_tasks_successes_is_refused(plan: Plan, dart: Dart) -> None:
    dart.kept["ladder-hard-02"] = 3
    del dart.kept["ladder-easy-01"]
    wanted = "lacks some of the 16 successes of each task: ladder-easy-01 has 0, ladder-hard-02 has 3: "
    for _ in range(2):
        with pytest.raises(UserError, match=wanted):
            once.oracle_pool(plan, PROTOCOL)
    assert len(dart.calls) == 1


def test_a_worlds_digest_is_that_of_its_own_files() -> None:
    digests = [once.world_digest(kind) for kind in ("ladder", "miniwob", "desktop")]
    assert len(set(digests)) == 3 and once.world_digest("ladder") == digests[0]
