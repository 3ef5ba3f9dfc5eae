"""What a run's trainer and replicas need, what the cards of this machine have, and the messages about it.

The numbers are those of `dart.core.capacity`; here they get the model's files, the config, and the machine. A run is
refused where vLLM would refuse the config on any card, and where the cards are known and a worker clearly does not fit
(`verdict.REFUSED`). The needs are compared with the machine's own memory, too; of that a warning says so.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dart.agent.parsing import screenshot_tokens
from dart.config import Config
from dart.core.capacity import devices, machine, memory, work
from dart.core.capacity.memory import Needs, Prompts, ReplicaSetUp, TrainerSetUp, gigabytes
from dart.core.capacity.shape import Shape, UnknownShape, read_shape
from dart.core.capacity.verdict import clearly_too_much, replica_remedies, shares_heads, tight, trainer_remedies
from dart.errors import UserError
from dart.job import Job, Train
from dart.processes.gpus import Card, Placement, cards_of, gpus_here, place

UTILISATION = 0.4
"""The share of a card's peak that is assumed for times; `python -m benchmarks.gpu` measures it on a card."""
MOST_HEADER = 100 << 20
"""Bytes of a safetensors header; the format's own limit."""
BATCHED_TOKENS = 8192
"""vLLM's max_num_batched_tokens where the config does not set it."""
SHARE_OF_CARD = 0.92
"""vLLM's gpu_memory_utilization where the config does not set it: an engine starts only if so much of its GPU is free.
"""
CHARACTERS_PER_TOKEN = 4
"""Of an environment's texts."""
BYTES_PER_PIXEL = 0.145
"""Of a screenshot as its environment sends it, 300 KB for one of 1920 × 1080: an assumption."""
LEFT_TO_WORKERS = 0.95
"""The share of a GPU that several workers on it may plan to use together."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A run's model, and the set-ups that its config describes. `cards`: of the GPUs in `placement` that are known."""

    shape: Shape
    prompts: Prompts
    trainer: TrainerSetUp
    replica: ReplicaSetUp
    kv_cache: int | None
    """Bytes of a replica's KV cache on each of its GPUs; None: vLLM decides."""
    placement: Placement
    cards: Mapping[str, Card]
    gpus: int
    """How many this machine has, and its torch can use."""
    ranks: int
    replicas: int
    share_of_card: float
    """What each replica wants of its GPUs (gpu_memory_utilization), whatever it needs."""
    trainer_host: Needs
    """Host memory of all ranks, if they are on one machine, and of what replicas there receive."""
    replica_host: Needs
    """Host memory of each replica."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that a replica's KV cache must hold: one request of max_model_len, or what kv_cache_bytes are for."""
        if self.kv_cache is None:
            return self.replica.max_model_len
        return round(self.kv_cache / memory.kv_bytes_per_token(self.shape.text, self.replica))

    @property
    def rank_needs(self) -> Needs:
        return memory.of_rank(self.shape, self.trainer, self.prompts)

    @property
    def replica_needs(self) -> Needs:
        """Memory of each of a replica's GPUs."""
        return memory.of_replica_gpu(self.shape, self.replica, self.kv_tokens)

    @property
    def by_gpu(self) -> dict[str, list[tuple[str, Needs]]]:
        """(who, its needs) for each GPU."""
        found: dict[str, list[tuple[str, Needs]]] = defaultdict(list)
        for rank in range(self.ranks if self.placement.trainer else 0):
            found[self.placement.trainer[rank % len(self.placement.trainer)]].append(("trainer", self.rank_needs))
        for gpus in self.placement.replicas:
            for gpu in gpus:
                found[gpu].append(("replica", self.replica_needs))
        return found


def fit(config: Config, job: Job) -> Fit | None:
    """None if the model's folder cannot be read (which `dart doctor` reports), or is of an unknown kind. The placement
    is empty without GPUs, or where there are too few for NCCL."""
    folder = config.model.folder
    try:
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shape = read_shape(document, stored_weights(folder))
        prompts = expected_prompts(config)
    except (OSError, ValueError, UnknownShape, UserError):
        return None
    gpus = [] if devices.on_cpu() else gpus_here()
    try:
        placement = place(config, job, gpus)
    except UserError:  # too few GPUs, which is told elsewhere; what is needed can be told all the same
        placement = Placement()
    trainer = trainer_set_up(config, gpus=bool(gpus))
    replica = replica_set_up(config, job, gpus=bool(gpus))
    return Fit(
        shape=shape,
        prompts=prompts,
        trainer=trainer,
        replica=replica,
        kv_cache=config.rollout.kv_cache_bytes,
        placement=placement,
        cards=cards_of(gpus),
        gpus=len(gpus),
        ranks=config.trainer.ranks if isinstance(job, Train) else 0,
        replicas=job.replicas(config),
        share_of_card=_share_of_card(config),
        trainer_host=_trainer_host(config, job, shape, trainer),
        replica_host=memory.of_replica_host(
            shape, replica, prompts, processed=config.rollout.processor_cache_bytes, kept=_kept(config)
        ),
    )


def _trainer_host(config: Config, job: Job, shape: Shape, set_up: TrainerSetUp) -> Needs:
    over_gloo = set_up.on_gpus and config.sync.transport == "gloo" and not config.trainer.serves_adapter
    replicas = job.replicas(config) if over_gloo and isinstance(job, Train) else 0
    return memory.of_trainer_host(
        shape,
        set_up,
        set_up.ranks,
        snapshots=1 if config.trainer.serves_adapter else 3,
        caches=config.trainer.image_cache_bytes + _encoded_caches(config),
        receiving=min(replicas, 2 * _at_once(config)) * config.rollout.gpus,
        senders=replicas,
    )


def _kept(config: Config) -> int:
    """Bytes of the screenshots that a replica keeps as they were sent."""
    width, height = config.environment.viewport
    return round(config.rollout.image_cache_entries * BYTES_PER_PIXEL * width * height)


def _encoded_caches(config: Config) -> int:
    """Bytes of a rank's caches of encoded screenshots: one for each model whose tower does not train."""
    policy = not config.trainer.vision_trains
    reference = config.trainer.loss.kl_coefficient > 0 and config.trainer.lora is None
    return (policy + reference) * config.trainer.encoded_cache_bytes


def _share_of_card(config: Config) -> float:
    chosen = config.rollout.engine_args.get("gpu_memory_utilization")
    return float(chosen) if isinstance(chosen, int | float) else SHARE_OF_CARD


def stored_weights(folder: Path) -> int | None:
    """Numbers in the folder's *.safetensors, from their headers alone; None without any, or if one cannot be read."""
    total = 0
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, MOST_HEADER)))
            total += sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return total if files else None


def expected_prompts(config: Config) -> Prompts:
    """The longest prompt of an episode that goes to its step limit. Raises UserError for an impossible viewport."""
    agent = config.agent
    return Prompts.expected(
        agent.history_screenshots + agent.goal_images,
        screenshot_tokens(agent, config.environment.viewport),
        min(agent.history_turns, config.curation.step_limit),
        config.rollout.max_model_len,
        agent.history_screenshots * len(agent.show) * agent.shown_characters // CHARACTERS_PER_TOKEN,
    )


def trainer_set_up(config: Config, *, gpus: bool) -> TrainerSetUp:
    trainer = config.effective_trainer
    return TrainerSetUp(
        ranks=trainer.ranks,
        sharded=trainer.sharded,
        mixed=config.model.dtype == "bfloat16",
        checkpointing=trainer.gradient_checkpointing,
        reference=trainer.loss.kl_coefficient > 0,
        vision_frozen=trainer.freeze_vision,
        microbatch_tokens=trainer.microbatch_tokens,
        runtime=memory.RUNTIME if gpus else memory.RUNTIME_CPU,
        lora_rank=trainer.lora.rank if trainer.lora else 0,
        lora_targets=trainer.lora.target_modules if trainer.lora else (),
        lora_tower=trainer.lora is not None and trainer.lora.tower,
        fused=trainer.fused_kernels and gpus,
        transfers=_at_once(config) if over_nccl(config, gpus=gpus) else 0,
        on_gpus=gpus,
    )


def _at_once(config: Config) -> int:
    """How many replicas get weights at once. As many more may get them whose last transfer has failed."""
    replicas = config.rollout.replicas
    return replicas if config.schedule.sync == "all" else min(replicas, config.sync.max_unavailable)


def over_nccl(config: Config, *, gpus: bool) -> bool:
    """Whether weights go to replicas over NCCL."""
    return config.sync.transport == "nccl" and gpus and config.samples


def replica_set_up(config: Config, job: Job, *, gpus: bool) -> ReplicaSetUp:
    rollout = config.rollout
    chosen = rollout.engine_args.get("max_num_batched_tokens")
    batched = chosen if isinstance(chosen, int) else BATCHED_TOKENS
    encoded = rollout.encoder_cache_tokens
    if encoded is None:
        prompts = memory.ENCODED_PROMPTS if gpus else 0
        encoded = prompts * expected_prompts(config).screenshots * expected_prompts(config).screenshot_tokens
    return ReplicaSetUp(
        size=memory.HALF if config.model.dtype == "bfloat16" else memory.SINGLE,
        quantised=rollout.quantization != "none",
        tensor_parallel=rollout.tensor_parallel,
        pipeline_parallel=rollout.pipeline_parallel,
        slots=rollout.slots,
        max_model_len=rollout.max_model_len,
        batched_tokens=min(rollout.max_model_len, batched),
        encoder_tokens=encoded,
        nccl=isinstance(job, Train) and over_nccl(config, gpus=gpus),
        runtime=memory.RUNTIME if gpus else memory.RUNTIME_CPU,
    )


def too_much(config: Config, job: Job) -> str | None:
    """What clearly does not fit, with what to change; None if everything may fit, or nothing is known."""
    found = fit(config, job)
    return None if found is None else "; ".join(_refusals(found)) or None


def _refusals(found: Fit) -> Iterator[str]:
    heads, ways = found.shape.text.heads, found.replica.tensor_parallel
    if found.replicas and not shares_heads(found.shape.text, ways):
        sizes = ", ".join(str(size) for size in range(1, 2 * ways) if shares_heads(found.shape.text, size))
        yield f"rollout.tensor_parallel: {ways} ways cannot share this model's {heads} attention heads: use {sizes}"
    request = found.replica.max_model_len * memory.kv_bytes_per_token(found.shape.text, found.replica)
    if found.replicas and found.kv_cache is not None and found.kv_cache < request:
        needed = f"one request of max_model_len needs {gigabytes(request)}"
        yield f"rollout.kv_cache_bytes: {needed}: raise it, or lower max_model_len"
    said = set()
    for gpu, members in found.by_gpu.items():
        card = found.cards.get(gpu)
        if card is None:
            continue
        for who, needs in members:
            if clearly_too_much(needs, card.bytes) and who not in said:
                said.add(who)
                yield f"{_named(found, who)} needs about {_told(needs)}, and GPU {gpu} ({card.name}) has " + (
                    f"{gigabytes(card.bytes)}: {_advice(found, who)}"
                )
        together = Needs({who: sum(n.total for w, n in members if w == who) for who, _ in members})
        if len(members) > 1 and clearly_too_much(together, card.bytes) and not said:
            said.add("together")
            yield (
                f"GPU {gpu} ({card.name}, {gigabytes(card.bytes)}) is shared by {len(members)} workers that need about "
                f"{_told(together)}: lower rollout.replicas or trainer.ranks, or use a machine with more GPUs"
            )
        if not said and (wrong := _wrong_share(found, members, card)):
            said.add("together")
            yield f"GPU {gpu} ({card.name}) {wrong}"


def _wrong_share(found: Fit, members: list[tuple[str, Needs]], card: Card) -> str | None:
    """Why vLLM's share of a GPU is too large or too small, and the bounds that there are for it."""
    replicas = sum(who == "replica" for who, _ in members)
    if not replicas:
        return None
    most = _most_of_shared(found, members, card, replicas) if len(members) > 1 else None
    own = Needs({name: size for name, size in found.replica_needs.parts.items() if name != "weight transfers"})
    least = math.ceil(100 * own.total / card.bytes) / 100 if found.kv_cache is None else None
    taken = f"vLLM takes {found.share_of_card:.0%} of it for each replica"
    if most is not None and found.share_of_card > most:
        told = f"is shared by {len(members)} workers, and {taken}"
        if least is not None and least * replicas > 1:
            return f"{told}, of which each needs {least:.0%}: lower rollout.replicas"
    elif least is not None and clearly_too_much(own, found.share_of_card * card.bytes):
        told = f"has {gigabytes(card.bytes)}, and {taken}, which needs about {_told(own)}"
        if least > 1:
            return f"{told}: {_advice(found, 'replica')}"
    else:
        return None
    bounds = [f"{bound:.2f} or {which}" for bound, which in ((least, "more"), (most, "less")) if bound is not None]
    return f"{told}: set rollout.engine_args.gpu_memory_utilization to {' and '.join(bounds)}"


def _most_of_shared(found: Fit, members: list[tuple[str, Needs]], card: Card, replicas: int) -> float:
    """The share of a GPU of several workers that each of its replicas may take, to two decimals.

    The estimates' own error and what the driver holds are left free, but a replica may always have what it needs.
    """
    others = sum(needs.total for who, needs in members if who == "trainer")
    room = (LEFT_TO_WORKERS * card.bytes - others) / card.bytes / replicas
    return max(math.floor(100 * room), math.ceil(100 * found.replica_needs.total / card.bytes)) / 100


def _named(found: Fit, who: str) -> str:
    return (
        "each trainer rank"
        if who == "trainer"
        else f"each GPU of a replica ({found.replica.tensor_parallel * found.replica.pipeline_parallel} each)"
    )


def _told(needs: Needs) -> str:
    return f"{gigabytes(needs.total)} ({needs.told()})"


def _advice(found: Fit, who: str) -> str:
    if who == "trainer":
        helps = trainer_remedies(found.shape, found.trainer, found.prompts)
    else:
        helps = replica_remedies(found.shape, found.replica, found.kv_tokens)
    return f"set {', or '.join(helps)}" if helps else "use a smaller model, or cards with more memory"


def notes(config: Config, job: Job) -> list[str]:
    """For a person: what each role needs and what there is. Empty if nothing is known of the model."""
    found = fit(config, job)
    return [] if found is None else list(_notes(config, found))


def _notes(config: Config, found: Fit) -> Iterator[str]:
    stored = "counted in its files" if found.shape.stored is not None else "by its config.json"
    yield f"model: {found.shape.weights:,} weights, {stored}"
    if found.ranks:
        each = f"each of {found.ranks} ranks" if found.ranks > 1 else "its one rank"
        yield f"trainer: {each} needs about {_told(found.rank_needs)}{_there(found, 'trainer')}"
        beside = ", with what the replicas receive" if found.trainer_host.parts["weight transfers"] else ""
        yield f"trainer's host memory{beside}: about {_told(found.trainer_host)}"
        yield _time(config, found)
    if found.replicas:
        reason = "the least" if found.kv_cache is None else "which kv_cache_bytes sets"
        yield (
            f"replicas: each GPU (or CPU) of {found.replicas} needs about {_told(found.replica_needs)}, with a KV "
            f"cache of {found.kv_tokens:,} tokens, {reason}{_there(found, 'replica')}"
        )
        slots = found.replica.slots
        per_token = memory.kv_bytes_per_token(found.shape.text, found.replica)
        full = slots * found.prompts.tokens * per_token
        yield (
            f"replicas: {slots} requests of {found.prompts.tokens:,} tokens, the longest expected, have a KV cache of "
            f"{gigabytes(full)} on each GPU"
        )
        host = found.replica_host
        yield (
            f"replicas' host memory: about {gigabytes(host.total)} each once their caches are full ({host.told()}), "
            f"{gigabytes(found.replicas * host.total)} for {found.replicas}"
        )


def _there(found: Fit, who: str) -> str:
    gpus = [gpu for gpu, members in found.by_gpu.items() if any(name == who for name, _ in members)]
    cards = sorted({f"{card.name} with {gigabytes(card.bytes)}" for gpu in gpus if (card := found.cards.get(gpu))})
    return f"; it gets {', '.join(cards)}" if cards else ""


def _time(config: Config, found: Fit) -> str:
    """The time of an update whose trajectories all go to the step limit with the longest prompt: an upper bound."""
    steps = config.trainer.trajectories_per_update * config.curation.step_limit
    tokens = found.prompts.tokens
    step = work.Load(
        tokens=tokens,
        pairs=work.causal_pairs(tokens),
        responses=memory.TURN_TEXT,
        screenshots=found.prompts.screenshots,
        patches=found.prompts.screenshot_tokens * found.shape.vision.merge**2,
    )
    operations = work.update(found.shape, step, config.effective_trainer.passes).total * steps
    told = f"an update: up to {operations:.1e} floating-point operations ({steps:,} steps of {tokens:,} tokens each)"
    if (peak := _peak(found)) is None:
        return told
    taken = work.seconds(operations, found.ranks, peak, UTILISATION)
    return f"{told}, {taken:,.0f} s at {UTILISATION:.0%} of the cards' peak"


def trainer_peak(config: Config, job: Job) -> float | None:
    """bfloat16 operations per second of one rank's card, by its data sheet; None if it is not known, or if ranks have
    different cards or share one."""
    found = fit(config, job) if isinstance(job, Train) and config.model.dtype == "bfloat16" else None
    return None if found is None or len(found.placement.trainer) < found.ranks else _peak(found)


def _peak(found: Fit) -> float | None:
    peaks = {work.peak_of(card.name) for gpu in found.placement.trainer if (card := found.cards.get(gpu))}
    return peaks.pop() if len(peaks) == 1 else None


def warnings(config: Config, job: Job) -> list[str]:
    """What may not fit."""
    if (found := fit(config, job)) is None:
        return []
    told = []
    for gpu, members in found.by_gpu.items():
        card, needs = found.cards.get(gpu), Needs({f"{who} {n}": needs.total for n, (who, needs) in enumerate(members)})
        if card is not None and tight(needs, card.bytes):
            told.append(f"memory: GPU {gpu} ({card.name}, {gigabytes(card.bytes)}) may be too small: {_told(needs)}")
    here = machine.memory_bytes()
    if found.gpus and (host := _host_needs(found)).total > here:
        helps = ["lower rollout.processor_cache_bytes"] if found.placement.replicas else []
        helps += ["lower trainer.encoded_cache_bytes", "train an adapter (trainer.lora)"] if found.ranks else []
        told.append(
            f"memory: the workers may need about {_told(host)} of this machine's own memory, which is "
            f"{gigabytes(here)}: {', '.join(helps)}, or spread them over machines"
        )
    if not found.gpus:
        # A replica's runtime is counted in both of its parts.
        replica = found.replica_host.total + config.rollout.gpus * (found.replica_needs.total - found.replica.runtime)
        every = Needs({"trainer": found.ranks * found.rank_needs.total, "replicas": found.replicas * replica})
        if every.total > here:
            told.append(
                f"memory: without GPUs, the workers need about {_told(every)}, and this machine has {gigabytes(here)}: "
                "lower rollout.replicas, rollout.processor_cache_bytes or trainer.microbatch_tokens, or use a smaller "
                "model"
            )
    return told


def _host_needs(found: Fit) -> Needs:
    """Host memory of the ranks and of those replicas that are placed on this machine."""
    ranks = found.trainer_host.parts if found.ranks else {}
    return Needs({**ranks, "replicas": len(found.placement.replicas) * found.replica_host.total})
