"""The digest and the size of a model's vocabulary: a trajectory's tokens are meaningful with one vocabulary only."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def vocabulary_digest(folder: Path) -> str | None:
    """SHA-256 over tokens and ids of the folder's tokenizer.json; None if it cannot be read.

    Only the ids count: a checkpoint saved again with other spacing or settings has the same digest.
    """
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids = dict(tokenizer["model"]["vocab"]) | {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()


def vocabulary_size(folder: Path) -> int | None:
    """How many token ids the model in the folder has; None if its config.json cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
