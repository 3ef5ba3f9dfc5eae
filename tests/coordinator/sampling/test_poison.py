"""What cannot be trained on: the trainer's refusals, poison in the database, and a trainer that is lost with a batch.

None of it may end a run, nor come back after each restart to end it again.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from run_processes import killed_run
from run_processes.data_rig import CONFIG, Rig, rolled_out
from run_processes.told import events, recorded

from benchmarks.simulation import cluster
from benchmarks.simulation.cluster import DECOUPLED, SetUp, simulate
from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import SimulatedTrainer
from dart.coordinator.sampling.data import MOST_LOSSES
from dart.coordinator.training.ranks import TrainerLost
from dart.coordinator.training.updates import SKIPPED
from dart.core.curation.batches import ReleasedGroup
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store.records import GroupState
from dart.v1 import session_pb2 as pb

# ---- the trainer's refusals ----


SET_UP = SetUp("small", environments=24, replicas=2, trajectories_per_update=16, tasks=12, rollouts=4)


class Picky(SimulatedTrainer):
    """Never trains on a group of the first batch, and names it; never on one of the third, and does not say why."""

    named = unnamed = ""

    def train_batch(self, command: pb.TrainBatch) -> None:
        groups = {sample.group_id for sample in command.samples}
        if command.update == 1 and not self.named:
            type(self).named = max(groups)
        if command.update == 3 and not self.unnamed:
            type(self).unnamed = min(groups)
        if self.named in groups:
            self.fail(command, pb.FAILURE_CODE_INVALID, f"sample {self.named}-2/0 has token 9999")
        elif self.unnamed in groups:
            self.fail(command, pb.FAILURE_CODE_TRAINER, "a loss is not finite")
        else:
            super().train_batch(command)

    def fail(self, command: pb.TrainBatch, code: pb.FailureCode, why: str) -> None:
        self.answer(command, 1.0, failure=pb.Failure(code=code, message=why))


def test_a_run_goes_on_without_what_the_trainer_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SimulatedTrainer", Picky)
    told = recorded(monkeypatch)
    summary = simulate(SET_UP, DECOUPLED, Timings(), hours=1.0)
    assert summary["updates"] > 4
    refused = [one for one in told if one["event"] == "group" and one["cause"] == "cannot be trained on"]
    assert refused[0]["group"] == Picky.named and Picky.unnamed in {one["group"] for one in refused[1:]}
    why = f"the trainer refuses: train: sample {Picky.named}-2/0 has token 9999"
    assert refused[0]["reason"] == f"cannot be trained on: {why}"
    assert 4 <= len(refused[1:]) <= 5, "its whole batch"
    assert all(one["reason"].endswith("a loss is not finite") for one in refused[1:])
    assert summary["dropped"]["cannot be trained on"] == 4 * len(refused)


class Hopeless(Picky):
    """Refuses everything."""

    def train_batch(self, command: pb.TrainBatch) -> None:
        self.fail(command, pb.FAILURE_CODE_TRAINER, "out of memory")


def test_a_trainer_that_refuses_everything_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SimulatedTrainer", Hopeless)
    with pytest.raises(UserError, match=r"has refused 64 trajectories and made no update .* with: .* out of memory"):
        simulate(SET_UP, DECOUPLED, Timings(), hours=6.0)


class Mortal(SimulatedTrainer):
    """Is gone in the middle of its second update."""

    def train_batch(self, command: pb.TrainBatch) -> None:
        if command.update == 2:
            self._fleet.lose(self.worker, "silent")
        else:
            super().train_batch(command)


def test_what_the_trainer_was_lost_with_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SimulatedTrainer", Mortal)
    told = recorded(monkeypatch)
    with pytest.raises(TrainerLost):
        simulate(SET_UP, DECOUPLED, Timings(), hours=6.0)
    (lost,) = [event for event in told if event["event"] == "trainer_lost"]
    assert len(lost["groups"]) >= 4 and len(set(lost["groups"])) == len(lost["groups"])


# ---- updates that the trainer skips ----


class Skips(killed_run.Trainer):
    """The gradient of its third update is not finite."""

    def answer(self, command: Any, seconds: float, **reply: Any) -> None:
        if (trained := reply.get("trained")) and trained.update == 3:
            trained.metrics["steps_taken"] = 0.0
            trained.remarks.append("the gradient's norm is nan: the optimiser's step was skipped")
        super().answer(command, seconds, **reply)


async def test_a_skipped_update_costs_its_batch_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(killed_run, "Trainer", Skips)
        async with asyncio.timeout(killed_run.HANG_SECONDS):
            summary = await killed_run.work(run, updates=3)
    assert summary["updates"] == 3, "it counts"
    told = killed_run.told(run)
    (skipped,) = [set(line["groups"]) for line in told if line.get("trained") == 3]
    assert [one["why"] for one in events(run.metrics, "trainer_remark")] == [
        "the gradient's norm is nan: the optimiser's step was skipped"
    ]
    assert [one["trainer"].get("steps_taken") for one in events(run.metrics, "update")] == [None, None, 0]
    with closing(sqlite3.connect(run.database)) as connection:
        query = "select g.id, count(*) from groups g join trajectories t on t.group_id = g.id where g.fate = ? "
        query += "and t.fate = 'dropped: cannot be trained on' group by g.id"
        found = dict(connection.execute(query, (f"dropped: cannot be trained on: {SKIPPED}",)).fetchall())
    assert set(found) == skipped
    assert summary["dropped"]["cannot be trained on"] == sum(found.values()) >= 8

    # As if the run had been killed before the checkpoint that follows the skipped update.
    shutil.rmtree(run.checkpoints / "v000003")
    with closing(sqlite3.connect(run.database)) as connection, connection:
        connection.execute("update runs set state = 'interrupted', finished = null")
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        summary = await killed_run.work(run, updates=5)
    assert summary["updates"] == 5 and summary["dropped"]["cannot be trained on"] == sum(found.values())
    later = killed_run.told(run)[len(told) :]
    assert {"resumed": 2} in later and [line["trained"] for line in later if "trained" in line] == [3, 4, 5]
    assert not skipped & {group for line in later if "trained" in line for group in line["groups"]}


# ---- poison in the database ----

POISON = {
    "a reward of inf": "update trajectories set reward = 9e999 where id = :id",
    "a reward of 1e308": "update trajectories set reward = 1e308 where id = :id",
    "versions with a gap": "update steps set versions_json = '[[0, 0, 1]]' where trajectory_id = :id",
    "no versions": "update steps set versions_json = '[]' where trajectory_id = :id",
    "no tokens": "update steps set token_ids = x'', logprobs = x'', versions_json = '[]' where trajectory_id = :id",
    "no steps": "delete from steps where trajectory_id = :id",
    "a token beyond the vocabulary": "update steps set token_ids = cast(x'ffffff00' || substr(token_ids, 5) as blob)"
                                     " where trajectory_id = :id",
    "log-probabilities of NaN": "update steps set logprobs = cast(x'0000c07f' || substr(logprobs, 5) as blob)"
                                " where trajectory_id = :id",
    "no advantage": "update trajectories set advantages_json = null"
                    " where group_id = (select group_id from trajectories where id = :id)",
    "too many advantages": f"update trajectories set advantages_json = '{[0.5] * 99}' where id = :id",
}  # fmt: skip
"""What a run may have stored, as changes of the trajectory `:id`. With each of them, `--resume` used to end."""
ONLY_RELEASED = ("no advantage", "too many advantages")
"""Those that open groups do not have."""


def poison(directory: Path, kind: str, *trajectories: str) -> None:
    with closing(sqlite3.connect(directory / "run.db")) as connection, connection:
        for trajectory in trajectories:
            assert connection.execute(POISON[kind], {"id": trajectory}).rowcount > 0


@pytest.mark.parametrize("kind", POISON)
async def test_a_restart_drops_a_poisoned_group_and_trains_on(kind: str, tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        for _ in range(3):
            await rig.group(True, False, True, False)
    poison(tmp_path, kind, "g000001-2")
    async with Rig(tmp_path) as again:
        assert (await again.database.group("g000001")).state is GroupState.DROPPED  # type: ignore[union-attr]
        assert again.events("group")[-1]["reason"].startswith("cannot be trained on: ")
        batch = await again.batch()
        assert {group.id for group in batch} == {"g000002", "g000003"}
        await again.data.consumed(batch, 1, 0)
    async with Rig(tmp_path) as third:
        assert third.data.waiting_groups == 0, "it does not come back"


@pytest.mark.parametrize("kind", [name for name in POISON if name not in ONLY_RELEASED])
async def test_a_restart_drops_an_open_group_that_is_poisoned(kind: str, tmp_path: Path) -> None:
    five = CONFIG.model_copy(update={"curation": CONFIG.curation.model_copy(update={"rollouts": 5})})
    async with Rig(tmp_path, five) as rig:
        await rig.group(True, False, True, False)
    poison(tmp_path, kind, "g000001-2")
    async with Rig(tmp_path, five) as again:
        group = await again.database.group("g000001")
        assert group is not None and group.state is GroupState.DROPPED
        assert (await again.order()).group_id == "g000002"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed when its trainer had made its third update and nothing had recorded that."""
    run = RunDirectory(tmp_path_factory.mktemp("killed"))
    process = killed_run.process(run, 8, "batch-trained:3")
    assert process.returncode == -signal.SIGKILL, process.stderr[-2000:]
    return run.path


def waiting(run: Path, kind: str) -> dict[str, str]:
    """The first trajectory of each group that waits for the trainer, or for more roll-outs."""
    states = ("released",) if kind in ONLY_RELEASED else ("released", "open")
    query = "select g.id, min(t.id) from groups g join trajectories t on t.group_id = g.id "
    query += f"where t.pooled_from = '' and g.state in ({', '.join('?' * len(states))}) "
    query += "and (g.state = 'open' or t.advantages_json is not null) group by g.id"
    with closing(sqlite3.connect(run / "run.db")) as connection:
        return dict(connection.execute(query, states).fetchall())


@pytest.mark.parametrize("kind", POISON)
async def test_a_resumed_run_makes_updates_though_all_that_waits_is_poisoned(
    kind: str, killed: Path, tmp_path: Path
) -> None:
    run = RunDirectory(shutil.copytree(killed, tmp_path / "run"))
    poisoned = waiting(run.path, kind)
    assert len(poisoned) >= 2, "at least the batch of the third update"
    poison(run.path, kind, *poisoned.values())
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        summary = await killed_run.work(run, updates=4)
    assert summary["updates"] == 4
    lines = killed_run.told(run)
    (resumed,) = [number for number, line in enumerate(lines) if "resumed" in line]
    made = {line["trained"]: line["groups"] for line in lines[resumed:] if "trained" in line}
    assert list(made) == [3, 4], "after version 2, of which the newest checkpoint is"
    assert not poisoned.keys() & {group for groups in made.values() for group in groups}
    with closing(sqlite3.connect(run.database)) as connection:
        fates = connection.execute("select id, state, fate from groups").fetchall()
    dropped = {group: fate for group, state, fate in fates if state == "dropped"}
    assert all(dropped.get(group, "").startswith("dropped: cannot be trained on: ") for group in poisoned)


async def test_a_poisoned_success_leaves_the_pool(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.group(True, False, False, False)
    poison(tmp_path, "no versions", "g000001-1")
    async with Rig(tmp_path) as again:
        await again.group(False, False, False, False)
        (lost,) = again.events("pool_entry_lost")
        assert lost["success"] == "g000001-1" and lost["why"] == "step 0 has weight versions for 0 of 2 tokens"
        assert again.events("group")[-1]["reason"] == "all 4 failed"


async def test_two_groups_may_take_the_same_poisoned_success(tmp_path: Path) -> None:
    """Each of two groups of one task fails while the other waits for the success to be read."""
    async with Rig(tmp_path) as rig:
        await rig.group(True, False, False, False)
    poison(tmp_path, "no versions", "g000001-1")
    async with Rig(tmp_path) as again:
        orders = [await again.order() for _ in range(8)]
        assert len({order.group_id for order in orders}) == 2
        last = [orders[3], orders[7]]
        for order in orders:
            if order not in last:
                await again.data.finished(order, rolled_out(order, False))
        await asyncio.gather(*(again.data.finished(order, rolled_out(order, False)) for order in last))
        assert len(again.events("pool_entry_lost")) == 1
        assert [event["reason"] for event in again.events("group")][-2:] == ["all 4 failed"] * 2


# ---- a trainer that is lost ----


async def test_a_batch_with_which_the_trainer_was_lost_comes_last_and_then_no_more(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        for _ in range(4):
            await rig.group(True, False, True, False)
        batch = await rig.batch()
        assert [group.id for group in batch] == ["g000001", "g000002"]
        rig.data.trainer_lost(batch, "worker train is lost: silent")
        await rig.journal.flush(rig.database)
    async with Rig(tmp_path) as again:
        batch = await again.batch()
        assert [group.id for group in batch] == ["g000003", "g000004"], "another batch first"
        await again.data.consumed(batch, 1, 0)
        batch = await again.batch()
        assert [group.id for group in batch] == ["g000001", "g000002"]
        for _ in range(MOST_LOSSES - 1):
            again.data.trainer_lost(batch, "worker train is lost: silent")
        await again.journal.flush(again.database)
    async with Rig(tmp_path) as third:
        reasons = [event["reason"] for event in third.events("group")[-2:]]
        assert reasons == ["cannot be trained on: the trainer was lost 3 times while it trained on it"] * 2
        assert third.data.waiting_groups == 0


async def test_refusals_are_forgotten_when_an_update_is_made(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:

        async def batch() -> list[ReleasedGroup]:
            for _ in range(2):
                await rig.group(True, False, True, False)
            return await rig.batch()

        for _ in range(3):
            await rig.data.unusable(await batch(), "out of memory")
        made = await batch()
        await rig.data.consumed(made, 1, 0)
        for _ in range(3):
            await rig.data.unusable(await batch(), "out of memory")
        with pytest.raises(UserError, match=r"has refused 32 trajectories and made no update .* with: out of memory"):
            await rig.data.unusable(await batch(), "out of memory")
        assert rig.progress.counts.fates == {"dropped: cannot be trained on": 56, "trained": 8}
