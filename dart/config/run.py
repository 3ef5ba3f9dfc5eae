"""The run itself: where it is, when it ends, how it is evaluated, and its server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from dart.config.base import Fraction, Positive, Seconds, Section
from dart.core.loopback import is_loopback


class Run(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="The run directory's prefix.")
    directory: Path = Field(Path("runs"), description="Where run directories are made.")
    seed: int = Field(0, description="Of the order of tasks and of the trainer's shuffles.")
    database_wait_seconds: Seconds = Field(
        3600.0, description="Another program (a backup) may lock run.db for so long before the run ends."
    )


LeastBytes = Annotated[int, Field(ge=1 << 20)]


class Retention(Section):
    """What a run keeps on the disk for as long as it lasts."""

    screenshot_bytes: LeastBytes | None = Field(
        None,
        description="Of all screenshots, about. Beyond it the oldest that nothing needs are removed: those of groups "
        "that were dropped, or trained on before the oldest kept checkpoint. Trajectories stay. none: no bound.",
    )
    evaluation_screenshots: bool = Field(
        True, description="false: those of evaluations that have ended may be removed, too."
    )
    unused_seconds: float = Field(
        3600.0, ge=60.0, description="Screenshots that no trajectory refers to, of failed attempts, stay for so long."
    )
    events: Positive = Field(
        200_000, description="In run.db; older ones are deleted, except updates, evaluations, checkpoints and phases."
    )
    metrics_bytes: LeastBytes = Field(
        128 << 20, description="Of metrics.jsonl and metrics.jsonl.1 together, about; the same kinds always stay."
    )
    log_bytes: LeastBytes = Field(
        32 << 20, description="Of coordinator.log and of each file in logs; one older part is kept beside it."
    )


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


TokenRole = Literal["env", "rollout", "train", "control"]


class Watchdog(Section):
    """When a run that makes no progress is said to be stalled: in `dart status`, in `dart why`, to health checks."""

    start_seconds: Seconds = Field(600.0, description="While it starts: no other worker has become ready for so long.")
    sampling_seconds: Seconds = Field(
        300.0, description="No environment has answered, or no episode has finished, for so long; at least."
    )
    update_seconds: Seconds = Field(600.0, description="An update or a checkpoint has lasted for so long; at least.")
    weights_seconds: Seconds = Field(600.0, description="A replica has not had newer weights for so long.")
    factor: float = Field(
        4.0, ge=1.0, description="Where the run's own pace is slow: times its slowest recent trajectory or update."
    )
    end_after_seconds: Seconds | None = Field(
        None, description="A run that has made no progress for so long ends; `--resume` goes on with it. none: never."
    )
    exit_code: int = Field(75, ge=1, le=125, description="Of a run that ended so.")


class Server(Section):
    host: str = Field(
        "127.0.0.1", description="Any that is not loopback needs all `tokens` and TLS (docs/machines.md)."
    )
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
    tokens: dict[TokenRole, str] = Field(
        default_factory=dict,
        description="A bearer token per role, as env:NAME or file:PATH; never the token itself. A host that is open to "
        "the network needs all four.",
    )

    @model_validator(mode="after")
    def _safe(self) -> Server:
        missing = [f"server.tokens.{role}" for role in get_args(TokenRole) if role not in self.tokens]
        missing += [] if self.tls_certificate else ["server.tls_certificate"]
        if missing and not is_loopback(self.host):
            raise ValueError(f"host {self.host} is open to the network: set {', '.join(missing)}, or use 127.0.0.1")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: set both or neither")
        for role, source in self.tokens.items():
            if not source.startswith(("env:", "file:")):
                raise ValueError(f"tokens.{role} must be env:NAME or file:PATH, so that no secret is in a config")
        return self
