"""What a worker role has to offer; `dart.wire.worker` does the rest (dialling, heartbeats, replies, reconnecting)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

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


class CommandError(Exception):
    """One command failed and the worker goes on: it becomes a `Failure` with this code and message.

    `trajectories`: ids of those of a batch that cannot be trained on.
    """

    def __init__(self, code: pb.FailureCode, message: str, trajectories: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.trajectories = trajectories


class WorkerRole(Protocol):
    """One role's work.

    `prepare` is called once, with the role's config (the JSON of Welcome); it may take minutes; heartbeats go on
    meanwhile. `handle` is called in a task of its own for every command, so commands run side by side; commands of
    one assignment come one after the other, except Abort. It returns the reply (the session fills in the
    assignment), or None where there is nothing to say (Abort; all pages of a TrainBatch but the last). It raises
    CommandError for a failure of this command alone; any other exception ends the worker. `close` is always called.
    """

    role: pb.Role

    async def prepare(self, config_json: str) -> pb.Ready: ...

    async def handle(self, command: Command) -> Reply | None: ...

    async def close(self) -> None: ...


@runtime_checkable
class Offering(Protocol):
    """A role whose slots come and go (`Slots`). Of env workers; its Hello has the capability "slots"."""

    async def run(self, say: Callable[[pb.Slots], None]) -> None:
        """Called after each `prepare`, and cancelled before the next one and before `close`.

        It says what there is, whenever that changes. Whatever it raises ends the worker.
        """
