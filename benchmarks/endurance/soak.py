"""A training loop for hours: does anything grow? `python -m benchmarks.endurance.soak --hours 2`.

Runs `dart train` on configs/ladder_demo.yaml, the demo, until the time is over, and samples it every few seconds:
memory and open files of the coordinator and of each worker (its children included), and the size of the run directory
on disk. The first quarter, in which caches fill, is left out, and so is the last minute. Memory is the proportional set
size; "own memory" is the part of it that no file backs, because the kernel drops and reads again the pages of libraries
as it likes, and counts a page as a larger share when another process that had it ends. A slope comes with a 95 %
interval from a bootstrap over blocks of samples, because neighbouring samples are correlated. Writes results/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.endurance.witness import Witness
from dart.coordinator.summary import machine, write_json

RESULT = Path(__file__).parents[1] / "results" / "soak.json"
CONFIG = Path("configs/ladder_demo.yaml")
BOOTSTRAPS, BLOCKS = 1000, 20
END_SECONDS = 60.0
"""Left out: a run that ends loads what draws its learning curve, which takes 15 MB."""
WINDOW = 30
"""The number of samples (five minutes) over which the disk space per update is measured."""


@dataclass
class Series:
    """Values over time. `at`: hours since the run began."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.at.append(at)
        self.values.append(value)

    def until(self, at: float) -> Series:
        kept = sum(one <= at for one in self.at)
        return Series(self.at[:kept], self.values[:kept])

    def later(self) -> Series:
        """Without the first quarter of the samples."""
        first = len(self.at) // 4
        return Series(self.at[first:], self.values[first:])


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """The least-squares slope; 0 if `at` has no spread."""
    if len(at) < 2:
        return 0.0
    mean_at, mean = fmean(at), fmean(values)
    spread = sum((x - mean_at) ** 2 for x in at)
    return sum((x - mean_at) * (y - mean) for x, y in zip(at, values, strict=True)) / spread if spread else 0.0


def interval(series: Series) -> tuple[float, float]:
    """The 95 % interval of the slope, from residuals resampled in blocks around the fitted line."""
    estimate, mean_at, mean = slope(series.at, series.values), fmean(series.at), fmean(series.values)
    fitted = [mean + estimate * (x - mean_at) for x in series.at]
    residuals = [y - line for y, line in zip(series.values, fitted, strict=True)]
    length, chance = max(1, len(residuals) // BLOCKS), random.Random(0)
    slopes = []
    for _ in range(BOOTSTRAPS):
        drawn: list[float] = []
        while len(drawn) < len(residuals):
            start = chance.randrange(len(residuals) - length + 1)
            drawn += residuals[start : start + length]
        slopes.append(slope(series.at, [line + r for line, r in zip(fitted, drawn, strict=False)]))
    slopes.sort()
    return slopes[int(0.025 * BOOTSTRAPS)], slopes[int(0.975 * BOOTSTRAPS)]


def described(series: Series, unit: str) -> dict[str, object]:
    kept = series.later()
    low, high = interval(kept)
    return {
        "unit": unit, "samples": len(kept.values), "first": round(fmean(kept.values[:10]), 2),
        "last": round(fmean(kept.values[-10:]), 2), "slope_per_hour": round(slope(kept.at, kept.values), 3),
        "low": round(low, 3), "high": round(high, 3),
    }  # fmt: skip


def per_update(disk: Series, updates: Series) -> Series:
    """Megabytes that each update added, over consecutive windows of samples; windows without an update are merged."""
    found = Series()
    before = 0
    for now in range(WINDOW, len(disk.at), WINDOW):
        made = updates.values[now] - updates.values[before]
        if made:
            found.add(disk.at[now], (disk.values[now] - disk.values[before]) / made)
            before = now
    return found


def _name(process: psutil.Process) -> str:
    """env-0, rollout-1, train, or coordinator."""
    found = re.search(r"--id (\S+)", " ".join(process.cmdline()))
    return found[1] if found else "coordinator"


def _measure(name: str, processes: Sequence[psutil.Process], at: float, series: dict[str, Series]) -> None:
    """Add what these processes hold together."""
    memory: Counter[str] = Counter()
    files = 0
    for one in processes:
        with contextlib.suppress(psutil.Error, OSError):
            files += one.num_fds()
            memory += shares(Path(f"/proc/{one.pid}/smaps_rollup").read_text(encoding="ascii"))
    series[f"{name} memory MB"].add(at, memory["Pss"] / 1e6)
    series[f"{name} own memory MB"].add(at, (memory["Pss_Anon"] + memory["Pss_Shmem"]) / 1e6)
    series[f"{name} open files"].add(at, files)


def shares(rollup: str) -> Counter[str]:
    """A process's proportional shares of memory in bytes, from the text of its smaps_rollup."""
    lines = [line.split() for line in rollup.splitlines() if line.startswith("Pss")]
    return Counter({line[0].rstrip(":"): 1024 * int(line[1]) for line in lines})


def _disk(folder: Path) -> float:
    """The size of a folder in megabytes."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                size += path.stat().st_blocks * 512
    return size / 1e6


async def soak(hours: float, every_seconds: float, folder: Path) -> dict[str, object]:
    """Run it; returns the results as JSON."""
    runs = folder / "runs"
    choices = [
        "evaluation.episodes=0", "stop.updates=null", "stop.success_rate=null", f"stop.train_seconds={3600 * hours}",
        f"run.directory={runs}", "dashboard.enabled=false",
    ]  # fmt: skip
    sets = [part for choice in choices for part in ("--set", choice)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dart", "train", str(CONFIG), "--quiet", *sets, stdin=asyncio.subprocess.DEVNULL
    )
    series: dict[str, Series] = defaultdict(Series)
    began = time.monotonic()
    try:
        while process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), every_seconds)
            if process.returncode is None:
                with contextlib.suppress(psutil.Error):  # one that ends at this moment
                    _look(psutil.Process(process.pid), runs, (time.monotonic() - began) / 3600, series)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()
    updates = Witness(next(runs.glob("*/run.db"))).updates()
    end = (time.monotonic() - began - END_SECONDS) / 3600
    series = defaultdict(Series, {name: one.until(end) for name, one in series.items()})
    write_json(folder / "samples.json", {name: [one.at, one.values] for name, one in series.items()})
    series["disk MB per update"] = per_update(series["disk MB"], series.pop("updates", Series()))
    return {
        "machine": machine(), "hours": round((time.monotonic() - began) / 3600, 3), "updates": updates,
        "exit": process.returncode,
        "series": {name: described(one, name.rsplit(" ", 1)[-1]) for name, one in sorted(series.items()) if one.at},
    }  # fmt: skip


def _look(root: psutil.Process, runs: Path, at: float, series: dict[str, Series]) -> None:
    for one in [child for child in root.children() if "--role" in child.cmdline()]:
        _measure(_name(one), [one, *one.children(recursive=True)], at, series)
    _measure("coordinator", [root], at, series)
    for database in runs.glob("*/run.db"):
        series["updates"].add(at, Witness(database).updates())
        series["disk MB"].add(at, _disk(database.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every-seconds", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, help="keep the run directory and every sample (samples.json) here")
    parser.add_argument("--out", type=Path, default=RESULT)
    choices = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = asyncio.run(soak(choices.hours, choices.every_seconds, choices.folder or Path(temporary)))
    write_json(choices.out, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
