"""Prompts whose screenshots fit into no message: they go ahead of the request, and nothing else suffers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from fleet_samples import fleet, replica, served

from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import Fleet, InfrastructureError
from dart.core.types import Block, Image, Markup, Prompt
from dart.screenshots.held import Held
from dart.screenshots.holder import Holder
from dart.screenshots.lookup import UnknownScreenshot
from dart.screenshots.stored import StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import HOLD_SCREENSHOTS
from dart.wire.channel import MAX_MESSAGE_BYTES, Dial
from dart.wire.convert import image_from_proto
from dart.wire.role import Command, CommandError, Reply, WorkerRole
from dart.wire.worker import WorkerOptions, serve

LARGE = 3_000_000


def screen(number: int, size: int = LARGE) -> Image:
    return Image.of(f"{number}/".encode().ljust(size, b"."), "image/raw", 1920, 1080)


def prompt(*images: Image, words: str = "look: ") -> Prompt:
    return Prompt(tuple(Block((Markup(words), image)) for image in images), images)


class Replica:
    """Keeps screenshots as the real one does, and remembers what it was sent."""

    def __init__(self, keeps: int) -> None:
        self.holder = Holder(keeps)
        self.sizes: list[tuple[str, int]] = []
        self.misses = 0

    def __call__(self, command: Any) -> Any:
        self.sizes.append((type(command).__name__, command.ByteSize()))
        if isinstance(command, pb.HoldScreenshots):
            self.holder.resolve([image_from_proto(image) for image in command.images])
            return pb.ScreenshotsHeld()
        if not isinstance(command, pb.Generate):
            return None
        try:
            self.holder.resolve([image_from_proto(part.image) for part in command.prompt if part.HasField("image")])
        except UnknownScreenshot as error:
            self.misses += 1
            return pb.Failure(code=pb.FAILURE_CODE_UNKNOWN_IMAGE, message=str(error))
        return replica(command)


async def test_twenty_large_screenshots_go_ahead_of_their_prompt_and_only_once() -> None:
    screens = [screen(number) for number in range(21)]
    taken = Replica(keeps=24)
    async with fleet(rollout=taken, capabilities=[HOLD_SCREENSHOTS], keeps=24) as (_, pool):
        await pool.generate(prompt(*screens[:20]), 1.0, 40, None)
        names = [name for name, _ in taken.sizes]
        assert names == ["HoldScreenshots"] * 4 + ["Generate"]
        assert all(size < MAX_MESSAGE_BYTES for _, size in taken.sizes)
        assert sum(size for _, size in taken.sizes) < 20 * LARGE + 100_000, "each once"
        taken.sizes.clear()
        await pool.generate(prompt(*screens[1:]), 1.0, 40, None)
    ((name, size),) = taken.sizes
    assert name == "Generate" and LARGE < size < LARGE + 100_000, "the next turn sends its own screenshot alone"
    assert taken.misses == 0


async def test_what_is_small_enough_goes_with_its_prompt() -> None:
    taken = Replica(keeps=24)
    async with fleet(rollout=taken, capabilities=[HOLD_SCREENSHOTS], keeps=24) as (_, pool):
        await pool.generate(prompt(*(screen(number) for number in range(5))), 1.0, 40, None)
    assert [name for name, _ in taken.sizes] == ["Generate"]


@pytest.mark.parametrize(
    ("images", "words", "keeps", "capabilities", "why"),
    [
        (20, "", 64, [], "cannot take screenshots in advance: update dart there"),
        (20, "", 19, [HOLD_SCREENSHOTS], r"keeps only 19: raise rollout\.image_cache_entries"),
        (1, "x" * (MAX_MESSAGE_BYTES + 1), 64, [HOLD_SCREENSHOTS], "shorten the history"),
    ],
)
async def test_what_no_message_can_carry_fails_at_once(
    images: int, words: str, keeps: int, capabilities: list[str], why: str
) -> None:
    taken = Replica(keeps)
    async with fleet(rollout=taken, capabilities=capabilities, keeps=keeps) as (_, pool):
        with pytest.raises(InfrastructureError, match=why):
            await pool.generate(prompt(*(screen(number) for number in range(images)), words=words), 1.0, 40, None)
        assert not taken.sizes, "nothing was sent"
        await pool.generate(prompt(screen(0, 100)), 1.0, 40, None)
        assert len(taken.sizes) == 1 and not pool.replicas.waiting, "and the next request is served"


async def test_large_prompts_side_by_side_push_each_other_out_and_none_is_lost() -> None:
    """Room for the largest alone: each is served, or told that there is no room; none misses a screenshot."""
    rng = random.Random(1)
    screens = [screen(number, 5_000_000) for number in range(12)]
    taken = Replica(keeps=6)
    refused = 0
    async with fleet(rollout=taken, capabilities=[HOLD_SCREENSHOTS], keeps=6) as (_, pool):

        async def ask() -> None:
            nonlocal refused
            try:
                await pool.generate(prompt(*rng.sample(screens, rng.randrange(1, 7))), 1.0, 40, None)
            except InfrastructureError as error:
                assert "in addition to those of other" in str(error)
                refused += 1

        for _ in range(10):
            await asyncio.gather(*(ask() for _ in range(8)))
    assert taken.misses == 0
    assert 0 < refused <= 20
    assert all(size < MAX_MESSAGE_BYTES for _, size in taken.sizes)


async def test_a_replica_that_has_lost_them_is_sent_all_of_them_again() -> None:
    screens = [screen(number) for number in range(20)]
    taken = Replica(keeps=24)
    async with fleet(rollout=taken, capabilities=[HOLD_SCREENSHOTS], keeps=24) as (_, pool):
        await pool.generate(prompt(*screens), 1.0, 40, None)
        taken.holder.held.forget()
        await pool.generate(prompt(*screens), 1.0, 40, None)
    assert taken.misses == 1
    assert [name for name, _ in taken.sizes].count("HoldScreenshots") == 8


class Role(WorkerRole):
    """The same replica behind the worker's end of a session."""

    role = pb.ROLE_ROLLOUT
    capabilities = (HOLD_SCREENSHOTS,)

    def __init__(self) -> None:
        self.taken = Replica(keeps=24)

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=4, image_cache_entries=24, engine_ranks=1)

    async def handle(self, command: Command) -> Reply | None:
        reply = self.taken(command)
        if isinstance(reply, pb.Failure):
            raise CommandError(reply.code, reply.message)
        answered: Reply | None = reply
        return answered


async def test_the_same_over_real_grpc() -> None:
    """Without it the first message would break the stream, again after every redial."""
    settings = config.Server(heartbeat_seconds=1.0, lost_after_seconds=30.0)
    worker_fleet, role, stop = Fleet(settings.lost_after_seconds), Role(), asyncio.Event()
    _, pool = EnvPool(worker_fleet), RolloutPool(worker_fleet, StoredScreenshots(None))
    async with served(worker_fleet, settings) as server, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(role, WorkerOptions(Dial(server.address), "gpu-0"), stop))
        await pool.generate(prompt(*(screen(number) for number in range(20))), 1.0, 40, None)
        stop.set()
    assert role.taken.misses == 0 and len(role.taken.sizes) == 5


async def test_a_prompt_that_is_too_large_for_one_replica_goes_to_another() -> None:
    """A replica that says it keeps few screenshots ends no attempt where another keeps enough."""
    screens = [screen(number) for number in range(20)]
    small, large = Replica(keeps=24), Replica(keeps=24)
    async with fleet(rollout_a=small, rollout_b=large, capabilities=[HOLD_SCREENSHOTS], keeps=24) as (_, pool):
        (first, _) = [replica.session for replica in pool.replicas]
        first.screenshots = Held(3)
        for _ in range(3):
            await pool.generate(prompt(*screens), 1.0, 40, None)
        assert not small.sizes and [name for name, _ in large.sizes].count("Generate") == 3
        await pool.generate(prompt(screen(0, 100)), 1.0, 40, first.id)
        assert len(small.sizes) == 1, "it serves what fits"


async def test_what_one_replica_lacked_is_not_sent_again_to_another() -> None:
    """A screenshot that one replica says it lacks is sent again to that replica alone."""
    screens = [screen(number, 1000) for number in range(5)]

    def forgetful(command: Any) -> Any:
        return pb.Failure(code=pb.FAILURE_CODE_UNKNOWN_IMAGE, message="I lack it")

    taken = Replica(keeps=24)
    async with fleet(rollout_a=forgetful, rollout_b=taken, keeps=24) as (_, pool):
        await pool.generate(prompt(*screens), 1.0, 40, "rollout_b")
        before = taken.sizes[-1][1]
        for _ in range(2):  # the forgetful one is asked, twice; then the other
            await pool.generate(prompt(*screens), 1.0, 40, "rollout_a")
    assert [name for name, _ in taken.sizes] == ["Generate"] * 3
    assert before > 5000 and all(size < 1000 for _, size in taken.sizes[1:]), "it has them all"
