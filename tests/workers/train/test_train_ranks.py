"""Two ranks over gloo, each with all weights, make the same update as one, however samples are spread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.torch

from ranks.train_rank import LOSSES  # noqa: E402
from ranks.train_sharded import BASE, HANG_SECONDS  # noqa: E402
from train_samples import mixed, settings, totals  # noqa: E402

from dart.wire.channel import free_port  # noqa: E402
from dart.workers.train.trainer import Trainer  # noqa: E402

SUPPORT = Path(__file__).parents[2] / "support"
ALLOWED = 1e-6
"""How far weights may be from those of one rank."""
SPLITS = ("even", "uneven", "empty", "failing", "selecting", "selecting, failing", "selecting, empty", "token mean")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, float]]]:
    """Weights and metrics of one rank with each loss, by what the names of its splits begin with."""
    samples = mixed(groups=3)
    results = {}
    for kind, loss in {**LOSSES, "": {}}.items():
        trainer = Trainer(settings(folder, **BASE, loss=loss))
        start = trainer.snapshot()
        for _ in range(2):
            metrics = trainer.update(samples, *totals(samples))
        weights = trainer.snapshot()
        assert max(float((weights[name] - start[name]).abs().max()) for name in weights) > 100 * ALLOWED
        results[kind] = weights, metrics
    return results


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks had after each split: weights, metrics and lines."""
    out = tmp_path_factory.mktemp("ranks")
    port = free_port()
    # --cpu would start one process (it needs MPI); --multi_gpu is torchrun, and ranks without a GPU take gloo.
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_ip", "127.0.0.1",
        "--main_process_port", str(port), "--num_cpu_threads_per_process", "1",
        str(SUPPORT / "ranks" / "train_rank.py"), str(folder), str(out), *SPLITS,
    ]  # fmt: skip
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {split: [torch.load(out / f"{split}-{rank}.pt") for rank in range(2)] for split in SPLITS}


@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_make_the_same_update(alone: Any, ranks: Any, split: str) -> None:
    weights, metrics = next(alone[kind] for kind in alone if split.startswith(kind))
    for rank, result in enumerate(ranks[split]):
        for name, tensor in weights.items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=0, atol=ALLOWED)
        for name in ("loss", "gradient_norm", "entropy", "importance_weight", "staleness"):
            assert result["metrics"][name] == pytest.approx(metrics[name], abs=1e-5), (name, rank)
        # Of both ranks; where samples that begin alike are on both, each computes their beginning.
        operations = result["metrics"]["model_operations"] / metrics["model_operations"]
        assert operations == pytest.approx(1.0) if split.endswith("empty") else 1.05 < operations < 2, rank
        if split.startswith("selecting"):
            # Of four steps per group two reach the quantile between the second and the third.
            for name in ("selected_share", "entropy_threshold"):
                assert result["metrics"][name] == pytest.approx(metrics[name], abs=1e-5), (name, rank)
            assert result["metrics"]["selected_share"] == 0.5
        if split.endswith("failing"):
            # The rank with the broken sample names it; the other gives the update up as well instead of waiting.
            first, second, third = result["lines"]
            expected = "refused: sample 0-0/0" if rank == 0 else "refused: another rank"
            assert first.startswith(expected)
            # Every rank names the trajectories: the coordinator goes by whichever answers first.
            assert first.endswith(": 0-0") or first.endswith(": 0-0, 0-1, 0-2")
            assert second.endswith("none is above 0: 0-1")
            # All that have it in the first micro-batch of rows that branch; 0-last is a chain, which comes later.
            assert "cut short" in third and third.endswith((": 0-last", ": 0-0, 0-1, 0-2"))
