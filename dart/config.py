"""The run's configuration: one YAML file, one pydantic model, no torch.

Every number that the algorithm uses is a field with a default here, never a literal in code. Defaults are the
paper's (arXiv 2509.23866) where it gives one. `load` turns anything wrong into one `ConfigError` that names the
field, the value and the remedy.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dart.errors import UserError

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]

BUILTIN_SUITE = "miniwob"
BUILTIN_MODELS = Path(__file__).parent / "assets"


class ConfigError(UserError):
    """The configuration is wrong; the message names field, value and remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Run(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="The run directory's prefix.")
    directory: Path = Field(Path("runs"), description="Where run directories are made.")
    seed: int = Field(0, description="Of the order of tasks and of the trainer's shuffles.")


class Model(Section):
    path: str = Field(
        description="A Hugging Face folder, at the same place on every machine with a model, or builtin:NAME for one "
        "that ships with dart."
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Of the replicas and the trainer.")

    @property
    def folder(self) -> Path:
        if self.path.startswith("builtin:"):
            return BUILTIN_MODELS / self.path.removeprefix("builtin:")
        return Path(self.path)


class Agent(Section):
    grammar: Literal["ui_tars", "qwen3_vl"] = Field("ui_tars", description="How the policy writes its actions.")
    coordinates: Literal["pixels", "thousand"] = Field(
        "pixels", description="UI-TARS 1.5 writes pixels of the resized screenshot, UI-TARS 1.0 a 0-1000 grid."
    )
    prompt: Literal["ui_tars", "qwen3_vl", "minimal"] = Field(
        "ui_tars", description="The prompt template; `minimal` has no system text, for models made for one task."
    )
    history_screenshots: Positive = Field(5, description="Screenshots in the prompt, this step's included.")
    history_turns: Positive = Field(35, description="Earlier turns whose texts are in the prompt.")
    resize_multiple: Positive = Field(
        28,
        description="What the model's preprocessor_config.json does, so that coordinates mean the same: it resizes "
        "screenshots to multiples of this (pixels).",
    )
    max_pixels: Positive = Field(16384 * 28 * 28, description="Likewise: to at most this many pixels.")
    min_pixels: Positive = Field(100 * 28 * 28, description="Likewise: to at least this many pixels.")


class TaskSet(Section):
    names: tuple[str, ...] = Field(
        min_length=1, description="For miniwob as miniwob.farama.org has them; `dart doctor CONFIG` checks them."
    )
    train_seeds: tuple[int, int] = Field((0, 1_000_000), description="[first, last) of the seeds trained on.")
    eval_seeds: tuple[int, int] = Field((1_000_000, 1_010_000), description="[first, last) of the held-out seeds.")

    @model_validator(mode="after")
    def _seeds(self) -> TaskSet:
        for name, (first, last) in (("train_seeds", self.train_seeds), ("eval_seeds", self.eval_seeds)):
            if not 0 <= first < last:
                raise ValueError(
                    f"{name} [{first}, {last}) is empty or negative: write [first, last) with first < last"
                )
        if self.train_seeds[0] < self.eval_seeds[1] and self.eval_seeds[0] < self.train_seeds[1]:
            raise ValueError("train_seeds and eval_seeds overlap, so nothing would be held out: make them disjoint")
        return self


class Delay(Section):
    """Waiting that makes a fast environment as slow as a desktop; for benchmarks. Uniform in [least, most] seconds."""

    reset_seconds: tuple[float, float] = Field((0.0, 0.0), description="After each reset.")
    step_seconds: tuple[float, float] = Field((0.0, 0.0), description="After each action.")

    @model_validator(mode="after")
    def _ordered(self) -> Delay:
        for name, (least, most) in (("reset_seconds", self.reset_seconds), ("step_seconds", self.step_seconds)):
            if not 0 <= least <= most < float("inf"):
                raise ValueError(f"{name} [{least:g}, {most:g}] is no span of time: write [least, most], as in [2, 10]")
        return self


class Environment(Section):
    kind: str = Field(
        BUILTIN_SUITE,
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
        description="The suite. dart's env workers run miniwob; for another, start `dart coordinator` and env workers "
        "of your own (docs/extending.md).",
    )
    tasks: TaskSet
    workers: Positive = Field(1, description="Env worker processes that `dart train` starts.")
    slots: Positive = Field(16, description="Environments per worker.")
    viewport: tuple[Positive, Positive] = Field((160, 210), description="Width and height in pixels.")
    step_timeout_seconds: Seconds = Field(10.0, description="A page that takes longer is replaced.")
    settle_seconds: float = Field(0.0, ge=0.0, description="Waited after each action before the screenshot.")
    max_wait_seconds: float = Field(2.0, ge=0.0, description="The longest `wait` action that is carried out.")
    delay: Delay = Field(default_factory=Delay)
    browser: str | None = Field(None, description="Chromium's executable; none: searched for on the PATH.")


class Rollout(Section):
    replicas: Positive = Field(1, description="vLLM engines; each is a roll-out worker.")
    temperature: float = Field(
        1.0, gt=0.0, description="Of sampling, and of the log-probabilities that are trained on."
    )
    max_tokens: Positive = Field(512, description="Sampled tokens per step.")
    slots: Positive = Field(32, description="Requests that one replica holds at once.")
    max_model_len: Positive = Field(32768, description="Tokens of prompt and answer together.")
    tensor_parallel: Positive = Field(1, description="GPUs of one replica.")
    kv_cache_bytes: int | None = Field(None, description="Size of the KV cache; none: vLLM decides.")
    enforce_eager: bool = Field(False, description="vLLM without CUDA graphs.")
    image_cache_entries: Positive = Field(4096, description="Screenshots a replica keeps by digest.")
    environment: dict[str, str] = Field(default_factory=dict, description="Extra environment variables.")
    startup_timeout_seconds: Seconds = Field(
        600.0, description="A replica whose engine is not ready by then ends, and is started again."
    )


class DynamicRollouts(Section):
    enabled: bool = True
    minimum: int = Field(2, ge=2, description="N of a task that always succeeds.")
    threshold: Fraction = Field(0.6, description="Up to this success rate N is curation.rollouts; above, it falls.")
    window: Positive = Field(16, description="Roll-outs of the task that its success rate is taken over.")


class DynamicLength(Section):
    enabled: bool = True
    margin: int = Field(2, ge=0, description="Steps allowed beyond the longest success.")
    floor: Positive = Field(5, description="The limit never falls below this.")
    window: Positive | None = Field(None, description="Successes that count; none: all of them.")


class Pool(Section):
    enabled: bool = True
    per_task: Positive = Field(8, description="Successes kept per task name, the newest.")
    max_age: Positive | None = Field(None, description="Updates after which a success leaves the pool; none: never.")
    sources: tuple[Path, ...] = Field((), description="Folders that `dart collect` made; read when the run starts.")


class Curation(Section):
    rollouts: int = Field(8, ge=2, description="N: trajectories per group, at most. One alone has no advantage.")
    step_limit: Positive = Field(30, description="The cap on a trajectory's steps.")
    dynamic_rollouts: DynamicRollouts = Field(default_factory=DynamicRollouts)
    dynamic_length: DynamicLength = Field(default_factory=DynamicLength)
    pool: Pool = Field(default_factory=Pool)
    task_preference: Fraction = Field(
        0.75, description="0: all tasks equally often; 1: only those whose roll-outs differ from each other."
    )
    success_threshold: Fraction = Field(1.0, description="A reward of at least this is a success.")
    max_staleness: int = Field(
        4, ge=0, description="Trainer version minus a sample's oldest token's; older is dropped."
    )


LOSS_KINDS = ("grpo", "cispo", "likelihood")
OWN_LOSS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Loss(Section):
    """Defaults are the paper's; docs/losses.md says what gives GSPO, CISPO, DAPO, Dr.GRPO and IcePop."""

    kind: str = Field("grpo", description="`grpo`, `cispo`, `likelihood`, or `module:function` for your own.")
    ratio: Literal["token", "sequence"] = Field(
        "token", description="Of the policy to the one before the update; `sequence` is GSPO's, over a step's response."
    )
    clip_low: float = Field(0.2, gt=0.0, le=1.0, description="The ratio is clipped at 1 minus this; 1: not from below.")
    clip_high: float = Field(0.28, gt=0.0, description="And at 1 plus this.")
    aggregation: Literal["step_mean", "token_mean", "constant"] = Field(
        "step_mean",
        description="Mean over a step's tokens, then over steps; or over all tokens (DAPO); or a step's sum divided by "
        "constant_length, then mean over steps (Dr.GRPO).",
    )
    constant_length: Positive | None = Field(None, description="Tokens; for aggregation `constant`.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="Of the KL to the initial policy. As a loss, k1 has gradient 0 on average."
    )
    kl_coefficient: float = Field(0.1, ge=0.0, description="beta; 0: no reference model is loaded.")
    importance: Literal["truncated", "masked", "none"] = Field(
        "truncated",
        description="What becomes of the ratio of the policy before the update to the one sampled from: cut at the "
        "cap, 0 outside floor and cap (IcePop), or not used.",
    )
    importance_level: Literal["token", "sequence"] = Field(
        "token", description="The ratio of each token, or the product over a step's response."
    )
    importance_cap: float = Field(1.0, gt=0.0, description="C of the importance weight.")
    importance_floor: float = Field(0.5, ge=0.0, description="For importance `masked`.")
    entropy_coefficient: float = Field(0.0, ge=0.0, description="Of an entropy bonus.")
    entropy_quantile: float = Field(
        0.2,
        ge=0.0,
        lt=1.0,
        description="Steps whose entropy is below this quantile of their group's do not train; 0: all do, and a "
        "forward pass per update is saved.",
    )

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
        if self.importance == "masked" and not self.importance_floor < 1 < self.importance_cap:
            raise ValueError(
                f"importance masked keeps ratios from importance_floor {self.importance_floor} to importance_cap "
                f"{self.importance_cap}, and they lie around 1: "
                "set a floor below 1 and a cap above, for example 0.5 and 5"
            )
        return self


class Advantage(Section):
    level: Literal["trajectory", "step"] = Field("trajectory", description="What counts once in mean and std.")
    std_normalise: bool = Field(True, description="false is Dr.GRPO.")
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="DAPO's soft overlong punishment: a trajectory's reward falls over the last so many tokens before "
        "its longest response reaches rollout.max_tokens; 0: it does not.",
    )
    overlong_penalty: float = Field(1.0, gt=0.0, description="By how much it has fallen at rollout.max_tokens.")


class Trainer(Section):
    ranks: Positive = Field(1, description="Processes of the trainer.")
    learning_rate: float = Field(1e-6, gt=0.0, description="Of AdamW.")
    final_learning_rate_fraction: Fraction = Field(1.0, description="Linear decay to this share at the last update.")
    weight_decay: float = Field(0.1, ge=0.0, description="Of AdamW.")
    gradient_clip: float = Field(2.0, gt=0.0, description="Longest gradient (its norm over all weights).")
    adam_betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="Of AdamW.")
    adam_epsilon: float = Field(
        1e-8, gt=0.0, description="Larger: weights with tiny gradients, such as unused tokens' rows, move less."
    )
    trajectories_per_update: Positive = Field(64, description="Released trajectories that make a batch, at least.")
    minibatches: Positive = Field(1, description="Optimiser steps per batch.")
    microbatch_tokens: Positive = Field(16384, description="Padded tokens per forward pass.")
    gradient_checkpointing: bool = Field(False, description="Less memory, a second forward pass.")
    threads: Positive | None = Field(None, description="torch CPU threads per rank; none: torch decides.")
    loss: Loss = Field(default_factory=Loss)
    advantage: Advantage = Field(default_factory=Advantage)


class Schedule(Section):
    """What waits for what. The defaults are the paper's; the others are what it is compared with."""

    sampling: Literal["rollout", "task", "batch"] = Field(
        "rollout",
        description="A free environment takes the next roll-out at once; or waits until all N roll-outs of its set's "
        "task have finished; or until the whole batch has.",
    )
    training: Literal["asynchronous", "synchronous"] = Field(
        "asynchronous", description="Sampling and updates go on side by side, or take turns."
    )
    sync: Literal["rolling", "all"] = Field(
        "rolling", description="Replicas get new weights one after the other, or all at once while none serves."
    )


class Supervised(Section):
    sources: tuple[Path, ...] = Field((), description="Folders that `dart collect` made: what is imitated.")


class Sync(Section):
    transport: Literal["gloo", "nccl"] = Field(
        "nccl", description="nccl: trainer and replicas have GPUs of their own; gloo: everything else, a CPU included."
    )
    max_unavailable: Positive = Field(1, description="Replicas that may be updated at the same time.")
    mode: Literal["keep", "drain", "abort"] = Field("drain", description="What becomes of requests in flight.")
    timeout_seconds: Seconds = Field(120.0, description="A transfer that takes longer is broken off and tried again.")


class Stop(Section):
    updates: Positive | None = Field(None, description="Updates of the trainer.")
    train_seconds: Seconds | None = Field(None, description="Of training; evaluations do not count.")
    env_steps: Positive | None = Field(None, description="Actions that environments took in training.")
    success_rate: Fraction | None = Field(None, description="Of the last `window` training trajectories.")
    window: Positive = Field(512, description="Trajectories.")

    @model_validator(mode="after")
    def _some(self) -> Stop:
        if all(end is None for end in (self.updates, self.train_seconds, self.env_steps, self.success_rate)):
            raise ValueError(
                "nothing ends the run: set at least one of updates, train_seconds, env_steps, success_rate"
            )
        return self


class Evaluation(Section):
    episodes: int = Field(200, ge=0, description="Held-out episodes before and after training; 0 for none.")
    before: bool = Field(True, description="false: only after training, for runs that begin with the same weights.")
    samples: Positive = Field(
        1, description="Episodes per instance (task and seed) in `dart eval`; before and after training it is one."
    )
    temperature: float | None = Field(None, ge=0.0, description="none: as in training; 0: greedy.")


class Checkpoint(Section):
    every_updates: Positive = Field(
        50, description="One more is made at the end, and at Ctrl-C if it takes less than 3 s."
    )
    keep: Positive = Field(2, description="The newest so many; older ones are deleted.")


class Server(Section):
    host: str = Field("127.0.0.1", description="Any other needs `tokens` and TLS (docs/machines.md).")
    port: int = Field(0, ge=0, le=65535, description="0: any free port.")
    heartbeat_seconds: Seconds = Field(
        2.0, description="Rarer where there are more than 500 workers, up to a third of `lost_after_seconds`."
    )
    lost_after_seconds: Seconds = Field(15.0, description="A worker that is silent for so long is given up.")
    reply_timeout_seconds: Seconds = Field(
        600.0,
        description="A command to an environment or a replica without an answer by then has failed; a worker that owes "
        "half of its answers is begun anew.",
    )
    share_screenshots: bool = Field(
        True,
        description="Workers that see the run's blob directory write and read screenshots there themselves; those that "
        "do not, or all with false, have them from the coordinator.",
    )
    tls_certificate: Path | None = Field(
        None, description="PEM. `dart train`'s own workers trust exactly this file: let it be self-signed there."
    )
    tls_key: Path | None = Field(None, description="PEM, of tls_certificate.")
    tls_client_ca: Path | None = Field(
        None,
        description="Set: workers must show a certificate of this authority; for `dart coordinator`, whose workers are "
        "started by hand.",
    )
    tokens: dict[Literal["env", "rollout", "train", "control"], str] = Field(
        default_factory=dict, description="A bearer token per role, as env:NAME or file:PATH; never the token itself."
    )

    @model_validator(mode="after")
    def _safe(self) -> Server:
        if self.host not in ("127.0.0.1", "localhost", "::1") and not (self.tokens and self.tls_certificate):
            raise ValueError(
                f"host {self.host} is open to the network: "
                "set server.tokens and server.tls_certificate, or use 127.0.0.1"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: set both or neither")
        for role, source in self.tokens.items():
            if not source.startswith(("env:", "file:")):
                raise ValueError(f"tokens.{role} must be env:NAME or file:PATH, so that no secret is in a config")
        return self


class Config(Section):
    """A run, whole."""

    algorithm: Literal["grpo", "sft"] = Field(
        "grpo", description="`sft` imitates demonstrations: no sampling, and trainer.loss is the likelihood alone."
    )
    run: Run = Field(default_factory=Run)
    model: Model
    agent: Agent = Field(default_factory=Agent)
    environment: Environment
    rollout: Rollout = Field(default_factory=Rollout)
    curation: Curation = Field(default_factory=Curation)
    trainer: Trainer = Field(default_factory=Trainer)
    schedule: Schedule = Field(default_factory=Schedule)
    sync: Sync = Field(default_factory=Sync)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    sft: Supervised = Field(default_factory=Supervised)
    stop: Stop
    server: Server = Field(default_factory=Server)

    @property
    def samples(self) -> bool:
        """The run needs environments and replicas."""
        return self.algorithm != "sft" or self.evaluation.episodes > 0

    @model_validator(mode="after")
    def _together(self) -> Config:
        if self.algorithm == "sft" and not self.sft.sources:
            raise ValueError("algorithm sft needs sft.sources: name folders that `dart collect` made")
        if self.algorithm != "sft" and self.sft.sources:
            raise ValueError(
                "sft.sources is set but algorithm is grpo: set algorithm: sft, or name the folders in "
                "curation.pool.sources"
            )
        if self.algorithm == "sft" and self.stop.updates is None and self.stop.train_seconds is None:
            raise ValueError("algorithm sft has no success rate to stop at: set stop.updates or stop.train_seconds")
        if self.algorithm == "sft" and self.schedule.training == "synchronous":
            raise ValueError(
                "schedule.training is synchronous but algorithm sft samples nothing that updates could wait for: "
                "leave it out"
            )
        if self.curation.dynamic_rollouts.enabled and self.curation.dynamic_rollouts.minimum > self.curation.rollouts:
            raise ValueError(
                f"curation.dynamic_rollouts.minimum is {self.curation.dynamic_rollouts.minimum}, more than "
                f"curation.rollouts ({self.curation.rollouts}): lower it, or set dynamic_rollouts.enabled: false"
            )
        if self.curation.dynamic_rollouts.enabled and self.curation.dynamic_rollouts.window < self.curation.rollouts:
            raise ValueError(
                f"curation.dynamic_rollouts.window is {self.curation.dynamic_rollouts.window}, less than "
                f"curation.rollouts ({self.curation.rollouts}), so no success rate would ever be known: raise it"
            )
        if self.trainer.advantage.overlong_buffer > self.rollout.max_tokens:
            raise ValueError(
                f"trainer.advantage.overlong_buffer is {self.trainer.advantage.overlong_buffer}, more than "
                f"rollout.max_tokens ({self.rollout.max_tokens}): make it a part of it"
            )
        if self.sync.max_unavailable > self.rollout.replicas:
            raise ValueError(
                f"sync.max_unavailable is {self.sync.max_unavailable} "
                f"but there are only {self.rollout.replicas} replicas"
            )
        episodes, tasks = self.evaluation.episodes, len(set(self.environment.tasks.names))
        first, last = self.environment.tasks.eval_seeds
        if (needed := -(-episodes // tasks)) > last - first:
            raise ValueError(
                f"evaluation.episodes: {episodes} episodes of {tasks} tasks need {needed} held-out seeds, and "
                f"environment.tasks.eval_seeds has {last - first}: widen it or evaluate fewer"
            )
        return self


# ---- what each role is told in its Welcome ----


class SharedBlobs(Section):
    """The run's screenshots, for workers that see the directory: it holds a file `id` with this word."""

    directory: Path
    id: str


class EnvWorkerConfig(Section):
    environment: Environment
    shared_blobs: SharedBlobs | None = None


class RolloutWorkerConfig(Section):
    model: Model
    rollout: Rollout
    sync: Sync
    max_images: int
    seed: int
    weight_version: int = 0
    shared_blobs: SharedBlobs | None = None


class TrainWorkerConfig(Section):
    model: Model
    trainer: Trainer
    sync: Sync
    temperature: float
    seed: int
    total_updates: int | None
    resume_from: Path | None = None
    shared_blobs: SharedBlobs | None = None


def load(path: Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a YAML config, apply `section.field=value` overrides, and check it.

    Raises ConfigError with one message for the first things that are wrong: each names field, value and remedy.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"config {path} does not exist: name a YAML file, for example configs/miniwob_cpu.yaml"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"config {path} is a folder: name a YAML file in it") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"config {path} holds {type(raw).__name__}, not sections: see configs/miniwob_cpu.yaml")
    for override in overrides:
        _override(raw, override)
    return parse(raw, str(path))


def parse(raw: dict[str, Any], where: str = "config") -> Config:
    """Check a config that is already a dictionary. Raises ConfigError."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(where, problem) for problem in error.errors())) from None


def _override(raw: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    *parents, last = key.split(".")
    if not separator or not last:
        raise ConfigError(f"override {override!r} is not section.field=value, for example stop.updates=10")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(
            f"override {override!r}: {value} is not a YAML value: quote it, or close its brackets"
        ) from None


def _explain(where: str, problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"]) or "(whole)"
    value = problem["input"]
    shown = "" if isinstance(value, dict | BaseModel) else f" (it is {value!r})"
    if problem["type"] == "extra_forbidden":
        known = _fields_beside(problem["loc"])
        close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{where}: {field} is not a known field{shown}: {hint}"
    if problem["type"] == "missing":
        return f"{where}: {field} is missing: add it"
    return f"{where}: {field}{shown}: {problem['msg'].removeprefix('Value error, ')}"


def _fields_beside(location: tuple[int | str, ...]) -> list[str]:
    section: Any = Config
    for part in location[:-1]:
        annotation = section.model_fields[str(part)].annotation
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return sorted(section.model_fields)
