"""How fast the trainer is: tokens a second, floating-point operations, and what share of its cards that is.

The coordinator knows a batch's prompts and the seconds of its update; from these, and the sizes in the model's
config.json, follow the operations that the update asks for (`core.capacity.work`). A token counts each time that it is
in a sample: a trainer that computes a shared beginning once does more of these tokens a second, and so may report a
higher share of its cards than it keeps busy.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Sequence

from dart.agent.parsing import screenshot_tokens
from dart.config import Config
from dart.core.capacity.shape import Shape, UnknownShape, read_shape
from dart.core.capacity.work import Load, causal_pairs, update
from dart.core.curation.batches import ReleasedGroup, samples_of
from dart.errors import UserError


class Meter:
    """`peak`: bfloat16 operations per second of one trainer rank's card; None where it is not known."""

    def __init__(self, config: Config, peak: float | None = None) -> None:
        self._shape = _shape(config)
        self._passes = config.effective_trainer.passes
        self._peak = None if peak is None else peak * config.trainer.ranks
        try:
            self._patches = screenshot_tokens(config.agent, config.environment.viewport) * (
                self._shape.vision.merge**2 if self._shape else 0
            )
        except UserError:
            self._shape, self._patches = None, 0  # `dart doctor` says what is wrong with the viewport

    def measured(self, batch: Sequence[ReleasedGroup], seconds: float | None) -> dict[str, float]:
        """`tokens` (prompts and answers) and `tokens_per_second` of an update that took so many seconds in the trainer;
        with a known model also `model_operations`, and with a known card `mfu`, the share of the cards' peak."""
        loads = [
            Load(sample.tokens, causal_pairs(sample.tokens), len(sample.generation.token_ids), len(sample.images), 0)
            for sample in samples_of(batch)
        ]
        load = functools.reduce(operator.add, loads, Load(0, 0, 0, 0, self._patches))
        if not seconds or not load.tokens:
            return {}
        told = {"tokens": float(load.tokens), "tokens_per_second": load.tokens / seconds}
        if self._shape is not None:
            told["model_operations"] = update(self._shape, load, self._passes).model
            if self._peak is not None:
                told["mfu"] = told["model_operations"] / seconds / self._peak
        return told


def _shape(config: Config) -> Shape | None:
    """None if the model's folder is not on this machine, or holds a model of an unknown kind."""
    try:
        return read_shape(json.loads((config.model.folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, UnknownShape):
        return None
