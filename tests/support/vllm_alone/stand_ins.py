"""Modules that take vLLM's place in a test, so that it needs none of vLLM's imports."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def replaced_modules(stand_ins: dict[str, dict[str, object]], *fresh: str) -> Iterator[None]:
    """Inside, vLLM is these modules with these attributes; `fresh` modules are imported anew, inside and after."""

    def taken() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "vllm" or name in fresh]

    before = {name: sys.modules.pop(name) for name in taken()}
    for name, attributes in stand_ins.items():
        module = ModuleType(name)
        module.__dict__.update({"__path__": [], **attributes})
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in taken():
            del sys.modules[name]
        sys.modules.update(before)
