"""One rank of `test_train_ranks`: `accelerate launch … train_rank.py FOLDER OUT SPLIT…`."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from ranks.train_sharded import BASE
from train_samples import mixed, settings, totals

from dart.v1 import session_pb2 as pb
from dart.workers.train import collectives
from dart.workers.train.errors import SampleError
from dart.workers.train.trainer import Trainer

LOSSES: dict[str, dict[str, Any]] = {
    "selecting": {"entropy_quantile": 0.4},
    "token mean": {"aggregation": "token_mean"},
}
"""By what the name of a split begins with."""
BUCKET_ELEMENTS = {"uneven": 1000}
"""With so few, gradients are added in many buckets, some of several tensors; else all of them are in one."""


def main(folder: Path, out: Path, split: str) -> None:
    collectives.BUCKET_ELEMENTS = BUCKET_ELEMENTS.get(split, 1 << 26)
    samples = mixed(groups=3)
    loss = next((loss for kind, loss in LOSSES.items() if split.startswith(kind)), {})
    trainer = Trainer(settings(folder, **BASE, loss=loss, sharding="none"))
    rank, world = trainer.state.process_index, trainer.state.num_processes
    lines: list[str] = []
    if split.endswith("failing"):
        broken = mixed(groups=3)
        broken[0].prompt_token_ids.insert(2, 6)
        refused(trainer, broken, lines)
        broken = mixed(groups=3)
        broken[1].logprobs[0] = 0.5
        refused(trainer, broken, lines)
        picture = broken[2].images[0].data
        broken = mixed(groups=3)
        for one in broken[:4]:
            data = picture[: len(picture) // 2]
            one.images[0].data, one.images[0].sha256 = data, hashlib.sha256(data).digest()
        refused(trainer, broken, lines)
    share = {
        "even": samples[rank::world],
        "uneven": samples[:1] if rank else samples[1:],
        "empty": [] if rank else samples,
        "failing": samples[rank::world],
        "selecting": samples[:1] if rank else samples[1:],
        "selecting, failing": samples[rank::world],
        "selecting, empty": [] if rank else samples,
        "token mean": samples[:1] if rank else samples[1:],
    }[split]
    for _ in range(2):
        metrics = trainer.update(share, *totals(samples))
    torch.save({"weights": trainer.snapshot(), "metrics": metrics, "lines": lines}, out / f"{split}-{rank}.pt")


def refused(trainer: Trainer, broken: list[pb.Sample], lines: list[str]) -> None:
    """The first rank has what is broken."""
    share = broken[:4] if trainer.rank == 0 else broken[4:]
    try:
        trainer.update(share, *totals(broken))
    except SampleError as error:
        lines.append(f"refused: {error}: {', '.join(error.trajectories)}")


if __name__ == "__main__":
    for each in sys.argv[3:]:
        main(Path(sys.argv[1]), Path(sys.argv[2]), each)
