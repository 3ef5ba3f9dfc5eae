"""What can go wrong with one update. All of them leave the weights as they were, unless they say otherwise."""

from __future__ import annotations


class TrainError(Exception):
    """The update was not made. `weights_changed`: an earlier minibatch of it had been applied already."""

    weights_changed: bool = False


class SampleError(TrainError):
    """A sample is wrong; sending it again would fail again."""


class UnknownImageError(SampleError):
    """An image without data is not in the cache; sending it with data helps."""


class NonFiniteError(TrainError):
    """A loss or gradient is infinite or not a number."""


class CancelledUpdateError(TrainError):
    """The worker is closing."""
