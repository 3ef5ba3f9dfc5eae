"""What the workers use of vLLM exists in the version that the extra `gpu` pins, which CI cannot install."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from vllm_alone.fetch import FETCHED, ROOT, files_of, imported, wanted

GPU_FILES = ROOT / "build" / "vllm-gpu"
pytestmark = pytest.mark.skipif(
    not (GPU_FILES / FETCHED).is_file(), reason="the pinned vLLM's files are not there: run `make gpu-files`"
)


def test_the_pinned_vllm_has_what_our_workers_import() -> None:
    assert (GPU_FILES / FETCHED).read_text() == wanted(), "they are of another version or commit: run `make gpu-files`"
    missing = [
        f"{module}.{name}"
        for module, names in imported().items()
        for name in names or {""}
        if not _defines(GPU_FILES, module, name)
    ]
    assert not missing


def _defines(root: Path, module: str, name: str) -> bool:
    """Whether the module is there and the name stands in its text outside of functions, or is a module itself."""
    path = next((root / one for one in files_of(module) if (root / one).is_file()), None)
    if path is None:
        return False
    if not name or any((root / one).is_file() for one in files_of(f"{module}.{name}")):
        return True
    text = ast.parse(path.read_text())
    return any(
        name in {getattr(node, "name", ""), getattr(node, "id", ""), getattr(node, "value", "")}
        for node in ast.walk(text)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias | ast.Name | ast.Constant)
    )


def test_the_pinned_engine_has_every_method_that_ours_calls() -> None:
    ours = ast.parse((ROOT / "workers" / "rollout" / "engine.py").read_text())
    called = {
        node.func.attr: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ours)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "_llm"
    }
    theirs = ast.parse((GPU_FILES / "vllm" / "v1" / "engine" / "async_llm.py").read_text())
    known = {
        node.name: {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        for node in ast.walk(theirs)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {"pause_generation", "update_weights", "finish_weight_update"} <= called.keys()
    for name, arguments in called.items():
        assert name in known and arguments <= known[name], name
