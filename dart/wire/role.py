"""The interface of a worker role; `dart.wire.worker` does the rest (dialling, heartbeats, replies, reconnecting)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from dart.core.cutting import encodable
from dart.v1 import session_pb2 as pb

ROLE_NAMES: dict[int, str] = {pb.ROLE_ENV: "env", pb.ROLE_ROLLOUT: "rollout", pb.ROLE_TRAIN: "train"}

Command = (
    pb.Reset
    | pb.Act
    | pb.Release
    | pb.Suggest
    | pb.Generate
    | pb.HoldScreenshots
    | pb.Abort
    | pb.LoadWeights
    | pb.ReceiveWeights
    | pb.TrainBatch
    | pb.SendWeights
    | pb.SaveCheckpoint
)
Reply = (
    pb.Observed
    | pb.Released
    | pb.Suggested
    | pb.Generated
    | pb.ScreenshotsHeld
    | pb.WeightsLoaded
    | pb.ReceivingWeights
    | pb.Trained
    | pb.WeightsSent
    | pb.CheckpointSaved
)


def goodbye(phase: str) -> str:
    """The reason of the goodbye to all workers at the end of a run, or of a coordinator that will be continued."""
    return f"the run is {phase}"


class CommandError(Exception):
    """One command failed and the worker continues: the answer is a `Failure` with this code and message.

    `trajectories`: ids of trajectories in the batch that cannot be trained on.
    """

    def __init__(self, code: pb.FailureCode, message: str, trajectories: Sequence[str] = ()) -> None:
        super().__init__(encodable(message))  # it may quote a world or a page
        self.code = code
        self.trajectories = trajectories


class WorkerRole(Protocol):
    """One role's work.

    `prepare` is called once, with the role's config (the JSON of Welcome); it may take minutes, during which heartbeats
    continue. `handle` is called in a task of its own for every command, so commands run concurrently; commands of one
    assignment come one after another, except Abort. It returns the reply (the session fills in the assignment), or None
    if there is none (Abort; all pages of a TrainBatch but the last). It raises CommandError if only this command
    failed; any other exception ends the worker. `close` is always called.

    A role names this class as its base, and so has the defaults.
    """

    role: pb.Role
    capabilities: Sequence[str] = ()
    """Names of what it can do beyond the protocol's first version (`dart.wire.capabilities`)."""
    rank: int = 0
    world_size: int = 1

    def preload(self) -> None:
        """What must be done before the process has threads or an event loop."""
        return

    async def prepare(self, config_json: str) -> pb.Ready: ...

    async def handle(self, command: Command) -> Reply | None: ...

    async def close(self) -> None:
        return


@runtime_checkable
class Offering(Protocol):
    """A role whose slots come and go (`Slots`): workers with the capability "slots" in Hello."""

    async def run(self, say: Callable[[pb.Slots], None]) -> None:
        """Called after each `prepare`, and cancelled before the next one and before `close`.

        It reports the slots whenever they change. Any exception it raises ends the worker.
        """
