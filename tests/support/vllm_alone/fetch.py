"""Fetch a few files of the vLLM that the extra `gpu` pins, without the rest of its wheel: `make gpu-files`.

pip says where the wheel is on the user's index, and remotezip reads out of it, by HTTP ranges, the weight-transfer
package and every module that `workers/` imports: some hundred kilobytes of 340 MB. From an index without ranges, pip
downloads all of it.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
TRANSFER = "vllm/distributed/weight_transfer/"
FETCHED = "fetched.json"


def pinned() -> str:
    """The version of vLLM that the extra `gpu` names."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (version,) = [one.removeprefix("vllm==") for one in extras["gpu"] if one.startswith("vllm==")]
    return str(version)


def imported() -> dict[str, set[str]]:
    """Every module of vLLM that `workers/` imports, with the names that it takes from it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "workers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found.setdefault(str(node.module), set()).update(name.name for name in node.names)
            if isinstance(node, ast.Import):
                for name in node.names:
                    if name.name.split(".")[0] == "vllm":
                        found.setdefault(name.name, set())
    return found


def files_of(module: str) -> tuple[str, str]:
    """Where a wheel may have it."""
    place = module.replace(".", "/")
    return f"{place}.py", f"{place}/__init__.py"


def wheel(version: str) -> str:
    """The wheel's address, without downloading it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
        command += ["--only-binary=:all:", "--use-feature=fast-deps", "--report", str(report), f"vllm=={version}"]
        subprocess.run(command, check=True)
        return str(json.loads(report.read_text())["install"][0]["download_info"]["url"])


def opened(version: str, folder: str) -> zipfile.ZipFile:
    """The wheel, which is downloaded into the folder where the index has no ranges."""
    from remotezip import RangeNotSupported, RemoteZip

    try:
        return RemoteZip(wheel(version))
    except RangeNotSupported:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", folder, f"vllm=={version}"], check=True)
        return zipfile.ZipFile(next(Path(folder).glob("*.whl")))


def wanted() -> str:
    """What the folder should hold, as `FETCHED` in it says when it does: the version and the modules."""
    taken = imported()
    modules = {*taken, *(f"{module}.{name}" for module, names in taken.items() for name in names)}
    return json.dumps({"version": pinned(), "modules": sorted(modules)}, indent=1)


def main(folder: Path) -> None:
    fetched, want = folder / FETCHED, wanted()
    if fetched.is_file() and fetched.read_text() == want:
        return
    shutil.rmtree(folder, ignore_errors=True)
    described = json.loads(want)
    files = {file for module in described["modules"] for file in files_of(module)}
    with tempfile.TemporaryDirectory() as whole, opened(described["version"], whole) as archive:
        for name in archive.namelist():
            if name in files or (name.startswith(TRANSFER) and name.endswith(".py")):
                archive.extract(name, folder)
    fetched.write_text(want)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
