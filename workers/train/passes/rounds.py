"""Working through micro-batches: every sample is computed once, or left out with a reason.

A sample whose numbers are not finite is left out, and its micro-batch computed again. A micro-batch that does not fit
the device's memory is halved, by rows and then by the samples of its one row; a single sample that does not fit is left
out. If a backward pass ran out of memory, a part of its gradient has been added already, so the work begins again, with
what was not tried yet: of N micro-batches that are all too large, each is computed once in vain, not up to N times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dart.workers.train import collectives
from dart.workers.train.batch import MicroBatch, Row, without
from dart.workers.train.errors import TrainError
from dart.workers.train.passes.faults import SHORTER, Faults, NotFinite
from dart.workers.train.passes.runner import Once, Passed, PassRunner, release_memory


class Work(Protocol):
    """What is computed for each micro-batch."""

    name: str
    backward: bool
    """Whether finishing a micro-batch is a pass of its own."""

    def begin(self) -> None:
        """Forget everything that was accumulated."""

    def prepare(self, part: list[Row]) -> MicroBatch:
        """Raises TrainError or UnknownScreenshot, for bad data or when the work is cancelled."""

    def compute(self, part: list[Row], inputs: MicroBatch) -> Callable[[], None]:
        """The forward pass; the result finishes the micro-batch. An idle one has no rows. Raises NotFinite."""


def work_through(parts: Sequence[list[Row]], work: Work, faults: Faults, runner: PassRunner) -> None:
    """Do the work for each part, without the samples that are left out. Raises TrainError.

    Ranks that are in step all call this at the same time, whatever number of parts each has.
    """
    queue = list(parts)
    at = 0
    problem: TrainError | None = None
    work.begin()
    while True:
        while at < len(queue) and not without(queue[at], faults.left_out):
            at += 1
        part = without(queue[at], faults.left_out) if at < len(queue) else []
        inputs = runner.idle
        if part and problem is None:
            prepared, problem = collectives.attempt(lambda part=part: work.prepare(part))  # type: ignore[misc]
            inputs = prepared or inputs
        if not runner.agree(bool(part), problem):
            return
        if inputs is None:
            raise RuntimeError("ranks that are not in step have no idle micro-batches")
        passed, began_backward = _both_passes(part, inputs, work, runner)
        if passed.all_passed:
            at += 1
            continue
        tried = at
        if isinstance(passed.trouble, torch.OutOfMemoryError) or (passed.trouble and not passed.disturbed):
            instead, problem = _answered(passed.trouble, part, faults)
            queue[at : at + 1] = instead
            tried += len(instead)
        if began_backward:
            work.begin()
            queue, at = queue[tried:] + queue[:tried], 0


def rehearse(work: Work, runner: PassRunner) -> None:
    """Make the work's passes once without samples, where ranks are in step: it shows which collectives they have."""
    if runner.idle is not None:
        passed, _ = _both_passes([], runner.idle, work, runner)
        if passed.trouble is not None:
            raise passed.trouble
        work.begin()


def _both_passes(part: list[Row], inputs: MicroBatch, work: Work, runner: PassRunner) -> tuple[Passed[None], bool]:
    """The last pass that was tried, and whether it was a backward pass."""
    forward = runner.run(work.name, lambda: work.compute(part, inputs), keep_graph=work.backward)
    if not forward.all_passed or forward.result is None:
        return Passed(None, forward.trouble, forward.all_passed, forward.disturbed), False
    if not work.backward:
        forward.result()
        return Passed(None, None, all_passed=True), False
    finish = Once(forward.result)
    del forward  # so that the graph is freed if the backward pass fails
    return runner.run(f"{work.name} gradient", finish), True


def _answered(trouble: Exception, part: list[Row], faults: Faults) -> tuple[list[list[Row]], TrainError | None]:
    """What to compute instead of the part, and the problem that ends the update, if it is one."""
    match trouble:
        case NotFinite():
            faults.leave_out(trouble.samples, str(trouble))
            return [part], None
        case torch.OutOfMemoryError() if part:
            release_memory()
            return halves(part, faults), None
        case TrainError():
            return [part], trouble
        case _:
            return [part], TrainError(str(trouble))


def halves(part: list[Row], faults: Faults) -> list[list[Row]]:
    """Two micro-batches of half the rows, or of half the samples of the only row; none for a single sample."""
    length = max(row.length for row in part)
    if len(part) > 1:
        faults.too_large(len(part) * length, f"{len(part)} rows of up to {length} tokens")
        return [part[: len(part) // 2], part[len(part) // 2 :]]
    keyed = [branch.keyed for branch in part[0].branches]
    if len(keyed) > 1:
        # A row of several episodes is shorter with a lower limit; one of a single episode is not.
        limit = None if part[0].straight else length
        faults.too_large(limit, f"one row of {len(keyed)} samples and {length} tokens")
        return [[Row.of(keyed[: len(keyed) // 2])], [Row.of(keyed[len(keyed) // 2 :])]]
    why = f"its {length} tokens alone do not fit the device's memory: {SHORTER}"
    faults.leave_out(part[0].samples, why, memory=True)
    return []
