"""The simulation with faults: its invariants hold, and a seed is a history."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import chaos as command
from benchmarks.endurance.proxy import Proxy
from benchmarks.endurance.witness import Witness
from benchmarks.simulation import virtual_time
from benchmarks.simulation.faults.chaos import Cluster, Outcome, chaos, undisturbed
from benchmarks.simulation.faults.harm import EVERYBODY, Curve, Harms
from benchmarks.simulation.faults.plan import LASTING, Fault, Planned, plan
from benchmarks.simulation.timings import Timings
from dart.coordinator.fleet.sessions import Fleet
from dart.core.fleet.replica import Replica, Request
from dart.core.fleet.replicas import Replicas

HOURS, GAP_SECONDS = 0.5, 12.0
SMALL = Cluster(environments=20, replicas=2, tasks=10)


Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`chaos` on the small cluster, under the faults given."""
    folders = (tmp_path / str(number) for number in range(10))

    def simulated(*planned: Planned, hours: float = 0.3, **options: object) -> Outcome:
        options = {"cluster": SMALL} | options
        return chaos(5, list(planned), hours, next(folders), Timings(), **options)  # type: ignore[arg-type]

    logging.disable(logging.CRITICAL)
    return simulated


def test_a_plan_is_its_seed_and_has_every_class() -> None:
    assert plan(3, 2.0, 20.0) == plan(3, 2.0, 20.0) != plan(4, 2.0, 20.0)
    seen = {one.fault for seed in range(10) for one in plan(seed, 2.0, 20.0)}
    assert seen == set(Fault)
    assert all(LASTING[one.fault][0] <= one.seconds <= LASTING[one.fault][1]
               for one in plan(0, 2.0, 20.0) if one.fault in LASTING)  # fmt: skip


def test_under_faults_nothing_is_lost_and_a_seed_replays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    first, again = (
        chaos(1, plan(1, HOURS, GAP_SECONDS), HOURS, tmp_path / name, Timings(), SMALL) for name in ("first", "again")
    )
    assert first.wrong == []
    assert first.faults.total() > 50
    assert first.trajectories > 0
    assert again.decisions == first.decisions


# ---- throughput ----


def test_what_the_healthy_time_is_worth() -> None:
    """One trajectory in each second from the 100th, on two env workers of which one is at fault for 100 s."""
    curve = Curve([100.0 + number for number in range(900)], 1000.0)
    assert (curve.at(99.0), curve.at(110.0), curve.at(1100.0)) == (0, 11, pytest.approx(1000, abs=1))
    harms = Harms(["env-0", "env-1"], ["rollout-0"])
    harms.happened(Planned(Fault.ENVIRONMENTS_FAIL, 0.0, 0.0, 0.0), "env-0", 400.0, 100.0)
    harms.process_ended(0.0, 1000.0)
    assert harms.worth(curve) == pytest.approx((901 + 290 + 340) / 2, abs=15)

    harms = Harms(["env-0", "env-1"], ["rollout-0", "rollout-1"])
    harms.happened(Planned(Fault.REPLICA_FAILS, 0.0, 0.0, 0.0), "rollout-0", 0.0, 2000.0)
    harms.process_ended(0.0, 1000.0)
    assert harms.worth(curve) == pytest.approx(400, abs=10), "half of the replicas, for all the time"

    harms = Harms(["env-0"], ["rollout-0"])
    harms.happened(Planned(Fault.SLOW_DISK, 0.0, 0.0, 0.0), EVERYBODY, 200.0, 40.0)
    harms.process_ended(0.0, 1000.0)
    assert harms.worth(curve) == pytest.approx(800, abs=15), "it goes on where it was, after 100 s"


FAILING = Planned(Fault.REPLICA_FAILS, 60.0, 1300.0, 0.0)


def test_a_router_that_prefers_the_failing_replica_does_not_make_the_share_of_the_healthy_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = undisturbed(0.4, tmp_path / "undisturbed", Timings(), SMALL)
    sound = run(FAILING, hours=0.4, curve=curve)
    assert sound.wrong == []
    assert sound.worth > 20

    take = Replicas.take

    def worst(self: Replicas[object], request: Request[object], now: float) -> Replica[object] | None:
        failing = self.get("rollout-0")
        if failing is not None and failing.has_room:
            return self._give(request, failing, now)
        return take(self, request, now)

    monkeypatch.setattr(Replicas, "take", worst)
    broken = run(FAILING, hours=0.4, curve=curve)
    assert any("that the healthy time is worth" in wrong for wrong in broken.wrong), broken.finished


# ---- stalls and their culprits ----


def test_a_trainer_that_hangs_is_the_culprit_of_the_stall(run: Run) -> None:
    outcome = run(Planned(Fault.TRAINER_HANGS, 1200.0, 1000.0, 0.0), hours=0.8)  # not in its first update
    assert outcome.wrong == []
    assert ("trainer", "train (rank 0)") in {(kind, culprit) for _, kind, culprit in outcome.stalls}
    assert "weights" not in {kind for _, kind, _ in outcome.stalls}, "the replicas are not to blame"


def test_environments_that_all_hang_are_the_culprits_of_the_stall(run: Run) -> None:
    hanging = [Planned(Fault.ENVIRONMENTS_HANG, 400.0, 1000.0, draw) for draw in (0.1, 0.9)]
    outcome = run(*hanging)
    assert outcome.wrong == []
    assert {culprit for _, _, culprit in outcome.stalls} & {"env-0", "env-1"}
    assert {culprit for _, _, culprit in outcome.stalls} <= {"env-0", "env-1", "env"}


@pytest.mark.parametrize("missing", ["train", "rollout-1", "env-0"])
def test_a_worker_that_never_comes_is_the_culprit_of_the_stall(run: Run, missing: str) -> None:
    alone = Cluster(environments=10, replicas=2, tasks=10, missing=frozenset({missing}))
    outcome = run(hours=0.2, cluster=alone)
    assert outcome.wrong == []
    assert [(kind, culprit) for _, kind, culprit in outcome.stalls] == [("start", missing.split("-", maxsplit=1)[0])]


def test_blaming_a_worker_that_was_never_harmed_is_noticed() -> None:
    harms = Harms(["env-0", "env-1"], ["rollout-0"])
    harms.happened(Planned(Fault.ENVIRONMENTS_HANG, 0.0, 0.0, 0.0), "env-0", 1000.0, 100.0)
    assert harms.wrongly_blamed("env-1", since=1000.0)
    assert harms.wrongly_blamed("train (rank 0)", since=1000.0)
    assert harms.wrongly_blamed("env-0", since=5000.0), "it was well by then"
    assert not harms.wrongly_blamed("env-0", since=1000.0)
    assert not harms.wrongly_blamed("env, rollout", since=1000.0)
    assert not harms.wrongly_blamed("the queue of turns", since=1000.0)


def test_only_a_fault_of_the_trainer_excuses_that_the_run_ends() -> None:
    harms = Harms(["env-0"], ["rollout-0"])
    harms.happened(Planned(Fault.TRAINER_HANGS, 0.0, 0.0, 0.0), "train", 0.0, 1000.0)
    harms.happened(Planned(Fault.STREAM_CUT, 0.0, 0.0, 0.0), "train", 0.0, 8.0)
    assert not harms.may_end_the_run(10.0)
    harms.happened(Planned(Fault.STREAM_CUT, 0.0, 0.0, 0.0), "train", 7.0, 8.0)
    assert harms.may_end_the_run(10.0)
    assert not harms.may_end_the_run(100.0)
    harms.happened(Planned(Fault.TRAINER_FAILS, 0.0, 0.0, 0.0), "train", 200.0, 30.0)
    assert harms.may_end_the_run(230.0) and not harms.may_end_the_run(400.0)
    harms.process_ended(0.0, 400.0)
    harms.happened(Planned(Fault.TRAINER_KILLED, 0.0, 0.0, 0.0), "train", 500.0, 0.0)
    assert harms.may_end_the_run(5000.0)


# ---- the wall clock, twins and garbage ----


def test_the_wall_clock_is_set_without_any_effect_on_the_loop() -> None:
    async def clocks() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.VirtualLoop)
        loop.set_wall_clock(-3600.0)
        await asyncio.sleep(10.0)
        return [loop.time(), time.monotonic(), time.time()]

    start = virtual_time.START
    assert virtual_time.run(clocks()) == [start + 10, start + 10, start + 10 - 3600]


def test_setting_the_wall_clock_changes_nothing_before_a_resume(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed process reads what is stored in the wall clock's order, so it may begin with another group."""
    monkeypatch.setattr("benchmarks.simulation.faults.chaos.WALL_CLOCK_SECONDS", 0.0)
    jumps = [Planned(Fault.WALL_CLOCK, at, 0.0, draw) for at, draw in ((300.0, 0.9), (600.0, 0.0), (900.0, 1.0))]
    still = run(*jumps)
    monkeypatch.undo()
    jumped = run(*jumps)
    assert (still.wrong, jumped.wrong) == ([], [])
    assert jumped.wall_clock_ahead == pytest.approx((0.4 - 0.5 + 0.5) * 4 * 3600)
    before_the_resume = [[at for at in one.finished if at < 0.3 * 3600] for one in (still, jumped)]
    assert before_the_resume[0] == before_the_resume[1] != []


def test_a_twin_is_refused_and_changes_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = [Planned(Fault.TWIN, 300.0 + 30 * number, 0.0, number / 10) for number in range(10)]
    dialled = run(*twins)
    monkeypatch.setattr("benchmarks.simulation.faults.chaos.twin_admitted", lambda link: "")
    alone = run(*twins)
    assert (dialled.wrong, alone.wrong) == ([], [])
    assert dialled.decisions == alone.decisions


def test_a_twin_that_is_admitted_is_noticed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "rival", lambda self, hello: None)
    outcome = run(Planned(Fault.TWIN, 300.0, 0.0, 0.0))
    assert any("a twin of env-0 was admitted" in wrong for wrong in outcome.wrong)


def test_a_trainer_that_answers_garbage_is_asked_again(run: Run) -> None:
    outcome = run(*(Planned(Fault.GARBAGE, 200.0 + 60 * number, 0.0, 0.999) for number in range(15)))
    assert (outcome.wrong, outcome.resumes) == ([], 1)
    assert outcome.updates > 1


# ---- the command ----


def test_the_command_exits_with_1_and_says_which_seed_to_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def one(seed: int, hours: float, gap_seconds: float, curve: Curve) -> Outcome:
        outcome = Outcome(seed, hours, wrong=["something"] if seed == 8 else [])
        outcome.faults[Fault.TWIN] = 1
        return outcome

    monkeypatch.setattr(command, "one", one)
    monkeypatch.setattr(command, "undisturbed", lambda *_: Curve([], 1.0))
    monkeypatch.setattr(logging, "disable", lambda level: None)
    out = tmp_path / "chaos.json"
    asked = ["chaos", "--faults", "3", "--seed", "7", "--hours", "1", "--gap-seconds", "6", "--out", str(out)]
    monkeypatch.setattr("sys.argv", asked)
    assert command.main() == 1
    replay = "replay with: python -m benchmarks.chaos --seed 8 --faults 1 --hours 1 --gap-seconds 6"
    assert capsys.readouterr().out.strip().endswith(replay)
    assert json.loads(out.read_text(encoding="utf-8"))["wrong"] == {"8": ["something"]}
    monkeypatch.setattr("sys.argv", [*asked, "--seed", "9"])
    assert command.main() == 0


def _consumed(database: Path, update: int, group: str = "g") -> None:
    """As if this update had trained on the group."""
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript(
            "CREATE TABLE IF NOT EXISTS trajectories (id); CREATE TABLE IF NOT EXISTS checkpoints (version, kept);"
            "CREATE TABLE IF NOT EXISTS groups (id, consumed_by_update); DELETE FROM groups;"
            f"INSERT INTO groups VALUES ('{group}', {update}); INSERT INTO checkpoints VALUES ({update}, 1);"
        )


def test_a_resume_excuses_no_group_that_was_trained_on_after_it(tmp_path: Path) -> None:
    """An early resume must not hide whatever is trained on twice later."""
    witness = Witness(tmp_path / "run.db")
    _consumed(witness.database, 3, "another")
    witness.resumed()
    for update in (10, 12):
        _consumed(witness.database, update)
        witness.look()
    assert witness.wrong == ["group g was consumed by update 10, then by 12"]


def test_a_group_may_be_trained_on_again_after_a_resume_from_before(tmp_path: Path) -> None:
    witness = Witness(tmp_path / "run.db")
    _consumed(witness.database, 3, "another")
    _consumed(witness.database, 5)  # nobody has looked before the coordinator is killed
    with contextlib.closing(sqlite3.connect(witness.database)) as connection, connection:
        connection.execute("DELETE FROM checkpoints WHERE version = 5")
    witness.resumed()
    _consumed(witness.database, 6)
    witness.look()
    assert witness.wrong == []


async def _seconds_until_an_echo(held: float) -> float:
    """Dial through the proxy while it holds the network; when the answer came, from the beginning of that."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        proxy = Proxy(server.sockets[0].getsockname()[1])
        await proxy.start()
        began = time.monotonic()
        holding = asyncio.create_task(proxy.hold(held))
        await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        took = time.monotonic() - began
        await holding
        writer.close()
        await proxy.stop()
        return took


def test_who_dials_while_the_network_is_held_is_held_too() -> None:
    assert asyncio.run(asyncio.wait_for(_seconds_until_an_echo(0.4), 20.0)) >= 0.4
