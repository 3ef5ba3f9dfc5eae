"""torchvision beside a CPU build of torch: `python -m dart.mend` makes `import torchvision` work.

PyPI carries no CPU build of torchvision. The CUDA build's compiled operators do not load beside a CPU torch, and then
the whole import fails, although what transformers and vLLM use of it is pure Python. The mend is a `.pth` file in
site-packages that leaves out the one module which registers those operators; a file, because vLLM looks at models in
processes of its own. It is written only where the operators do not load, and `--undo` removes it.
"""

from __future__ import annotations

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
    """The file is there."""
    return (Path(sysconfig.get_path("purelib")) / _NAME).exists()


def main() -> None:
    path = Path(sysconfig.get_path("purelib")) / _NAME
    if "--undo" in sys.argv:
        path.unlink(missing_ok=True)
        return
    if path.exists() or _imports():
        return
    path.write_text(_LINE, encoding="utf-8")
    print(f"torchvision's compiled operators do not load here; wrote {path.name} so that the rest of it does")


def _imports() -> bool:
    return (
        subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0
    )


if __name__ == "__main__":
    main()
