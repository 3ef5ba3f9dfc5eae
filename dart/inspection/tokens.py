"""Tokens as text, where the policy's tokenizer and the package `tokenizers` are at hand (transformers brings it)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from dart.rundir import RunDirectory

BUILTIN = "builtin:"
FILE = "tokenizer.json"


class Decoder(Protocol):
    """What is used of `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def find_tokenizer(directory: RunDirectory, config: Mapping[str, JsonValue]) -> Decoder | None:
    """The run's tokenizer: that of a checkpoint, else of its first model. None if there is none here, and for a run
    that recorded that it has no vocabulary: its tokens are the bytes of an endpoint's text."""
    if "vocabulary" in config and config["vocabulary"] is None:
        return None
    model = config.get("model")
    path = str(model.get("path", "")) if isinstance(model, dict) else ""
    folders = sorted(directory.checkpoints.glob("v*"), reverse=True) if directory.checkpoints.is_dir() else []
    if path.startswith(BUILTIN):
        folders.append(Path(str(resources.files("dart.assets"))) / path.removeprefix(BUILTIN))
    elif path:
        folders.append(Path(path))
    for folder in folders:
        for file in (folder / FILE, folder / "model" / FILE):
            if file.is_file():
                return _load(file)
    return None


@functools.lru_cache(4)
def _load(file: Path) -> Decoder | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        tokenizer: Decoder = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the package raises nothing more exact for a file that it cannot read
        return None
    return tokenizer


def token_texts(tokenizer: Decoder, ids: Sequence[int]) -> tuple[str, ...]:
    """The text of each token. A character that spans several tokens stands with the last of them, and "" with the
    others, so that joining gives the whole text."""
    texts: list[str] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting, skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(waiting) < 4:  # a character has four bytes at most
            texts.append("")
            continue
        texts.append(text)
        waiting.clear()
    if waiting:
        texts[-1] = tokenizer.decode(waiting, skip_special_tokens=False)
    return tuple(texts)
