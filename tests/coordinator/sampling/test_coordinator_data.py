"""The data manager with a real database: decisions and their reasons, back-pressure, a restart in the middle."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_processes.data_rig import CONFIG, Rig, rolled_out
from store_samples import fates

from dart import config
from dart.coordinator.fleet.sessions import InfrastructureError
from dart.core.curation.batches import ReleasedGroup, samples_of
from dart.core.curation.orders import FAILING_SECONDS, Order
from dart.core.curation.submitted import NotWanted
from dart.core.types import Image, Task
from dart.core.usage import EnvState
from dart.errors import UserError
from dart.store.blobs import BlobUnreachable
from dart.store.records import GroupState
from dart.wire.convert import sample_to_proto


async def test_groups_are_judged_once_with_reasons(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.group(False, False, False, False)
        await rig.group(True, False, True, False)
        assert [event["reason"] for event in rig.events("group")] == ["all 4 failed", "2 of 4 succeeded"]
        assert dict(rig.progress.counts.fates) == {"dropped: all failed": 4}
        assert await fates(rig.database) == {"dropped: all failed": 4, "pending": 4}
        (group,) = await rig.database.unfinished_groups((GroupState.RELEASED,))
        assert group.detail == "2 of 4 succeeded"


async def test_a_pooled_success_stands_in_for_one_failure(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.group(True, False, False, False, version=1)
        rig.progress.resumed(1, 1)
        failed = await rig.group(False, False, False, False, version=1)
        (won,) = [e for e in rig.events("pooled")]
        assert won["success"] == "g000001-1" and won["replaced"] == failed[-1].trajectory_id
        first, second = await rig.batch(1)
        assert [t.reward for t in second.trajectories] == [0, 0, 0, 1]
        copy = second.trajectories[-1]
        assert copy.pooled_from == "g000001-1" and tuple(copy.steps[0].generation.logprobs) == (-0.5, -0.25)
        image = copy.steps[0].images[0]
        assert (image.sha256, image.data) == (Image.of(b"g000001-1", "image/png", 1, 1).sha256, b""), "without bytes"
        await rig.data.consumed([first, second], 1, 1)
        assert await fates(rig.database) == {"trained": 8, "dropped: replaced by a pooled success": 1}
        # dropped + trained = finished + pooled
        assert (
            sum(rig.progress.counts.fates.values())
            == rig.progress.counts.trajectories + rig.progress.counts.pooled
            == 9
        )


def sent(batch: list[ReleasedGroup]) -> dict[tuple[str, int], float]:
    """The advantage of each sample, as the trainer gets it."""
    messages = [sample_to_proto(sample) for sample in samples_of(batch)]
    return {(one.trajectory_id, one.step_index): one.advantage for one in messages}


async def test_advantages_of_steps_reach_the_trainer_also_after_a_restart_and_from_the_pool(tmp_path: Path) -> None:
    credit = config.Advantage(kind="gigpo", gamma=0.5, std_normalise=False)
    settings = CONFIG.model_copy(update={"trainer": CONFIG.trainer.model_copy(update={"advantage": credit})})
    # Each trajectory's two steps show its own screenshot, so they form a step group: returns 1/2 and 1, or 0 and 0.
    wanted = {(f"g000001-{n}", step): -0.5 for n in (2, 4) for step in (0, 1)}
    wanted |= {(f"g000001-{n}", step): 0.5 + (-0.25, 0.25)[step] for n in (1, 3) for step in (0, 1)}
    # The copy has a reward of 1 where the mean is 1/4.
    wanted |= {(f"g000002-{n}", step): -0.25 for n in (1, 2, 3) for step in (0, 1)}
    wanted |= {("g000002-pooled", step): 0.75 + (-0.25, 0.25)[step] for step in (0, 1)}
    async with Rig(tmp_path, settings) as rig:
        await rig.group(True, False, True, False)
        await rig.group(False, False, False, False)
        assert sent(await rig.batch()) == wanted
        stored = await rig.database.trajectory("g000001-1")
        assert stored and stored.advantages == (0.25, 0.75)
        replaced = await rig.database.trajectory("g000002-4")
        assert replaced and replaced.advantages == ()
    async with Rig(tmp_path, settings) as again:
        assert sent(await again.batch()) == wanted


async def test_counters_are_exact_after_a_restart(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.group(True, False, False, False)
        await rig.group(False, False, False, False)
        batch = await rig.batch()
        await rig.data.consumed(batch, 1, 0)
        order = await rig.order()
        await rig.data.finished(order, rolled_out(order, True))
        kept = rig.progress.counts
        stored = await rig.database.totals()
        assert (stored.trajectories, stored.pooled, stored.env_steps) == (9, 1, 18)
        assert stored.trained_steps == kept.trained_steps == 16
        assert dict(stored.fates) == kept.fates == {"trained": 8, "dropped: replaced by a pooled success": 1}
        assert await rig.database.release_again(0) == 2
    async with Rig(tmp_path) as again:
        assert {group.id for group in await again.batch()} == {group.id for group in batch}


@pytest.mark.parametrize("unreadable", [False, True])
async def test_a_success_whose_screenshot_is_lost_leaves_the_pool(tmp_path: Path, unreadable: bool) -> None:
    async with Rig(tmp_path) as rig:
        orders = await rig.group(True, True, False, False)
        lost = rolled_out(orders[1], True).steps[0].images[0].sha256.hex()
        (path,) = [
            path for path in (tmp_path / "blobs").rglob("*") if lost.endswith(path.name[-40:]) and path.is_file()
        ]
        path.unlink()
        if unreadable:
            path.mkdir()
        await rig.group(False, False, False, False)
        assert [event["success"] for event in rig.events("pool_entry_lost")] == ["g000001-2"]
        assert rig.events("pooled")[-1]["success"] == "g000001-1"


async def test_a_store_that_is_away_for_a_moment_costs_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(*_: Any, **__: Any) -> Any:
        raise BlobUnreachable("the object store s3://bucket failed")

    async with Rig(tmp_path) as rig:
        await rig.group(True, True, False, False)
        with monkeypatch.context() as patch:
            patch.setattr(rig.database, "trajectory", away)
            await rig.group(False, False, False, False)
        assert not rig.events("pool_entry_lost") and not rig.events("pooled")
        assert "s3://bucket failed" in caplog.text
        await rig.group(False, False, False, False)
        assert len(rig.events("pooled")) == 1


async def test_an_old_success_is_pooled_without_its_log_probs(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.group(True, False, False, False, version=0)
        rig.progress.resumed(0, 5)
        await rig.group(False, False, False, False, version=5)
        await rig.group(True, False, False, False, version=5)
        with_copy, _ = await rig.batch(5)
        copy = with_copy.trajectories[-1]
        assert copy.pooled_from and not any(step.generation.logprobs for step in copy.steps)
        assert copy.oldest_version == 5


async def test_the_pool_can_be_switched_off(tmp_path: Path) -> None:
    off = CONFIG.model_copy(
        update={"curation": CONFIG.curation.model_copy(update={"pool": config.Pool(enabled=False)})}
    )
    async with Rig(tmp_path, off) as rig:
        await rig.group(True, False, False, False)
        await rig.group(False, False, False, False)
        assert rig.progress.counts.pooled == 0 and rig.progress.counts.fates == {"dropped: all failed": 4}


async def test_plans_follow_what_was_seen_and_survive_a_restart(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.group(True, True, True, False, steps=3)
        order = await rig.order()
        # 3 of 4: N = ⌊2 + (4 − 2)·(4/3 − 1)/(1/0.6 − 1)⌋ = ⌊2 + 2·0.5⌋ = 3; three steps and a margin of one
        assert order.step_limit == 4
        assert [event["reason"] for event in rig.events("plan")] == [
            "N 4→3: success 0.75 over the last 4",
            "step limit 9→4: the longest success took 3 steps",
        ]
    async with Rig(tmp_path) as again:
        (group,) = await again.database.unfinished_groups((GroupState.OPEN,))
        assert group.planned == 3
        assert group.plan == "N 3: success 0.75 over the last 4; step limit 4: the longest success took 3 steps"
        orders = [await again.order() for _ in range(4)]
        assert [one.group_id for one in orders] == ["g000002"] * 3 + ["g000003"]
        assert {one.step_limit for one in orders} == {4}
        assert {one.attempt for one in orders[:3]} == {2}


async def test_submitted_tasks_outlive_a_restart(tmp_path: Path) -> None:
    first, second = (Task("miniwob", "click-color", seed) for seed in (3, 5))
    async with Rig(tmp_path) as rig:
        for _ in range(4):
            await rig.order()  # a task that the run chose itself
        rig.data.submit([first, second])
        rig.data.submit([first])
        with pytest.raises(NotWanted, match="is not trained on in this run"):
            rig.data.submit([second, replace(second, name="enter-text")])
        assert [(await rig.order()).task for _ in range(4)] == [first] * 4
        await rig.journal.flush(rig.database)
    async with Rig(tmp_path) as again:
        assert again.data.submitted_tasks == 2, "not the one that has been opened"
        for _ in range(8):
            assert (await again.order()).attempt == 2, "of the groups that were open"
        assert [(await again.order()).task for _ in range(8)] == [second] * 4 + [first] * 4
        assert again.data.submitted_tasks == 0
    async with Rig(tmp_path) as third:
        assert third.data.submitted_tasks == 0


async def test_a_restart_loses_no_group_and_repeats_no_replacement(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.group(True, False, False, False)
        await rig.group(False, False, False, False)
        half = [await rig.order() for _ in range(4)]
        await rig.data.finished(half[0], rolled_out(half[0], True))
    async with Rig(tmp_path) as again:
        first, second = await again.batch()
        assert [t.reward for t in first.trajectories] == [1, 0, 0, 0]
        assert sorted(t.pooled_from for t in second.trajectories) == ["", "", "", "g000001-1"]
        assert sum(t.reward for t in second.trajectories) == 1
        rest = [await again.order() for _ in range(3)]
        assert {one.trajectory_id for one in rest} == {one.trajectory_id for one in half[1:]}
        for order in rest:
            await again.data.finished(order, rolled_out(order, False))
        assert again.events("group")[-1]["reason"] == "1 of 4 succeeded"
        # The copy's uses were counted from the database: the success that has not been used comes first.
        await again.group(False, False, False, False)
        assert again.events("pooled")[-1]["success"] == half[0].trajectory_id


async def test_an_infrastructure_failure_costs_the_others_nothing(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        orders = [await rig.order() for _ in range(4)]
        rig.data.failed(orders[1], InfrastructureError("the page died"))
        again = await rig.order()
        assert (again.trajectory_id, again.attempt) == (orders[1].trajectory_id, 2)
        for order, success in zip([orders[0], again, *orders[2:]], [True, False, True, False], strict=True):
            await rig.data.finished(order, rolled_out(order, success))
        assert rig.progress.counts.trajectories == 4 and rig.events("group")[0]["size"] == 4


@pytest.mark.parametrize(("slots", "most"), [(1, 8), (200, 800)])
async def test_a_run_survives_a_lost_node_and_ends_when_nothing_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, most: int
) -> None:
    lost = InfrastructureError("worker env-7 is lost")
    async with Rig(tmp_path) as rig:
        rig.data._envs.slots = slots
        order = await rig.order()
        rig.data._envs.slots = 0  # they are all gone, and each takes its attempt with it
        for _ in range(2 * most):
            rig.data.failed(order, lost)
            order = await rig.order()
        began = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: began + FAILING_SECONDS)
        with pytest.raises(UserError, match=f"{2 * most + 1} attempts in a row failed, the last with: worker env-7 is"):
            rig.data.failed(order, lost)
        await rig.data.finished(order, rolled_out(order, True))
        order = await rig.order()
        for _ in range(most):
            rig.data.failed(order, lost)
            order = await rig.order()


async def test_no_more_is_begun_than_the_budget(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        begun: list[Order | None] = []

        async def begin() -> None:
            while True:
                begun.append(await rig.data.next())

        beginning = asyncio.create_task(begin())
        async with asyncio.timeout(60):
            while not rig.envs.usage.cause(EnvState.IDLE):  # why environments wait, once they do
                await asyncio.sleep(0.01)
        beginning.cancel()
        # max_staleness × trajectories_per_update + rollouts
        assert len(begun) == 2 * 8 + 4


async def test_a_roll_out_that_cannot_be_made_is_given_up_while_others_can(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        orders = [await rig.order() for _ in range(4)]
        for order in orders[1:3]:
            await rig.data.finished(order, rolled_out(order, order is orders[1]))
        bad = orders[0]
        for worker in ("env-0", "env-1", "env-0", "env-1"):
            rig.data.failed(bad.failed(worker), InfrastructureError("the page does not load"))
            bad = await rig.order()
        assert bad.trajectory_id == orders[0].trajectory_id and bad.attempt == 5
        rig.data.failed(bad.failed("env-2"), InfrastructureError("the page does not load"))
        assert rig.events("given_up")[0]["why"] == "the page does not load"
        await rig.data.finished(orders[3], rolled_out(orders[3], False))
        group = rig.events("group")[0]
        assert (group["size"], group["released"], group["reason"]) == (3, True, "1 of 3 succeeded")


async def test_a_group_of_which_nothing_can_be_made_is_dropped(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        orders = [await rig.order() for _ in range(4)]
        for order in orders:
            hopeless = replace(order, attempt=5, failed_on=frozenset({"env-0", "env-1"}))
            rig.data.failed(hopeless, InfrastructureError("the page does not load"))
        assert (await rig.order()).group_id != orders[0].group_id
        assert rig.events("group")[0]["reason"] == "none of its roll-outs could be made"
        assert (await rig.database.group(orders[0].group_id)).state is GroupState.DROPPED


async def test_a_group_that_giving_up_has_left_with_one_roll_out_uses_no_pooled_success(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.group(True, False, False, False)
        orders = [await rig.order() for _ in range(4)]
        for order in orders[1:]:
            hopeless = replace(order, attempt=5, failed_on=frozenset({"env-0", "env-1"}))
            rig.data.failed(hopeless, InfrastructureError("the page does not load"))
        await rig.data.finished(orders[0], rolled_out(orders[0], False))
        assert rig.events("group")[-1]["reason"] == "all 1 failed"
        assert rig.progress.counts.pooled == 0 and not rig.events("pooled")
        (success,) = await rig.database.newest_successes(9)
        assert success.uses == 0
        assert not any(
            one.trajectory.pooled_from for one in (await rig.database.group(orders[0].group_id)).trajectories
        )  # type: ignore[union-attr]


async def test_a_group_whose_screenshots_are_gone_costs_its_batch_nothing_else(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        for _ in range(2):
            await rig.group(True, False, True, False)
        batch = await rig.data.next_batch(0)
        assert len(batch) == 2
        await rig.data.unusable([batch[0]], "a screenshot cannot be had")
        assert rig.progress.counts.fates["dropped: cannot be trained on"] == 4
        assert (await rig.database.group(batch[0].id)).state is GroupState.DROPPED
        await rig.group(True, False, True, False)
        again = await rig.data.next_batch(0)
        assert batch[1].id in {group.id for group in again} and batch[0].id not in {group.id for group in again}
