"""What a worker receives when it joins: everything that it needs beyond an address, a role and a token."""

from __future__ import annotations

from collections.abc import Mapping

from dart.agent.parsing import screenshot_tokens
from dart.config import (
    ADAPTER_FOLDER,
    Config,
    Environment,
    EnvWorkerConfig,
    RolloutWorkerConfig,
    Section,
    ServedAdapter,
    SharedBlobs,
    TaskSet,
    TrainWorkerConfig,
)
from dart.coordinator.fleet.sessions import Rejected
from dart.coordinator.sampling.collecting import CAPABILITIES
from dart.coordinator.start import Start
from dart.job import Collect, Job, Train
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import PACKED_TOKEN_IDS, RESCORE, SCREENSHOT_TOKENS, SERVES_ADAPTER, SHARED_BLOBS, has
from dart.wire.role import ROLE_NAMES

NEWER: Mapping[str, set[str]] = {
    "rollout": {"encoder_cache_tokens", "engine_args", "pipeline_parallel", "quantization", "wait_for_all_seconds"},
    "trainer": {
        "sharding",
        "freeze_vision",
        "lora",
        "encoded_cache_bytes",
        "image_threads",
        "image_cache_bytes",
        "fused_kernels",
    },
}
"""Fields, by section, that some workers do not know; a run that sets one needs workers that do."""


def welcome(config: Config, start: Start, hello: pb.Hello, job: Job, shared: SharedBlobs | None = None) -> str:
    """The role's section of the run's config, as JSON. Raises Rejected for a worker that this run cannot use."""
    if not has(hello, SHARED_BLOBS) or isinstance(job, Collect):
        shared = None  # `dart collect` keeps only the screenshots of successes
    model = config.model
    if start.checkpoint:
        model = model.model_copy(update={"path": str(start.checkpoint.resolve())})
    wanted = CAPABILITIES[job.teacher].get(ROLE_NAMES[hello.role]) if isinstance(job, Collect) else None
    if wanted and not has(hello, wanted):
        raise Rejected(f"this run needs the capability {wanted}", "update dart on the worker's machine")
    if hello.role == pb.ROLE_ENV:
        return _json(EnvWorkerConfig(environment=_hosted(config.environment), shared_blobs=shared))
    if hello.role == pb.ROLE_ROLLOUT:
        adapter = _adapter(config, start) if isinstance(job, Train) else None
        if adapter and not has(hello, SERVES_ADAPTER):
            raise Rejected(
                f"this run needs the capability {SERVES_ADAPTER}",
                "update dart on the worker's machine, or set trainer.lora.sync: merged",
            )
        told = RolloutWorkerConfig(
            # An adapter belongs to the weights that the run began with, and a checkpoint's have one merged into them.
            model=config.model if adapter else model,
            rollout=config.rollout,
            sync=config.sync,
            max_images=config.agent.history_screenshots + config.agent.goal_images,
            screenshot_tokens=screenshot_tokens(config.agent, config.environment.viewport)
            if has(hello, SCREENSHOT_TOKENS)
            else 0,
            packed_token_ids=has(hello, PACKED_TOKEN_IDS),
            seed=config.run.seed,
            weight_version=start.version,
            adapter=adapter,
            shared_blobs=shared,
        )
        return _json(told)
    rescores = config.algorithm == "sft" or config.curation.pool.enabled
    if isinstance(job, Train) and rescores and not has(hello, RESCORE):
        raise Rejected("this run needs the capability rescore", "update dart on the trainer's machine")
    if not isinstance(job, Train):
        raise Rejected("this run does not train", "start it with `dart train` to use a trainer")
    if hello.world_size != config.trainer.ranks or hello.rank >= config.trainer.ranks:
        raise Rejected(
            f"rank {hello.rank} of {hello.world_size} does not fit trainer.ranks {config.trainer.ranks}",
            f"launch {config.trainer.ranks} ranks, or set trainer.ranks: {hello.world_size}",
        )
    trainer = TrainWorkerConfig(
        model=config.model,
        trainer=config.effective_trainer,
        sync=config.sync,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        total_updates=config.stop.updates,
        resume_from=start.checkpoint.resolve() if start.checkpoint else None,
        shared_blobs=shared,
    )
    return _json(trainer)


def _hosted(environment: Environment) -> Environment:
    """What an env worker has to know: all names, whatever they are for."""
    tasks = environment.tasks
    names = TaskSet(names=tasks.all, train_seeds=tasks.train_seeds, eval_seeds=tasks.eval_seeds)
    return environment.model_copy(update={"tasks": names})


def _adapter(config: Config, start: Start) -> ServedAdapter | None:
    """What a replica of a training run begins to serve; None if that is whole weights."""
    lora = config.trainer.lora
    if lora is None or not config.trainer.serves_adapter:
        return None
    folder = start.checkpoint.resolve() / ADAPTER_FOLDER if start.checkpoint else None
    return ServedAdapter(rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules, folder=folder)


def _json(told: EnvWorkerConfig | RolloutWorkerConfig | TrainWorkerConfig) -> str:
    """An older worker refuses fields that it does not know."""
    unknown: dict[str, bool | Mapping[str, bool | set[str]]] = {} if told.shared_blobs else {"shared_blobs": True}
    if isinstance(told, RolloutWorkerConfig):
        unknown["rollout"] = _not_set(told.rollout, NEWER["rollout"])
        unknown |= {} if told.screenshot_tokens else {"screenshot_tokens": True}
        unknown |= {} if told.packed_token_ids else {"packed_token_ids": True}
        unknown |= {} if told.adapter else {"adapter": True}
    if isinstance(told, TrainWorkerConfig):
        unknown["trainer"] = _not_set(told.trainer, NEWER["trainer"])
    if isinstance(told, EnvWorkerConfig):
        tasks = TaskSet.model_fields.keys() - {"names", "train_seeds", "eval_seeds"}
        unknown["environment"] = {"tasks": tasks} | ({} if told.environment.timeouts.chosen else {"timeouts": True})
    return told.model_dump_json(exclude=unknown)


def _not_set(section: Section, fields: set[str]) -> dict[str, bool]:
    """Those of the fields that have their default."""
    chosen = section.model_dump(include=fields, exclude_defaults=True).keys()
    return dict.fromkeys(fields - chosen, True)
