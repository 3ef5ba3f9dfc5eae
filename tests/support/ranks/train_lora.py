"""One rank of the two of `test_train_lora`: `train_lora.py FOLDER WINDOWED EARLIER OUT`, in a rank's environment.

As `train_sharded`, with an adapter. EARLIER: a checkpoint of one rank with an adapter, after one update.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ranks.train_sharded import BASE, BOTH, Cases, batch, held, main, written_beside

LORA: dict[str, Any] = {**BASE, "lora": {"rank": 4, "alpha": 8}}
TOWER: dict[str, Any] = {**LORA, "lora": {"rank": 4, "alpha": 8, "tower": True}, "loss": BOTH, "microbatch_tokens": 1}


class Adapted(Cases):
    """Each method is a case, run by all ranks at the same time."""

    def sharded(self) -> dict[str, Any]:
        options: dict[str, Any] = {**LORA, "loss": BOTH, "freeze_vision": True, "gradient_checkpointing": True}
        trainer = self.trainer(**options)
        start, path = trainer.snapshot(), self._out / "checkpoints" / "v1"
        self.update(trainer, batch())
        writing = written_beside(trainer.stage_checkpoint(path))
        first = trainer.snapshot()
        metrics = self.update(trainer, batch())
        writing.result()
        resumed = self.trainer(**options, resume_from=str(path))
        again = resumed.snapshot()
        self.update(resumed, batch())
        return {
            "start": start, "first": first, "second": trainer.snapshot(), "metrics": metrics, "held": held(trainer),
            "again": again, "second again": resumed.snapshot(),
        }  # fmt: skip

    def from_one_rank(self) -> dict[str, Any]:
        trainer = self.trainer(**LORA, loss=BOTH, resume_from=str(self._earlier))
        self.update(trainer, batch())
        return {"weights": trainer.snapshot()}

    def tower(self) -> dict[str, Any]:
        """Micro-batches of one row, some of which have no screenshot."""
        trainer = self.trainer(**TOWER)
        metrics = self.update(trainer, batch())
        return {"weights": trainer.snapshot(), "metrics": metrics}

    def another_family(self) -> dict[str, Any]:
        options = {**LORA, "learning_rate": 1e-3, "loss": {"kl_coefficient": 0.1}, "dtype": "bfloat16"}
        trainer = self.trainer(folder=self._windowed, **options)
        metrics = [self.update(trainer, batch()) for _ in range(2)]
        return {"kl": [one["kl_reference"] for one in metrics], "weights": trainer.snapshot()}


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:5]), names=sys.argv[5:], kind=Adapted)
