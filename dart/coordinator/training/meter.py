"""How fast the trainer is: tokens a second, and what share of its cards' peak it reaches.

The coordinator knows a batch's prompts, the seconds of its update, and the cards; the trainer says how many operations
its passes took. A token that samples share counts in `tokens` for each of them, and in operations as it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dart.config import Config
from dart.core.curation.batches import ReleasedGroup, samples_of


class Meter:
    """`peak`: bfloat16 operations per second of one trainer rank's card; None where it is not known."""

    def __init__(self, config: Config, peak: float | None = None) -> None:
        self._peak = None if peak is None else peak * config.trainer.ranks

    def measured(self, batch: Sequence[ReleasedGroup], metrics: Mapping[str, float]) -> dict[str, float]:
        """`tokens` (of prompts and answers, each sample's own) and `tokens_per_second` of an update that has told these
        metrics; with a known card, and a trainer that tells its `model_operations`, also `mfu`, their share of the
        cards' peak (PaLM, arXiv 2204.02311, appendix B). Nothing where `seconds` is missing."""
        seconds, tokens = metrics.get("seconds"), sum(sample.tokens for sample in samples_of(batch))
        if not seconds or not tokens:
            return {}
        told = {"tokens": float(tokens), "tokens_per_second": tokens / seconds}
        if self._peak is not None and "model_operations" in metrics:
            told["mfu"] = metrics["model_operations"] / seconds / self._peak
        return told
