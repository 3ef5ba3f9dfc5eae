"""Measurements of forward and backward passes: memory, time, attention's kernel, rows, head."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import subject as subjects
from benchmarks.gpu.bench import Bench, Result
from benchmarks.gpu.subject import Subject
from dart.core.capacity import memory, work
from dart.errors import first_line


def _subject(bench: Bench, layers: int, blocks: int) -> Subject:
    bench.clear()
    return subjects.build(bench.scale, layers, blocks, bench.device, fuse=bench.fused)


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


def attention(bench: Bench) -> Result:
    """Which fused attention PyTorch chooses for the trainer's rows (asserted to be a flash kernel), and how long the
    same pass takes with the others."""
    scale = bench.scale
    subject = _subject(bench, scale.layers[0], scale.blocks[0])
    batch = subjects.micro_batch(scale, subject, subjects.steps(scale), bench.device)

    def once() -> None:
        subjects.forward_backward(subject, batch)
        subject.zero_grad(set_to_none=True)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        once()
    chosen = sorted({one.key for one in profile.key_averages() if "_scaled_dot_product" in one.key})
    fused = [name for name in chosen if "flash" in name or "cudnn" in name]
    if not fused or any("math" in name for name in chosen):
        raise AssertionError(f"attention is not fused: PyTorch chose {', '.join(chosen) or 'nothing'}")
    seconds, without = {"default": bench.seconds(once)}, {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        try:
            with sdpa_kernel(backend):
                seconds[backend.name.lower()] = bench.seconds(once)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            # Gigabytes of scores, or a kernel that this build or card does not have.
            subject.zero_grad(set_to_none=True)
            without[backend.name.lower()] = first_line(error)
    gain = {name: round(value / seconds["default"], 3) for name, value in seconds.items()}
    return {"chosen": chosen, "seconds": seconds, "over_default": gain, "not_possible": without}


def rows(bench: Bench) -> Result:
    """Three steps that continue one another: as one row, and as three rows of their own, one after the other."""
    scale = bench.scale
    subject = _subject(bench, scale.layers[0], scale.blocks[0])
    samples = subjects.steps(scale, 3)
    chain = subjects.micro_batch(scale, subject, samples, bench.device)
    alone = [subjects.micro_batch(scale, subject, [one], bench.device, joined=False) for one in samples]

    def joined() -> None:
        subjects.forward_backward(subject, chain)
        subject.zero_grad(set_to_none=True)

    def separate() -> None:
        for batch in alone:
            subjects.forward_backward(subject, batch)
        subject.zero_grad(set_to_none=True)

    one, three = bench.seconds(joined), bench.seconds(separate)
    return {
        "chain": {"tokens": chain.padded_tokens, "seconds": one, "peak_bytes": bench.peak_bytes(joined)},
        "separate": {
            "tokens": sum(batch.padded_tokens for batch in alone),
            "seconds": three,
            "peak_bytes": bench.peak_bytes(separate),
        },
        "separate_over_chain": round(three / one, 3),
    }


def head_chunks(bench: Bench) -> Result:
    """The head forward and backward, by the number of logits that it holds at once."""
    scale = bench.scale
    subject = _subject(bench, 1, 1)
    text = scale.document["text_config"]
    hidden = torch.randn(scale.head_tokens, text["hidden_size"], device=bench.device, requires_grad=True)
    tokens = torch.full((scale.head_tokens,), 8, device=bench.device)
    result: Result = {}
    logits = scale.head_tokens * int(text["vocab_size"])
    for parts in (64, 16, 4, 1):
        elements = -(-logits // parts)

        def once(elements: int = elements) -> None:
            with subjects.head_elements(elements):
                subjects.head(subject, hidden, tokens).sum().backward()
            hidden.grad = None
            subject.zero_grad(set_to_none=True)

        seconds = bench.seconds(once)
        result[f"{elements} logits"] = {"seconds": seconds, "peak_bytes": bench.peak_bytes(once)}
    return result
