"""What is made once for all runs of an experiment: evaluations of policies that no run has made, and the oracle's pool.

Each is made by one command alone (`alone`): another that needs it meanwhile is refused, because it would remove what is
half made. What is kept says what it was made with, and is refused when that has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.trials import pieces, sources
from benchmarks.trials.protocol import Protocol, check_marks
from benchmarks.trials.sweep import Plan
from dart import assets
from dart.coordinator.summary import write_json
from dart.core.evaluation.documents import Document
from dart.errors import UserError
from dart.manifest import file_digest
from dart.worlds.plugs import find

MARKS = "marks.json"
"""In the pool's folder, written when it is complete."""
ENDS = "watchdog.end_after_seconds=600"
"""A collection that hangs must end, too."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[int]:
    """Make what is in the folder, while no other command does. Raises UserError if another one is at it.

    Gives the lock's descriptor. A process that inherits it holds the lock until it has ended, even if this one is
    killed.
    """
    lock = folder.with_name(f"{folder.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 100).decode("utf-8", "replace").strip() or "another process"
            raise UserError(
                f"{folder} is being made by {holder}, or by a command that it has started ({lock} is locked): wait "
                "until that has ended, then start this again"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _dart(what: str, arguments: Sequence[str], lock: int) -> None:
    """Run `dart` to its end. Raises UserError with the end of what it said if it fails."""
    command = [sys.executable, "-m", "dart", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, pass_fds=(lock,))
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:] or "it said nothing"
        raise UserError(f"{what}: exit code {done.returncode}: {said}")


# ---- evaluations ----


def evaluate(plan: Plan, label: str, arguments: Sequence[str], overrides: Sequence[str]) -> Document:
    """`dart eval` with these arguments and overrides: made once, kept in results/NAME/LABEL.json.

    Raises UserError if it fails, if another command is making it, or if the kept one belongs to another protocol,
    config or base policy.
    """
    path, asked = plan.results / f"{label}.json", [*arguments, *overrides]
    if (known := _kept(path, plan, asked)) is not None:
        return known
    folder = plan.half_made / label
    with alone(folder) as lock:
        if (known := _kept(path, plan, asked)) is not None:  # made meanwhile
            return known
        shutil.rmtree(folder, ignore_errors=True)
        print(f"{plan.name}: {label}", flush=True)
        code, sets = sources.current(), pieces.as_sets((*overrides, f"run.directory={folder}"))
        _dart(label, ["eval", str(plan.config), "--quiet", *arguments, *sets], lock)
        (found,) = folder.glob("*/evaluation.json")
        document: Document = json.loads(found.read_text(encoding="utf-8"))
        document["instances"] = []  # every single episode: nothing here is made of them
        plan.results.mkdir(parents=True, exist_ok=True)
        write_json(path, {**plan.marks, "asked": asked, "code": code, "evaluation": document}, indent=None)
        shutil.rmtree(folder)
    return document


def _kept(path: Path, plan: Plan, asked: Sequence[str]) -> Document | None:
    if not path.exists():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    check_marks(path, kept, plan.marks)
    if kept["asked"] != asked:
        raise UserError(f"{path} was evaluated with {kept['asked']}, now it would be {asked}: remove it")
    document: Document = kept["evaluation"]
    return document


# ---- the oracle's pool ----


def oracle_pool(plan: Plan, protocol: Protocol) -> Path:
    """The run directory with the oracle's successes for the pool, which are collected if they are not there yet.

    Raises UserError if that fails, if another command is collecting them, if those that are there were collected with
    another config, base policy, world or number, or if a task has too few.
    """
    folder, marks = plan.half_made / "pool", pool_marks(plan, protocol)
    if not (folder / MARKS).exists():
        with alone(folder) as lock:
            if not (folder / MARKS).exists():  # else it was made meanwhile
                _collect(plan, folder, protocol.pool_successes, marks, lock)
    check_marks(folder / MARKS, json.loads((folder / MARKS).read_text(encoding="utf-8")), marks)
    summaries = list(folder.glob("*/summary.json"))
    if len(summaries) != 1:
        raise UserError(f"{folder} has {len(summaries)} collections, not one: remove it to collect again")
    _check_whole(summaries[0], protocol)
    return summaries[0].parent


def _collect(plan: Plan, folder: Path, wanted: int, marks: Mapping[str, str], lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{plan.name}: {wanted} successes of the oracle for each task", flush=True)
    code, sets = sources.current(), pieces.as_sets((f"run.directory={folder}", ENDS))
    arguments = ["collect", str(plan.config), "--from", "oracle", "--quiet", "--per-task", str(wanted), *sets]
    _dart("the oracle's pool", arguments, lock)
    write_json(folder / MARKS, {**marks, "code": code})


def pool_marks(plan: Plan, protocol: Protocol) -> dict[str, str]:
    """What the collected successes depend on."""
    return {
        "config_sha256": plan.marks["config_sha256"],
        "base_sha256": plan.marks["base_sha256"],
        "world_sha256": world_digest(protocol.load_config().environment.kind),
        "successes_per_task": str(protocol.pool_successes),
    }


def world_digest(kind: str) -> str:
    """A digest of the world's own files: its modules, and what ships with it in dart/assets. Raises UserError."""
    module = Path(inspect.getfile(find(kind)))
    modules = module.parent.rglob("*.py") if module.parent.name == kind else module.parent.glob(f"{module.stem}*.py")
    shipped = (Path(assets.__file__).parent / kind).rglob("*")
    digest = hashlib.sha256()
    for file in sorted(path for path in (*modules, *shipped) if path.is_file()):
        digest.update(f"{file.name} {file_digest(file)}\n".encode())
    return digest.hexdigest()


def _check_whole(summary: Path, protocol: Protocol) -> None:
    """Raises UserError unless every task has as many successes as the protocol wants."""
    wanted, tasks = protocol.pool_successes, protocol.load_config().environment.tasks.training
    found = json.loads(summary.read_text(encoding="utf-8"))["collected"]["per_task"]
    kept = {task: found.get(task, {}).get("kept", 0) for task in tasks}
    if lacking := [f"{task} has {number}" for task, number in kept.items() if number < wanted]:
        raise UserError(
            f"the oracle's pool lacks some of the {wanted} successes of each task: {', '.join(lacking)}: {summary} "
            f"says why; remove {summary.parents[1]} to collect again"
        )
