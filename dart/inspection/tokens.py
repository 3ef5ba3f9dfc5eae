"""Tokens as text, where the policy's tokenizer and the package `tokenizers` are at hand (transformers brings it)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from dart.rundir import RunDirectory
from dart.store.regular import read_regular

BUILTIN = "builtin:"
FILE = "tokenizer.json"
MOST_BYTES = 64 << 20


class Decoder(Protocol):
    """What is used of `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def find_tokenizer(directory: RunDirectory, config: Mapping[str, JsonValue]) -> Decoder | None:
    """The run's tokenizer: that of a checkpoint, else of its first model. None if there is none here, and for a run
    that recorded that it has no vocabulary: its tokens are the bytes of an endpoint's text. Of another user's run, only
    one that dart brings: the config would name any folder, whose words are then shown."""
    if "vocabulary" in config and config["vocabulary"] is None:
        return None
    model = config.get("model")
    path = str(model.get("path", "")) if isinstance(model, dict) else ""
    found: list[tuple[Path, str]] = []
    """Folders, each as a root and the path below it that holds no link."""
    if directory.is_own and directory.checkpoints.is_dir():
        found += [(directory.path, f"checkpoints/{one.name}/") for one in directory.checkpoints.glob("v*")]
        found.sort(reverse=True)
    if path.startswith(BUILTIN):
        found.append((Path(str(resources.files("dart.assets"))), f"{Path(path.removeprefix(BUILTIN)).name}/"))
    elif path and directory.is_own:  # a model's folder in a cache holds links
        found.append((Path(path), ""))
    for folder, below in found:
        for name in (f"{below}{FILE}", f"{below}model/{FILE}"):
            file = folder / name if below else (folder / name).resolve()
            if file.is_file():
                return _load(*((folder, name) if below else (file.parent, file.name)), file.stat().st_mtime_ns)
    return None


@functools.lru_cache(4)
def _load(root: Path, name: str, _changed: int) -> Decoder | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        tokenizer: Decoder = Tokenizer.from_str(read_regular(root, name, MOST_BYTES).decode())
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
