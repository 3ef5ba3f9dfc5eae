"""Bytes that a trainer rank, a replica's GPU and the host need.

What is kept between steps (weights, gradients, optimiser state) is exact. Activations are counted layer by layer: what
autograd keeps for the backward pass of transformers' eager modules, or of our fused kernels, with fused attention. They
are within 4 % of what tiny models keep on a CPU; what is left out is small (statistics of norms and attention, rotary
tables). On UI-TARS-1.5-7B the estimate is 2 % above what an H200 counted with an adapter, and 2 % with all weights
(extrapolated from four and eight layers). Of a replica of it on an H100, what is neither weights nor KV cache is 4.0 GB
by the estimate, with a full encoder cache and a pass under way, and was 1.4 GB right after the start. What the CUDA
runtime, NCCL and the allocator's fragmentation take is a constant of ours (`RUNTIME`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dart.core.capacity.shape import QWEN2_5, Shape, Text, Vision

SINGLE, HALF = 4, 2
"""Bytes of a float32 and a bfloat16."""
HEAD_ELEMENTS = 1 << 26
"""Logits that the trainer holds at once (`HEAD_ELEMENTS` in workers/train)."""
LOGIT_COPIES = 6
"""What a chunk holds: logits, log-probabilities, their exponentials, the entropy's products, two gradients."""
RUNTIME = 2 << 30
"""A GPU's: CUDA context, NCCL's buffers, fragments."""
RUNTIME_CPU = 1 << 30
"""Host memory of a process that has imported torch; without GPUs this is all of its runtime."""
PINNED = 1.1
"""Bytes of pinned host memory for each byte that is kept in it: 18.2 GB were counted for the 16.6 of UI-TARS-1.5-7B."""
PACK = 1 << 28
"""Weights go over NCCL in packs, each sent once it holds more than this; two are under way at once. vLLM's default is
four times as much, which small cards have no room for."""
OVERHEAD_TEXT = 1_000
"""Tokens of a system message and an instruction."""
TURN_TEXT = 150
"""Tokens of a turn's answer with its template."""
ENCODED_PROMPTS = 4
"""For how many prompts' screenshots an engine keeps encodings on a GPU, unless `rollout.encoder_cache_tokens` says how
many tokens."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes by what they are for; `total` is the peak, with all of them at the same time."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def told(self) -> str:
        """ "weights 33.2 GB, gradients 33.2 GB", the largest first, without what is below 0.1 GB and 1 % of all."""
        shown = sorted(self.parts.items(), key=lambda part: -part[1])
        least = min(10**8, self.total // 100)
        return ", ".join(f"{name} {gigabytes(size)}" for name, size in shown if size > least)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


@dataclass(frozen=True, slots=True)
class Prompts:
    """The longest prompt that is expected, with its answer. All tokens include those of screenshots."""

    tokens: int
    screenshots: int
    screenshot_tokens: int

    @classmethod
    def expected(cls, screenshots: int, screenshot_tokens: int, turns: int, most: int, shown: int = 0) -> Prompts:
        """`screenshots` · (`screenshot_tokens` + 4 of template) + OVERHEAD_TEXT + `turns` · TURN_TEXT + `shown`, the
        tokens of texts beside the screenshots; at most `most`."""
        tokens = screenshots * (screenshot_tokens + 4) + OVERHEAD_TEXT + turns * TURN_TEXT + shown
        return cls(min(tokens, most), screenshots, screenshot_tokens)


@dataclass(frozen=True, slots=True)
class TrainerSetUp:
    ranks: int = 1
    sharded: bool = False
    """Weights, gradients, optimiser state and reference are divided among the ranks (FSDP2)."""
    mixed: bool = True
    """Computes in bfloat16; masters are float32 in any case."""
    checkpointing: bool = False
    reference: bool = True
    vision_frozen: bool = False
    microbatch_tokens: int = 16_384
    runtime: int = RUNTIME
    lora_rank: int = 0
    """The adapter's rank, if an adapter alone trains: the policy without it is the reference. 0: there is none."""
    lora_targets: tuple[str, ...] = ()
    """The matrices of a decoder layer that have an adapter."""
    lora_tower: bool = False
    """The vision tower's layers have an adapter, too."""
    fused: bool = False
    """`trainer.fused_kernels`, on a GPU."""
    transfers: int = 0
    """How many replicas get whole weights over NCCL from rank 0 at once. 0: none does."""
    on_gpus: bool = True
    """Then rank 0's copies of the weights are in pinned host memory, and `runtime` is not the host's."""

    @property
    def size(self) -> int:
        """Bytes of a number that goes into a matrix product."""
        return HALF if self.mixed else SINGLE

    @property
    def narrow(self) -> bool:
        """Whether passes find the weights in bfloat16: gathered, or held so because they never change."""
        return self.mixed and (self.sharded or self.lora_rank > 0)

    @property
    def stream(self) -> int:
        """Bytes of a number in the decoder's residual stream; one in the tower's has `size`."""
        return HALF if self.narrow else SINGLE

    @property
    def tower_frozen(self) -> bool:
        return self.vision_frozen or (self.lora_rank > 0 and not self.lora_tower)


def of_rank(shape: Shape, set_up: TrainerSetUp, prompts: Prompts) -> Needs:
    """Rank 0's GPU, from the end of the forward pass of its largest micro-batch on, in the second update or later.

    P weights of which P' train, N ranks if sharded and else 1: masters 4·P/N, gradients 4·P'/N, AdamW's two moments
    8·P'/N, reference 4·P (in bfloat16 and 2·P/N if sharded). In bfloat16, autocast keeps a copy of every matrix, 2·P;
    sharded, there are instead the weights of two gathered layers and of all that is in no layer, and the head in
    float32. A layer that is computed again takes the room of the logits, which are gone by then, and what is beyond it.
    An adapter adds its own weights, which are then all that train, and there is no reference in memory. Not sharded,
    what is below it is held in bfloat16, 2·P, and beside it are the head in float32 and copies of the adapter alone.
    Over NCCL vLLM keeps for each transfer, on each of two streams, a pack's tensors and the pack; only rank 0 has
    these.
    """
    adapter = _adapter(shape, set_up)
    weights = shape.weights + adapter
    trained = _trained(shape, set_up)
    reference = set_up.reference and not set_up.lora_rank
    parts = set_up.ranks if set_up.sharded else 1
    size = set_up.size
    held_narrow = set_up.narrow and not set_up.sharded
    below = (HALF if held_narrow else SINGLE) * shape.weights
    tokens = max(set_up.microbatch_tokens, prompts.tokens)
    logits = LOGIT_COPIES * SINGLE * min(HEAD_ELEMENTS, tokens * shape.text.vocabulary)
    needs = {
        "weights": (SINGLE * adapter + below) // parts,
        "gradients": SINGLE * trained // parts,
        "optimiser state": 2 * SINGLE * trained // parts,
        "reference": (HALF if set_up.sharded and set_up.mixed else SINGLE) * weights // parts * reference,
        "logits": logits,
        "head in float32": SINGLE * shape.text.embedding * set_up.narrow,
        "runtime": set_up.runtime,
    }
    if set_up.sharded:
        needs["gathered layers"] = size * (2 * max(shape.text.layer, shape.vision.block) + shape.outside_layers)
    elif set_up.mixed:
        needs["bfloat16 copies"] = HALF * (adapter if held_narrow else weights)
    if set_up.transfers:
        # With the copies on the GPU of which packs are made.
        needs["weight transfers"] = set_up.transfers * 2 * _packs(shape, size)
    share = prompts.screenshots * prompts.screenshot_tokens / max(1, prompts.tokens)
    patches = round(tokens * share) * shape.vision.merge**2
    again = max(0, _computed_again(shape, set_up, tokens, patches) - logits)
    needs["activations"] = activations(shape, set_up, tokens, patches) + again
    return Needs(needs)


def activations(shape: Shape, set_up: TrainerSetUp, tokens: int, patches: int) -> int:
    """Kept between the forward and the backward pass of `tokens` tokens and `patches` patches of screenshots.

    Without gradient checkpointing every layer keeps its own, and with it its input (of the residual stream's dtype).
    In no layer are the decoder's last norm, and of the tower the patches, which its first matrix takes, and its
    mergers. A tower that is frozen, as it is beside an adapter that it has no part in, keeps nothing.
    """
    text, vision = shape.text, shape.vision
    of_layer = set_up.stream * text.hidden if set_up.checkpointing else _layer_keeps(text, set_up)
    of_block = set_up.size * vision.hidden if set_up.checkpointing else _block_keeps(vision, set_up)
    of_token = text.layers * of_layer + _rms_norm_keeps(set_up, set_up.stream) * text.hidden
    of_patch = vision.depth * of_block + _mergers_keep(vision, set_up)
    if not set_up.lora_rank:
        of_patch += set_up.size * vision.patch_values
    return tokens * of_token + (0 if set_up.tower_frozen else patches * of_patch)


def _computed_again(shape: Shape, set_up: TrainerSetUp, tokens: int, patches: int) -> int:
    """What the largest layer or block keeps that gradient checkpointing computes again, one at a time."""
    if not set_up.checkpointing:
        return 0
    of_block = 0 if set_up.tower_frozen else patches * _block_keeps(shape.vision, set_up)
    return max(tokens * _layer_keeps(shape.text, set_up), of_block)


def _rms_norm_keeps(set_up: TrainerSetUp, stream: int) -> int:
    """Bytes per channel, without the output: the input in float32, and the normalised input in the stream's dtype for
    the gradient of the norm's weights, which are frozen beside an adapter. Fused: the input as it comes."""
    if set_up.fused:
        return stream
    return SINGLE + (0 if set_up.lora_rank else stream)


def _products_take(set_up: TrainerSetUp, norms: int, products: int) -> int:
    """Bytes per channel of the outputs of so many norms, which go into so many matrix products. Autocast casts float32
    for each product."""
    if set_up.mixed and not set_up.narrow and not set_up.fused:
        return products * HALF
    return norms * set_up.size


def _layer_keeps(text: Text, set_up: TrainerSetUp) -> int:
    """Bytes per token. e: bytes of a matrix product's input.

    Norms, for q, k, v, gate and up. Attention: q, k and v after rotation and the output: e·(2·n + 2·m)·d; and where
    heads are normalised, what those norms of (n + m)·d channels keep. MLP: gate, its activation, up, and their product:
    4·e·I. Fused kernels keep no activation of the gate. An adapter: what comes out of each A, e·rank.
    """
    size = set_up.size
    channels = (text.heads + text.kv_heads) * text.head_size
    norms = (2 * _rms_norm_keeps(set_up, set_up.stream) + _products_take(set_up, 2, 5)) * text.hidden
    attention = (2 * size + text.head_norms * _rms_norm_keeps(set_up, size)) * channels
    adapter = size * set_up.lora_rank * len(set_up.lora_targets)
    return norms + attention + (3 if set_up.fused else 4) * size * text.intermediate + adapter


def _block_keeps(vision: Vision, set_up: TrainerSetUp) -> int:
    """Bytes per patch. Attention: q, k and v before rotation (one tensor), q and k after it, and the output: 6·e·h (in
    windows of several lengths, their own q, k, v and output, and the output in the order of the patches: 5·e·h). Gated
    (Qwen2.5-VL): norms for qkv, gate and up, and 4·e·i of the MLP. Else: norms for qkv and the MLP, and what goes into
    and comes out of the activation, 2·e·i. An adapter: what comes out of each A."""
    size = set_up.size
    gated = vision.family == QWEN2_5
    adapter = size * set_up.lora_rank * (5 if gated else 4)
    norms = 2 * _tower_norm_keeps(vision, set_up) + _products_take(set_up, 2, 3 if gated else 2)
    of_mlp = (3 if set_up.fused else 4) if gated else 2
    return (norms + 6 * size) * vision.hidden + of_mlp * size * vision.intermediate + adapter


def _mergers_keep(vision: Vision, set_up: TrainerSetUp) -> int:
    """Bytes per patch. Each merger: its norm, what its first matrix takes, and what goes into and comes out of its
    activation, h channels each."""
    return (1 + vision.deepstack) * (_tower_norm_keeps(vision, set_up) + 3 * set_up.size) * vision.hidden


def _tower_norm_keeps(vision: Vision, set_up: TrainerSetUp) -> int:
    """Bytes per channel, without the output. A LayerNorm (Qwen3-VL) keeps its input, which autocast on a GPU makes
    float32; sharded, there is no autocast."""
    if vision.family == QWEN2_5:
        return _rms_norm_keeps(set_up, set_up.size)
    return set_up.size if set_up.sharded else SINGLE


@dataclass(frozen=True, slots=True)
class ReplicaSetUp:
    size: int = HALF
    """Bytes of a weight and of a number in the KV cache."""
    quantised: bool = False
    """The decoder's matrices have one byte a weight."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    slots: int = 32
    max_model_len: int = 32_768
    batched_tokens: int = 8_192
    """vLLM's max_num_batched_tokens: of one pass."""
    encoder_tokens: int = 0
    """Tokens of the screenshots whose encodings are kept, if they are more than those of one pass."""
    nccl: bool = False
    """Weights arrive over NCCL."""
    runtime: int = RUNTIME


def kv_bytes_per_token(text: Text, set_up: ReplicaSetUp) -> float:
    """On each GPU: 2 (key and value) · layers · m · d · bytes, layers divided by pipeline stages, heads by tensor
    parallelism, but never less than one head."""
    heads = max(1.0, text.kv_heads / set_up.tensor_parallel)
    return 2 * text.layers / set_up.pipeline_parallel * heads * text.head_size * set_up.size


def of_replica_gpu(shape: Shape, set_up: ReplicaSetUp, tokens: int) -> Needs:
    """One GPU of a replica whose KV cache holds `tokens` tokens.

    Weights P·e / (TP · PP), with e = 1 for the decoder's matrices if they are quantised. Encoder's cache:
    `encoder_tokens` or `batched_tokens` of the decoder's width, once more for each level of deepstack. Activations of
    one pass of `batched_tokens`: eight of H and three of I numbers a token, and the patches of as many tokens, with
    eight of h and three of i; logits of every slot in float32.
    """
    text, vision = shape.text, shape.vision
    spread = set_up.tensor_parallel * set_up.pipeline_parallel
    patches = set_up.batched_tokens * vision.merge**2
    kept = max(set_up.batched_tokens, set_up.encoder_tokens)
    numbers = set_up.batched_tokens * (8 * text.hidden + 3 * text.intermediate / set_up.tensor_parallel)
    saved = (set_up.size - 1) * text.layers * text.layer_matrices if set_up.quantised else 0
    numbers = max(numbers, patches * (8 * vision.hidden + 3 * vision.intermediate / set_up.tensor_parallel))
    return Needs(
        {
            "weights": (set_up.size * shape.weights - saved) // spread,
            "KV cache": round(tokens * kv_bytes_per_token(text, set_up)),
            "encoder cache": set_up.size * kept * vision.out * (1 + vision.deepstack),
            "activations": round(set_up.size * numbers) + SINGLE * set_up.slots * text.vocabulary,
            "runtime": set_up.runtime,
        }
        | ({"weight transfers": _packs(shape, set_up.size)} if set_up.nccl else {})
    )


def of_replica_host(shape: Shape, set_up: ReplicaSetUp, prompts: Prompts, *, processed: int, kept: int) -> Needs:
    """Host memory of a replica on GPUs, once its caches are full and every slot has the longest prompt.

    `processed`: bytes of vLLM's cache of prepared screenshots, which the engine's process alone has: the one before it
    keeps their sizes (vLLM 0.32, multimodal/cache/lru.py). `kept`: bytes of the screenshots as they were sent.

    A prepared screenshot has one byte for each number of its patches, because vLLM normalises them on the device. An
    engine of several GPUs has a process for each of them, and each of these keeps the screenshots of its requests until
    they end; one GPU alone belongs to the engine's process.
    """
    gpus = set_up.tensor_parallel * set_up.pipeline_parallel
    workers = gpus if gpus > 1 else 0
    prepared = prompts.screenshot_tokens * shape.vision.merge**2 * shape.vision.patch_values
    return Needs(
        {
            "prepared screenshots": processed,
            "screenshots as sent": kept,
            "screenshots of requests": workers * set_up.slots * prompts.screenshots * prepared,
            "processes": (2 + workers) * RUNTIME_CPU,
        }
    )


def _packs(shape: Shape, size: int) -> int:
    """What a transfer over NCCL holds: two packs, one ending with the embedding, the other with a layer's matrix."""
    largest = shape.text.embedding + shape.text.hidden * shape.text.intermediate
    return min(size * shape.weights, 2 * PACK + size * largest)


def of_trainer_host(
    shape: Shape,
    set_up: TrainerSetUp,
    ranks_here: int,
    *,
    snapshots: int = 3,
    caches: int = 0,
    receiving: int = 0,
    senders: int = 0,
) -> Needs:
    """Host memory of the ranks on one machine.

    `receiving`: GPUs of replicas here that take weights over gloo at the same time, each through a copy in host memory.
    `senders`: replicas that get weights so; rank 0 keeps two buffers of the largest tensor for each.

    `caches`: of screenshots, of each rank, once they are full. A snapshot for the replicas: e·P on rank 0, up to
    `snapshots` at once (staged, being sent, being written; where replicas are sent an adapter, being written
    alone). A checkpoint that is being written: 4·P (masters; beside an adapter, its own alone) and 8·P' (AdamW's
    moments), by rank 0, or by each rank its part if sharded. Loading, before there is any of that: the weights in
    float32, by every rank, or by one if sharded.
    """
    size = set_up.size
    loading = SINGLE * shape.weights * (1 if set_up.sharded else ranks_here)
    held = _adapter(shape, set_up) if set_up.lora_rank else shape.weights
    checkpoint = SINGLE * held + 2 * SINGLE * _trained(shape, set_up)
    if set_up.sharded:
        checkpoint = checkpoint * ranks_here // set_up.ranks
    kept = round(snapshots * size * shape.weights * (PINNED if set_up.on_gpus else 1))
    return Needs(
        {
            "snapshots": kept,
            "checkpoint": checkpoint,
            "loading beyond that": max(0, loading - kept - checkpoint),
            "caches of screenshots": caches * ranks_here,
            "weight transfers": size * (receiving * shape.weights + 2 * senders * shape.text.embedding),
            "processes": ranks_here * RUNTIME_CPU * set_up.on_gpus,
        }
    )


def _adapter(shape: Shape, set_up: TrainerSetUp) -> int:
    tower = shape.vision.adapter(set_up.lora_rank) if set_up.lora_tower else 0
    return shape.text.adapter(set_up.lora_rank, set_up.lora_targets) + tower


def _trained(shape: Shape, set_up: TrainerSetUp) -> int:
    """Weights that train."""
    if set_up.lora_rank:
        return _adapter(shape, set_up)
    return shape.weights - shape.vision.weights * set_up.vision_frozen
