"""Repairs torchvision and torchaudio beside a CPU build of torch: `python -m dart.mend`.

PyPI has no CPU builds of them. The compiled parts of the CUDA builds do not load beside a CPU torch, and then
transformers and vLLM fail on import, although here they use only pure Python of torchvision, and nothing of torchaudio
(or torchcodec). So, if they do not load, torchaudio and torchcodec are uninstalled, and torchvision gets a `.pth` file
in site-packages that skips the one module which registers its operators. It has to be a file, because vLLM inspects
models in processes of its own. `--undo` removes it.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

_NAME = "dart_torchvision_without_operators.pth"
_LINE = (
    "import sys, types; "
    "sys.modules.setdefault('torchvision._meta_registrations', types.ModuleType('torchvision._meta_registrations'))\n"
)


def mended() -> bool:
    """Whether the file is there."""
    return (Path(sysconfig.get_path("purelib")) / _NAME).exists()


def main() -> None:
    path = Path(sysconfig.get_path("purelib")) / _NAME
    if "--undo" in sys.argv:
        path.unlink(missing_ok=True)
        return
    for name in ("torchaudio", "torchcodec"):
        if importlib.util.find_spec(name) and not _imports(name):
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True)
            print(f"{name} does not load beside this torch and is not used; uninstalled it")
    if path.exists() or _imports("torchvision"):
        return
    path.write_text(_LINE, encoding="utf-8")
    print(f"torchvision's compiled operators do not load here; wrote {path.name} so that the rest of it does")


def _imports(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
