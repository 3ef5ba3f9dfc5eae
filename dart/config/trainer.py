"""The trainer: loss, advantages, optimiser, schedule, weight sync."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dart.config.base import Fraction, Positive, Seconds, Section
from dart.core.capacity.work import Passes

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
LOSS_KINDS = ("grpo", "cispo", "likelihood")


OWN_LOSS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Loss(Section):
    """Defaults are the paper's; docs/losses.md has the settings for GRPO, Dr.GRPO, DAPO, GSPO, CISPO and others."""

    kind: str = Field("grpo", description="`grpo`, `cispo`, `likelihood`, or `module:function` for your own.")
    ratio: Literal["token", "sequence"] = Field(
        "token",
        description="The ratio of the policy to the one before the update; `sequence` is GSPO's, over a step's "
        "response.",
    )
    clip_low: float = Field(
        0.2, gt=0.0, le=1.0, description="The ratio is clipped below at 1 minus this; 1: no lower bound."
    )
    clip_high: float = Field(0.28, gt=0.0, description="The ratio is clipped above at 1 plus this.")
    dual_clip: float | None = Field(
        None,
        ge=0.0,
        allow_inf_nan=False,
        description="c of dual clip, for `grpo`: where the advantage is negative, a token whose ratio is above this "
        "has no gradient. Not set: 3 if `minibatches` is above 1, as a batch is then used more than once; else off. "
        "0: off.",
    )
    aggregation: Literal["step_mean", "token_mean", "constant"] = Field(
        "step_mean",
        description="The mean over a step's tokens, then over steps; or over all tokens (DAPO); or a step's sum "
        "divided by constant_length, then mean over steps (Dr.GRPO).",
    )
    constant_length: Positive | None = Field(None, description="Number of tokens, for aggregation `constant`.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="Estimator of the KL to the initial policy. As a loss, k1 has gradient 0 on average."
    )
    kl_bound: float = Field(
        10.0,
        gt=0.0,
        description="The largest value of k3, beyond which it has no gradient. `log_ratio_bound` cuts its log-ratio.",
    )
    log_ratio_bound: float = Field(
        20.0,
        gt=0.0,
        le=40.0,
        description="Log-ratios of policies are cut to this and its negative, beyond which they have no gradient. "
        "Otherwise an infinite ratio times an advantage of 0 would make the whole gradient NaN.",
    )
    kl_coefficient: float = Field(0.1, ge=0.0, description="beta; 0: no reference model is loaded.")
    importance: Literal["truncated", "masked", "none"] = Field(
        "truncated",
        description="How to use the ratio of the policy before the update to the one sampled from: truncated at the "
        "cap, masked to 0 outside floor and cap (IcePop), or not used.",
    )
    importance_level: Literal["token", "sequence"] = Field(
        "token", description="Each token's ratio, or the product over a step's response."
    )
    importance_cap: float = Field(1.0, gt=0.0, description="C, the upper bound of the importance weight.")
    importance_floor: float = Field(0.5, ge=0.0, description="The lower bound, for importance `masked`.")
    entropy_coefficient: float = Field(0.0, ge=0.0, description="Coefficient of an entropy bonus.")
    entropy_quantile: float = Field(
        0.2,
        ge=0.0,
        lt=1.0,
        description="Steps with an entropy below this quantile of their group are not trained on; 0: all are, and with "
        "one minibatch a forward pass per update is saved.",
    )

    @field_validator("dual_clip")
    @classmethod
    def _above_one(cls, bound: float | None) -> float | None:
        if bound and bound <= 1:
            raise ValueError("dual_clip must be above 1, or no token would have a gradient: set 3, or 0 for none")
        return bound

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in LOSS_KINDS and not OWN_LOSS.fullmatch(kind):
            raise ValueError(f"use {', '.join(LOSS_KINDS)}, or module:function for a loss of your own")
        return kind

    @model_validator(mode="after")
    def _whole(self) -> Loss:
        if self.aggregation == "constant" and self.constant_length is None:
            raise ValueError(
                "aggregation constant needs constant_length, a number of tokens: "
                "set it, for example to rollout.max_tokens"
            )
        if self.dual_clip and self.kind != "grpo":
            raise ValueError(f"dual_clip bounds the objective grpo alone: leave it out with kind {self.kind}")
        if self.importance == "masked" and not self.importance_floor < 1 < self.importance_cap:
            raise ValueError(
                f"importance masked keeps ratios from importance_floor {self.importance_floor} to importance_cap "
                f"{self.importance_cap}, and they lie around 1: "
                "set a floor below 1 and a cap above, for example 0.5 and 5"
            )
        return self


class Advantage(Section):
    kind: Literal["group", "gigpo"] = Field(
        "group",
        description="`group`: every step has its trajectory's advantage, as in the paper; `gigpo` adds to it the "
        "step's advantage over the steps of the group that acted on the same screenshot.",
    )
    gamma: float = Field(
        0.95,
        gt=0.0,
        le=1.0,
        description="For `gigpo`: the reward is discounted by this for every step before the last.",
    )
    step_weight: float = Field(
        1.0, gt=0.0, description="For `gigpo`: omega, the weight of the step's own advantage beside the trajectory's."
    )
    level: Literal["trajectory", "step"] = Field(
        "step",
        description="What counts once in the mean and std: each step of a group, as in the paper, or each trajectory.",
    )
    std_normalise: bool = Field(True, description="Divide by the std; false is Dr.GRPO.")
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="DAPO's soft overlong punishment: a trajectory's reward falls over this many last tokens before "
        "its longest response reaches rollout.max_tokens; 0: no punishment.",
    )
    overlong_penalty: float = Field(1.0, gt=0.0, description="How much the reward has fallen at rollout.max_tokens.")


LANGUAGE_MODEL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of each decoder layer of Qwen's models: attention and MLP."""


class Lora(Section):
    """An adapter that trains in the place of the weights: s · B · A beside each of the layers, s = alpha / rank.

    The reference policy is the model without its adapter, so the adapter belongs to the weights of `model.path`.
    """

    rank: Positive = Field(16, description="The width of the adapter: A is rank × inputs, B is outputs × rank.")
    alpha: Positive = Field(32, description="What A and B add to a layer is multiplied by alpha / rank.")
    dropout: float = Field(
        0.0,
        ge=0.0,
        description="Only 0. Above it, the trainer's log-probabilities would not be those of the policy that replicas "
        "serve, and every importance weight and ratio would be off by the dropout's noise.",
    )
    sync: Literal["merged", "adapter"] = Field(
        "merged",
        description="What replicas get. merged: whole weights, into which A and B are merged and rounded to "
        "model.dtype. adapter: A and B alone, over gloo, which vLLM computes beside the weights of model.path: less to "
        "send, more to compute.",
    )
    target_modules: tuple[str, ...] = Field(
        LANGUAGE_MODEL,
        min_length=1,
        description="The last part of the names of the language model's linear layers that get an adapter.",
    )
    tower: bool = Field(
        False,
        description="true: all linear layers of the vision tower get an adapter, too, so screenshots are encoded again "
        "by every pass. Only with `sync: merged`.",
    )

    @field_validator("dropout")
    @classmethod
    def _none(cls, dropout: float) -> float:
        if dropout > 0:
            raise ValueError(
                "dropout would make the trainer's log-probabilities differ from those of the replicas: leave it out"
            )
        return dropout

    @model_validator(mode="after")
    def _sent(self) -> Lora:
        if self.tower and self.sync == "adapter":
            raise ValueError(
                "tower: true with sync: adapter: replicas can apply an adapter only to the language model: use sync: "
                "merged, or leave tower out"
            )
        return self

    @field_validator("target_modules")
    @classmethod
    def _names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := next((name for name in names if not name.isidentifier()), None):
            raise ValueError(f"{wrong!r} is not the last part of a layer's name: write one such as q_proj")
        return names


class Trainer(Section):
    ranks: Positive = Field(1, description="Trainer processes, with one GPU each where there are GPUs.")
    learning_rate: float = Field(1e-6, gt=0.0, description="Of AdamW.")
    warmup_updates: int = Field(
        0,
        ge=0,
        description="The learning rate rises over so many updates, because Adam's first steps move every weight.",
    )
    final_learning_rate_fraction: Fraction = Field(
        1.0,
        description="Linear decay of the learning rate to this share at the last of stop.updates; without, no decay.",
    )
    weight_decay: float = Field(0.1, ge=0.0, description="Of AdamW.")
    gradient_clip: float = Field(2.0, gt=0.0, description="The largest gradient norm, over all weights.")
    adam_betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Of AdamW.")
    adam_epsilon: float = Field(
        1e-8, gt=0.0, description="A larger value moves weights with tiny gradients, such as unused tokens' rows, less."
    )
    trajectories_per_update: Positive = Field(64, description="The fewest released trajectories that make a batch.")
    minibatches: Positive = Field(
        1, description="Optimiser steps per batch; fewer where it makes fewer rows of steps that share a prefix."
    )
    microbatch_tokens: Positive = Field(16384, description="The most tokens per forward pass, padding included.")
    sharding: Literal["none", "full"] | None = Field(
        None,
        description="`none`: every rank holds all weights, gradients and optimiser state; `full`: each holds a part "
        "(FSDP2). Not set: `none` with one rank, `full` with several.",
    )
    gradient_checkpointing: bool = Field(False, description="Saves memory at the cost of a second forward pass.")
    fused_kernels: bool = Field(
        True,
        description="On a GPU, norms, rotary embeddings and gated MLPs are compiled by torch.compile, which needs a C "
        "compiler on the trainer's machine.",
    )
    freeze_vision: bool = Field(
        False,
        description="The vision tower does not train. Each rank then encodes a screenshot once, without gradient, and "
        "keeps it for later passes and updates.",
    )
    lora: Lora | None = Field(
        None,
        description="Set: a LoRA adapter trains, and all other weights stay as they are: no gradients and no optimiser "
        "state for them, and no second model as the reference. `{}`: with its defaults. It needs a higher learning "
        "rate than full training, such as 1e-4.",
    )
    encoded_cache_bytes: int = Field(
        4 << 30,
        ge=0,
        description="Host memory of each rank for screenshots as a vision tower that does not train has encoded them, "
        "so that each is encoded once: the policy's with `freeze_vision`, or `lora` without `tower`, and as much again "
        "for the reference's, if that is a second model. One of 1920 × 1080 takes 19 MB with Qwen2.5-VL-7B in "
        "bfloat16.",
    )
    image_threads: int = Field(
        2, ge=0, description="Threads of each rank that prepare screenshots while it trains; 0: its main thread does."
    )
    image_cache_bytes: int = Field(
        512 << 20,
        ge=0,
        description="Memory of each rank for prepared screenshots. One of 1920 × 1080 takes 6.3 MB.",
    )
    threads: Positive | None = Field(None, description="CPU threads of torch per rank; none: torch decides.")
    loss: Loss = Field(default_factory=Loss)
    advantage: Advantage = Field(default_factory=Advantage)

    @model_validator(mode="after")
    def _tower_trains(self) -> Trainer:
        if self.freeze_vision and self.lora is not None and self.lora.tower:
            raise ValueError("freeze_vision: true and lora.tower: true: the tower can do but one: leave the other out")
        return self

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the weights; by default if there are several ranks."""
        return self.sharding == "full" or (self.sharding is None and self.ranks > 1)

    @property
    def vision_trains(self) -> bool:
        """Whether the vision tower changes; without `tower`, an adapter is in the language model alone."""
        return not self.freeze_vision and (self.lora is None or self.lora.tower)

    @property
    def passes(self) -> Passes:
        """What an update does with its batch."""
        return Passes(
            score=self.loss.entropy_quantile > 0 or self.minibatches > 1,
            reference=self.loss.kl_coefficient > 0,
            trained_share=1 - self.loss.entropy_quantile,
            recompute=self.gradient_checkpointing,
            vision_trains=self.vision_trains,
            weights_train=self.lora is None,
        )

    @property
    def serves_adapter(self) -> bool:
        """Whether replicas get an adapter in the place of whole weights."""
        return self.lora is not None and self.lora.sync == "adapter"


class Schedule(Section):
    """What waits for what (docs/efficiency.md). The defaults are the paper's; the other values are baselines."""

    sampling: Literal["rollout", "task", "batch"] = Field(
        "rollout",
        description="rollout: a free environment takes the next roll-out at once; task: it waits until all N roll-outs "
        "of its set's task have finished; batch: until the whole batch has.",
    )
    training: Literal["asynchronous", "synchronous"] = Field(
        "asynchronous", description="Sampling and updates run concurrently, or alternate."
    )
    sync: Literal["rolling", "all"] = Field(
        "rolling", description="Replicas get new weights one after another, or all at once while none serves."
    )


class Supervised(Section):
    sources: tuple[Path, ...] = Field(
        (), description="Folders that `dart collect` made: the demonstrations to imitate."
    )


class Sync(Section):
    transport: Literal["gloo", "nccl"] = Field(
        "nccl",
        description="nccl: if trainer and replicas have GPUs of their own; gloo: in all other cases, and on CPUs.",
    )
    every_updates: Positive = Field(
        1,
        description="Replicas get new weights after every so many updates; more than 1 makes samples older. A replica "
        "that is behind that, for example after a restart, gets the newest weights that there are.",
    )
    max_unavailable: Positive = Field(
        1,
        description="The most replicas that may be updated at the same time; as many more are tried again whose last "
        "transfer broke.",
    )
    mode: Literal["keep", "drain", "abort"] = Field(
        "drain",
        description="Requests in flight when a replica loads weights. drain: it waits for their end; keep: they are "
        "paused, and go on with the new weights; abort: they end, and are made again.",
    )
    timeout_seconds: Seconds = Field(
        120.0,
        description="A transfer that takes longer is aborted and tried again; a replica whose engine is still stuck in "
        "it ten seconds later ends, and is started again.",
    )
