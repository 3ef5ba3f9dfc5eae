"""What can go wrong with one update. All of them leave the weights as they were, unless they say otherwise."""

from __future__ import annotations

from collections.abc import Sequence

OTHER_CHECKPOINT = (
    "remove that folder, and its copy below checkpoint.upload if there is one, and --resume continues from the "
    "checkpoint before it; or add --initial-weights"
)
"""The remedy where a run cannot resume from its newest checkpoint."""


class TrainError(Exception):
    """The update was not made. `weights_changed`: an earlier minibatch of it had been applied already."""

    weights_changed: bool = False


class SampleError(TrainError):
    """Samples are wrong; sending them again would fail again. `trajectories`: the ids of those at fault."""

    def __init__(self, message: str, trajectories: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.trajectories = tuple(trajectories)


class UnknownScreenshotError(SampleError):
    """A screenshot without data is not in the cache; sending it with data helps."""


class NonFiniteError(TrainError):
    """The weights are not finite, or make every gradient non-finite: no other batch would do better."""


class CancelledUpdateError(TrainError):
    """The worker is closing."""
