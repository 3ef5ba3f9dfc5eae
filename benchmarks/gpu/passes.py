"""Measurements of forward and backward passes, their memory and time, and of the peak that these are compared with."""

from __future__ import annotations

import torch

from benchmarks.gpu import subject as subjects
from benchmarks.gpu.bench import Bench, Result
from benchmarks.gpu.subject import Subject
from dart.core.capacity import memory, work
from dart.core.capacity.work import peak_of


def _subject(bench: Bench, layers: int, blocks: int) -> Subject:
    bench.clear()
    return subjects.build(bench.scale, layers, blocks, bench.device, fuse=bench.fused)


def matmul(bench: Bench) -> Result:
    """Operations per second of one large product: the peak that every utilisation here is of. Float32 as well, in which
    the head runs (with PyTorch's default precision, which uses no TF32)."""
    result: Result = {}
    size = bench.scale.matrix
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        left, right = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
        rate = 2 * size**3 / bench.seconds(lambda left=left, right=right: left @ right)  # type: ignore[misc]
        result[f"{name}_operations_per_second"] = rate
        if dtype == torch.bfloat16:
            bench.peak = rate
    if bench.on_gpu and (listed := peak_of(torch.cuda.get_device_name(bench.device))) and bench.peak:
        result["share_of_data_sheet"] = round(bench.peak / listed, 4)
    return result


def trainer_memory(bench: Bench) -> Result:
    """Peak bytes of an update (two micro-batches of a row each, and AdamW), at three depths; from them those of the
    whole model on one card, as a plane over layers and blocks, beside the estimate of `dart.core.capacity`."""
    scale = bench.scale
    (few, many), (thin, thick) = scale.layers, scale.blocks
    found = {}
    for layers, blocks in ((few, thin), (many, thin), (few, thick)):
        subject = _subject(bench, layers, blocks)
        optimizer = torch.optim.AdamW(subject.parameters(), lr=1e-6, fused=True)
        batch = subjects.micro_batch(scale, subject, subjects.steps(scale), bench.device)

        def update(subject: Subject = subject, optimizer: torch.optim.AdamW = optimizer, batch: object = batch) -> None:
            for _ in range(2):  # the second finds the first one's gradient
                subjects.forward_backward(subject, batch)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        update()  # the optimiser makes its state
        peak = bench.peak_bytes(update)
        found[layers, blocks] = {"peak_bytes": peak, "estimate_bytes": _estimate(bench, layers, blocks, batch.load)}
        del subject, optimizer, batch, update
        bench.clear()
    result: Result = {f"{layers} layers, {blocks} blocks": one for (layers, blocks), one in found.items()}
    corner, wide, tall = ([found[at][name] for name in ("peak_bytes", "estimate_bytes")] for at in found)
    for number, name in enumerate(("peak_bytes", "estimate_bytes")):
        low, of_layers, of_blocks = corner[number], wide[number], tall[number]
        if low is None or of_layers is None or of_blocks is None:
            continue
        per_layer, per_block = (of_layers - low) / (many - few), (of_blocks - low) / (thick - thin)
        whole = low + per_layer * (scale.full_layers - few) + per_block * (scale.full_blocks - thin)
        result[f"extrapolated_{name}"] = round(whole)
    return result


def _estimate(bench: Bench, layers: int, blocks: int, load: work.Load) -> int:
    prompts = memory.Prompts(load.tokens, load.screenshots, load.patches // 4)
    set_up = memory.TrainerSetUp(
        checkpointing=True, reference=False, microbatch_tokens=load.tokens, runtime=0, fused=bench.fused
    )
    return memory.of_rank(subjects.shape_of(bench.scale, layers, blocks), set_up, prompts).total


def one_row(bench: Bench) -> Result:
    """Forward and backward over one row with all screenshots: peak, seconds, share of the measured peak; with the tower
    frozen as well, and per layer (from two depths), so that the whole model's time follows."""
    scale = bench.scale
    (few, many), blocks = scale.layers, scale.blocks[1]
    result: Result = {}
    taken = {}
    for layers in (few, many):
        subject = _subject(bench, layers, blocks)
        batch = subjects.micro_batch(scale, subject, subjects.steps(scale), bench.device)
        load, shape = batch.load, subjects.shape_of(scale, layers, blocks)
        for frozen in (False, True):
            subject.freeze_vision(frozen)
            subject.zero_grad(set_to_none=True)
            work_done = work.update(
                shape, load, work.Passes(score=False, reference=False, recompute=True, vision_trains=not frozen)
            )

            def once(subject: Subject = subject, batch: object = batch) -> None:
                subjects.forward_backward(subject, batch)  # type: ignore[arg-type]
                subject.zero_grad(set_to_none=True)

            seconds = bench.seconds(once)
            taken[layers, frozen] = seconds
            result[f"{layers} layers, {'frozen' if frozen else 'trained'} tower"] = {
                "tokens": load.tokens, "screenshots": load.screenshots, "seconds": seconds,
                "peak_bytes": bench.peak_bytes(once), "model_operations": work_done.model,
                "recomputed_operations": work_done.recomputed,
                "mfu_of_measured_peak": bench.utilisation(work_done.model, seconds),
                "hfu_of_measured_peak": bench.utilisation(work_done.total, seconds),
            }  # fmt: skip
            del once
        del subject, batch
    for frozen in (False, True):
        of_layer = (taken[many, frozen] - taken[few, frozen]) / (many - few)
        name = f"whole_model_seconds_{'frozen' if frozen else 'trained'}_tower"
        result[name] = taken[few, frozen] + of_layer * (scale.full_layers - few)
    return result
