"""Simulated workers with every capability, so that a run brings about every message that a worker can send.

The workers in `workers` have none but `rescore`. These have environments that come and go (Slots), a scripted oracle
(Suggest), and screenshots of their own that a replica does not share a directory for (HoldScreenshots); the replicas
take weights while they serve (ReceiveWeights) and write a teacher's text as tokens (`Generate.forced_text`).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence

from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import Connects, SimulatedEnvs, SimulatedReplica
from dart.coordinator.fleet.sessions import Fleet
from dart.v1 import action_pb2, image_pb2
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import FORCED_TEXT, HOLD_SCREENSHOTS, ORACLE, RECEIVES_WHILE_SERVING, SLOTS

SCREENSHOTS, SCREENSHOT_BYTES = 300, 6_000
"""How many different screenshots the environments show, and the size of each."""
CACHED = 64
"""Screenshots that a replica keeps: fewer than there are, so that they must be sent again."""
LOST_SHARE = 0.1
"""Of the environments to be renewed, so many have to boot again."""
STUCK_SHARE = 0.02
"""Of the oracle's answers, so many have no action."""
ACTIONS = (
    action_pb2.Action(click=action_pb2.Click(at={"x": 0.5, "y": 0.25}, button="MOUSE_BUTTON_LEFT", count=1)),
    action_pb2.Action(type_text=action_pb2.TypeText(text="some words")),
    action_pb2.Action(scroll=action_pb2.Scroll(at={"x": 0.5, "y": 0.5}, dy_notches=5)),
    action_pb2.Action(
        drag=action_pb2.Drag(path=[{"x": 0.1, "y": 0.1}, {"x": 0.9, "y": 0.9}], button="MOUSE_BUTTON_LEFT")
    ),
    action_pb2.Action(keys=action_pb2.Keys(keysyms=["Control_L", "c"], mode="PRESS_MODE_PRESS")),
)
"""What the oracle says; the default grammar has words for all of it."""


def _screenshot(number: int) -> image_pb2.Image:
    data = random.Random(f"screenshot {number}").randbytes(SCREENSHOT_BYTES)
    digest = hashlib.sha256(data).digest()
    return image_pb2.Image(sha256=digest, media_type="image/webp", width_pixels=1920, height_pixels=1080, data=data)


_SCREENSHOTS = [_screenshot(number) for number in range(SCREENSHOTS)]


class ElasticEnvs(SimulatedEnvs):
    """Each environment boots, is renewed after its episode, and sometimes has to boot again instead."""

    capabilities = (SLOTS, ORACLE)

    def __init__(
        self, fleet: Fleet | Connects, name: str, slots: int, timings: Timings, names: list[str], seed: int
    ) -> None:
        self._most, self._times = slots, timings.env
        self._fates = random.Random(f"environments/{name}/{seed}")
        self._life = 0
        self._begin()
        super().__init__(fleet, name, slots, timings, names, seed)

    def _begin(self) -> None:
        """Boot all environments. Those of an earlier life are gone."""
        self._life += 1
        self._count = self._granted = self._booting = 0
        self._reason = ""
        for _ in range(self._most):
            self._boot()

    def _boot(self) -> None:
        self._booting += 1
        self._later(self._fates.uniform(*self._times.boot), self._booted)

    def _booted(self) -> None:
        self._booting -= 1
        self._count += 1
        self._granted += 1
        self._reason = self._reason if self._booting else ""
        self._tell()

    def _renewed(self) -> None:
        if self._fates.random() < LOST_SHARE:
            self._count -= 1
            self._reason = "a desktop did not come back"
            self._boot()
        else:
            self._granted += 1
        self._tell()

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        life = self._life
        asyncio.get_running_loop().call_later(seconds, lambda: do() if life == self._life else None)

    def _tell(self) -> None:
        slots = pb.Slots(count=self._count, granted=self._granted, booting=self._booting, reason=self._reason)
        self._reply(pb.SessionRequest(slots=slots))

    def said_ready(self) -> None:
        self._loop.call_soon(self._tell)

    def forget(self) -> None:
        super().forget()
        self._begin()

    def screenshot(self) -> image_pb2.Image:
        return self._fates.choice(_SCREENSHOTS)

    def release(self, command: pb.Release) -> None:
        super().release(command)
        self._later(self._fates.uniform(*self._times.boot), self._renewed)

    def suggest(self, command: pb.Suggest) -> None:
        suggested = pb.Suggested()
        if self._fates.random() >= STUCK_SHARE:
            suggested.action.CopyFrom(self._fates.choice(ACTIONS))
        self.answer(command, 0.0, suggested=suggested)


class CapableReplica(SimulatedReplica):
    """Reads no directory: it keeps the screenshots that it was sent. Takes weights while it serves."""

    capabilities: Sequence[str] = (FORCED_TEXT, HOLD_SCREENSHOTS, RECEIVES_WHILE_SERVING)
    shares_blobs = False
    image_cache_entries = CACHED

    def hold_screenshots(self, command: pb.HoldScreenshots) -> None:
        self.answer(command, 0.01, screenshots_held=pb.ScreenshotsHeld())

    def receive_weights(self, command: pb.ReceiveWeights) -> None:
        self.answer(command, 0.0, receiving_weights=pb.ReceivingWeights())


class PausingReplica(CapableReplica):
    """Sees the run's directory of screenshots, and takes weights only while it does not serve."""

    capabilities = (FORCED_TEXT, HOLD_SCREENSHOTS)
    shares_blobs = True
