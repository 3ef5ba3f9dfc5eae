"""`schedule`: what waits for what, in the data manager as it is and in the replicas' weights."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from run_processes.data_rig import CONFIG, ENVIRONMENTS, Rig, rolled_out

from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.coordinator.training.ranks import TrainerRanks
from dart.core.curation.orders import Order
from dart.core.curation.schedule import Schedule, Situation, update_due, why_wait
from dart.core.usage import EnvState, ReplicaState, TrainerState
from dart.screenshots.stored import StoredScreenshots
from dart.v1 import session_pb2 as pb

N, TASKS = 4, 3


def settings(sampling: str, training: str) -> config.Config:
    raw = CONFIG.model_dump()
    raw["curation"] |= {"rollouts": N, "max_staleness": 4, "pool": {"enabled": False},
                        "dynamic_rollouts": {"enabled": False}}  # fmt: skip
    raw["trainer"]["trajectories_per_update"] = N * TASKS
    raw["schedule"] = {"sampling": sampling, "training": training}
    return config.parse(raw)


class Life:
    """Environments that take what the data manager gives, end in any order, and a trainer; what was seen is kept."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.chance = rig, random.Random(seed)
        self.running: dict[str, Order] = {}
        self.updating = False
        self.updates: list[int] = []
        """Trajectories of each."""
        self.groups: list[str] = []
        """In the order in which they began."""
        self.ended: set[str] = set()
        self.seen: list[tuple[str, frozenset[str], bool, int]] = []
        """At each beginning: the group, the groups that ran, whether the trainer was at work, who ran."""

    async def environment(self) -> None:
        while True:
            order = await self.rig.data.next()
            assert order is not None
            others = frozenset(one.group_id for one in self.running.values())
            self.seen.append((order.group_id, others, self.updating, len(self.running)))
            if order.group_id not in self.groups:
                self.groups.append(order.group_id)
            self.running[order.trajectory_id] = order
            for _ in range(self.chance.randrange(1, 12)):
                await asyncio.sleep(0)
            del self.running[order.trajectory_id]
            self.ended.add(order.trajectory_id)
            await self.rig.data.finished(order, rolled_out(order, self.chance.random() < 0.6, len(self.updates)))

    async def trainer(self, updates: int) -> None:
        while len(self.updates) < updates:
            batch = await self.rig.data.next_batch(len(self.updates))
            self.updating = True
            if self.rig.settings.schedule.training == "synchronous":
                assert not self.running, "sampling had come to rest"
            for _ in range(20):
                await asyncio.sleep(0)
            await self.rig.data.consumed(batch, len(self.updates) + 1, len(self.updates))
            self.updates.append(sum(len(group.trajectories) for group in batch))
            self.updating = False
            self.rig.data.update_over()

    async def run(self, updates: int) -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            environments = [tasks.create_task(self.environment()) for _ in range(ENVIRONMENTS)]
            await self.trainer(updates)
            for each in environments:
                each.cancel()


@pytest.mark.parametrize("training", ["asynchronous", "synchronous"])
@pytest.mark.parametrize("sampling", ["rollout", "task", "batch"])
async def test_every_mode_trains_and_keeps_its_promise(sampling: str, training: str, tmp_path: Path) -> None:
    async with Rig(tmp_path, settings(sampling, training)) as rig:
        life = Life(rig, seed=7)
        await life.run(updates=8)
    assert len(life.updates) == 8
    most_groups = max(len(others | {group}) for group, others, *_ in life.seen)
    if sampling == "task":
        assert most_groups <= ENVIRONMENTS // N
    if sampling == "batch":
        for group, others, *_ in life.seen:
            batches = {life.groups.index(one) // TASKS for one in (*others, group)}
            assert len(batches) == 1, "only one batch runs at a time"
    if sampling == "rollout" and training == "asynchronous":
        assert any(updating for _, _, updating, _ in life.seen), "no environment waits for the trainer"
    if training == "synchronous":
        assert not any(updating for _, _, updating, _ in life.seen)
        if sampling == "batch":
            assert rig.progress.counts.staleness.max == 0
        else:
            assert min(life.updates) >= N * TASKS


async def test_roll_out_wise_no_environment_waits_for_a_group(tmp_path: Path) -> None:
    """One roll-out of each group goes on and on; the environments of the others take new groups meanwhile."""
    async with Rig(tmp_path, settings("rollout", "asynchronous")) as rig:
        orders = [await rig.order() for _ in range(ENVIRONMENTS)]
        slow = {order.group_id: order for order in orders}
        assert len(slow) == ENVIRONMENTS // N
        done = [order for order in orders if order is not slow[order.group_id]]
        for order in done:
            await rig.data.finished(order, rolled_out(order, True))
        following = [await rig.order() for _ in done]
        assert not slow.keys() & {order.group_id for order in following}


@pytest.mark.parametrize("training", ["asynchronous", "synchronous"])
@pytest.mark.parametrize("sampling", ["rollout", "task", "batch"])
async def test_a_restart_trains_what_it_finds(sampling: str, training: str, tmp_path: Path) -> None:
    """A batch and more is released, a group is half done; the budget leaves little room."""
    wanted = settings(sampling, training)
    wanted = wanted.model_copy(update={"curation": wanted.curation.model_copy(update={"max_staleness": 1})})
    async with Rig(tmp_path, settings("rollout", "asynchronous")) as rig:
        for _ in range(TASKS + 1):
            await rig.group(True, False, True, False)
        half = await rig.order()
        await rig.data.finished(half, rolled_out(half, True))
    async with Rig(tmp_path, wanted) as rig:
        life = Life(rig, seed=3)
        await life.run(updates=4)
    assert len(life.updates) == 4


def test_task_wise_keeps_to_its_sets() -> None:
    mode = Schedule("task", False, rollouts=8, trajectories_per_update=64)
    full = Situation(opens=True, open_groups=2, running=3, waiting=0, environments=23)
    assert why_wait(mode, full) == "every set of environments has a task that has not finished"
    assert why_wait(mode, Situation(True, 1, 8, 0, 23)) is None
    assert why_wait(mode, Situation(False, 2, 9, 0, 23)) is None, "roll-outs of an open group may begin"
    assert why_wait(mode, Situation(True, 0, 0, 0, 3)) is None, "fewer environments than N are one set"


def test_a_batch_is_filled_by_roll_outs_however_many_groups_they_are() -> None:
    mode = Schedule("batch", True, rollouts=8, trajectories_per_update=64)
    assert why_wait(mode, Situation(True, 8, 62, 0, 64, opened=62)) is None, "31 groups of two are no batch of 64"
    assert why_wait(mode, Situation(True, 8, 64, 0, 64, opened=64)) == "the batch has not finished"
    assert why_wait(mode, Situation(False, 8, 63, 0, 64, opened=64)) is None, "its last group has one to begin"
    assert not update_due(mode, Situation(True, 0, 0, 10, 64, opened=62))
    assert update_due(mode, Situation(True, 0, 0, 10, 64, opened=66)), "what was released, however little"


async def test_a_name_that_comes_twice_is_the_newer_instance() -> None:
    """The stream of a restarted worker's former self may be noticed as dead later than the new one begins."""
    fleet = Fleet(60.0)
    envs, policy, ranks = (
        EnvPool(fleet),
        RolloutPool(fleet, StoredScreenshots(None)),
        TrainerRanks(fleet, 1, StoredScreenshots(None)),
    )
    roles = {"env": pb.ROLE_ENV, "rollout": pb.ROLE_ROLLOUT, "train": pb.ROLE_TRAIN}
    both: dict[str, list[Worker]] = {name: [] for name in roles}
    for instance in ("old", "new"):
        for name, role in roles.items():
            worker, _ = fleet.admit(pb.Hello(worker_id=name, instance_id=f"{name}-{instance}", role=role, world_size=1))
            worker.connections = 1
            fleet.became_ready(worker, pb.Ready(slots=3))
            both[name].append(worker)
    for name in ("env", "rollout"):
        fleet.lose(both[name][0], "silent")
    assert envs.usage.counts() == {EnvState.IDLE: 3}
    assert policy.usage.counts() == {ReplicaState.IDLE: 1}
    assert ranks.usage.counts() == {TrainerState.IDLE: 1}
    assert policy.replicas.free
    fleet.lose(both["rollout"][1], "silent")
    assert not policy.replicas.free
    assert policy.usage.counts() == {ReplicaState.LOST: 1}
