"""Measurements of what a pass is made of or stands between passes: matrix products, the optimiser, copies, sharding."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu import subject as subjects
from benchmarks.gpu.bench import Bench, Result
from benchmarks.gpu.subject import Subject
from dart.core.capacity.work import peak_of
from dart.wire.channel import free_port


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


def optimiser(bench: Bench) -> Result:
    """One step of AdamW over `scale.optimised` float32 weights, and what it would be for the whole model."""
    rows = 100
    weights = [torch.nn.Parameter(torch.zeros(rows, bench.scale.optimised // rows // 10, device=bench.device))
               for _ in range(10)]  # fmt: skip
    result: Result = {}
    for name, ways in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
        made = torch.optim.AdamW(weights, lr=1e-6, **ways)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        seconds = bench.seconds(made.step)
        number = sum(weight.numel() for weight in weights)
        whole = subjects.shape_of(bench.scale, bench.scale.full_layers, bench.scale.full_blocks).weights
        result[name] = {"weights": number, "seconds": seconds, "whole_model_seconds": seconds * whole / number}
        del made
        bench.clear()
    return result


def copies(bench: Bench) -> Result:
    """The whole model's bfloat16 weights from device to host and back: pageable memory against pinned."""
    count = bench.scale.copied_bytes // 2
    on_device = torch.zeros(count, dtype=torch.bfloat16, device=bench.device)
    result: Result = {"bytes": 2 * count}
    for name in ("pageable", "pinned"):
        host = torch.zeros(count, dtype=torch.bfloat16, pin_memory=name == "pinned" and bench.on_gpu)
        down = bench.seconds(lambda host=host: host.copy_(on_device, non_blocking=True))  # type: ignore[misc]
        up = bench.seconds(lambda host=host: on_device.copy_(host, non_blocking=True))  # type: ignore[misc]
        result[name] = {
            "device_to_host_seconds": down, "host_to_device_seconds": up,
            "device_to_host_bytes_per_second": 2 * count / down, "host_to_device_bytes_per_second": 2 * count / up,
        }  # fmt: skip
        del host
    return result


def sharded(bench: Bench) -> Result:
    """FSDP2 with one rank, over NCCL (gloo on a CPU), against the same pass without it: what its hooks, copies and
    collectives cost when there is nothing to share, and what bfloat16 weights instead of autocast give."""
    scale = bench.scale
    result: Result = {}
    for name in ("autocast", "fully_shard"):
        bench.clear()
        subject = subjects.build(scale, scale.layers[0], scale.blocks[0], bench.device, fuse=bench.fused)
        batch = subjects.micro_batch(scale, subject, subjects.steps(scale), bench.device)
        if name == "fully_shard":
            _start_group(bench)
            _shard(subject, bench)

        def once(subject: Subject = subject, batch: object = batch, mixed: bool = name == "autocast") -> None:
            subjects.forward_backward(subject, batch, mixed=mixed)  # type: ignore[arg-type]
            subject.zero_grad(set_to_none=True)

        try:
            result[name] = {"seconds": bench.seconds(once), "peak_bytes": bench.peak_bytes(once)}
        finally:
            del subject, batch, once
            if dist.is_initialized():
                dist.destroy_process_group()
    return result


def _start_group(bench: Bench) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("nccl" if bench.on_gpu else "gloo", rank=0, world_size=1)


def _shard(subject: Subject, bench: Bench) -> None:
    """Every decoder layer, every block of the tower, then the whole; gradients are summed, in float32."""
    mesh = init_device_mesh(bench.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    inner = subject.model.model
    for module in (*inner.language_model.layers, *inner.visual.blocks, subject):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in subject.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
