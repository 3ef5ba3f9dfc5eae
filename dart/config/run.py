"""The run itself: where it is, when it ends, how it is evaluated, and its server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, field_validator, model_validator

from dart.config.base import Fraction, Positive, Seconds, Section
from dart.config.policy import check_temperature
from dart.core.evaluation.documents import Decoding
from dart.core.loopback import is_loopback


def _with_scheme(url: str | None) -> str | None:
    if url is not None and not re.fullmatch(r"[a-z0-9]+://.+", url):
        raise ValueError("is no URL: write s3://bucket/prefix, or leave it out")
    return url


class Run(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="The run directory's prefix.")
    directory: Path = Field(Path("runs"), description="Where run directories are made.")
    seed: int = Field(0, description="Random seed for the order of tasks and the trainer's shuffles.")
    database: str | None = Field(
        None,
        description="none: run.db in the run directory, in SQLite. Else a PostgreSQL database, for any number of "
        "runs: postgresql://user@host/name without a password, which belongs into PGPASSWORD or ~/.pgpass; or "
        "env:NAME, an environment variable with the whole URL (docs/stores.md).",
    )
    blobs: str | None = Field(
        None,
        description="none: screenshots are in blobs in the run directory. Else s3://bucket/prefix, in which each run "
        "has its own folder; endpoint and keys come from the environment (docs/stores.md).",
    )
    database_wait_seconds: Seconds = Field(
        3600.0,
        description="How long another program (a backup) may lock run.db, or a PostgreSQL server be away, before the "
        "run ends; and an object store be away, before what needs it fails.",
    )

    @field_validator("database")
    @classmethod
    def _no_secret(cls, url: str | None) -> str | None:
        if url is None or url.startswith("env:"):
            return url
        parts = urlsplit(url)
        if parts.password is not None or "password" in parse_qs(parts.query):
            # Not even in the message, which would show the value.
            raise ValueError("has a password: leave it out, and set PGPASSWORD or ~/.pgpass, or use env:NAME")
        if parts.scheme not in ("postgresql", "postgres"):
            raise ValueError("is no PostgreSQL URL: write postgresql://user@host/name or env:NAME, or leave it out")
        return url

    _url = field_validator("blobs")(_with_scheme)


LeastBytes = Annotated[int, Field(ge=1 << 20)]


class Retention(Section):
    """What a run keeps on disk while it lasts."""

    screenshot_bytes: LeastBytes | None = Field(
        None,
        description="Approximate bound on all screenshots. Beyond it, the oldest unneeded ones are removed: those of "
        "groups that were dropped, or trained on before the newest `checkpoint.keep` checkpoints. Trajectories stay. "
        "none: no bound.",
    )
    evaluation_screenshots: bool = Field(
        True, description="false: screenshots of finished evaluations may be removed, too."
    )
    unused_seconds: float = Field(
        3600.0, ge=60.0, description="How long screenshots of failed attempts, to which no trajectory refers, are kept."
    )
    events: Positive = Field(
        200_000,
        description="The most events in run.db. Older ones are deleted, but never those that tell the run's story: "
        "phases, workers that came or were lost, updates, evaluations, checkpoints, losses of the trainer, what was "
        "pooled, collected or submitted, pauses and failures (docs/machines.md).",
    )
    metrics_bytes: LeastBytes = Field(
        128 << 20,
        description="Approximate bound on metrics.jsonl and metrics.jsonl.1 together; the same kinds of events are "
        "always kept.",
    )
    log_bytes: LeastBytes = Field(
        32 << 20,
        description="Bound on coordinator.log and on each file in logs; one older part of each is kept as well.",
    )


class Stop(Section):
    """The run ends as soon as one of these is reached; at least one has to be set."""

    updates: Positive | None = Field(None, description="Trainer updates.")
    train_seconds: Seconds | None = Field(
        None, description="Seconds of training; evaluations do not count, and pauses do."
    )
    env_steps: Positive | None = Field(
        None, description="Steps of finished training trajectories, an unparsable last one included."
    )
    success_rate: Fraction | None = Field(None, description="Success rate of the last `window` training trajectories.")
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
    before: bool = Field(
        True, description="false: evaluate only after training, for runs that begin with the same weights."
    )
    samples: Positive = Field(
        1,
        description="Episodes per instance (task and seed) in `dart eval`; evaluations of a training run always use "
        "one.",
    )
    temperature: float | None = Field(
        None, ge=0.0, description="Temperature of `sampled`, and of `dart eval`; none: rollout.temperature; 0: greedy."
    )

    @field_validator("temperature")
    @classmethod
    def _engine_samples_at_it(cls, temperature: float | None) -> float | None:
        return check_temperature(temperature, ", or greedily at 0") if temperature else temperature

    decodings: tuple[Decoding, ...] = Field(
        ("sampled", "greedy"),
        min_length=1,
        description="Evaluations of a training run, each of `episodes`: `sampled` at the temperature, `greedy` at 0.",
    )


class Checkpoint(Section):
    every_updates: Positive = Field(
        50,
        description="Updates between checkpoints. Another is made at the end, and when the run is interrupted: see "
        "`interrupt_seconds`.",
    )
    interrupt_seconds: Seconds = Field(
        3.0,
        description="How long Ctrl-C and SIGTERM wait for the update in progress and a checkpoint; one that takes "
        "longer is given up, as it is at a second Ctrl-C.",
    )
    keep: Positive = Field(2, description="How many of the newest checkpoints to keep.")
    upload: str | None = Field(
        None,
        description="Each complete checkpoint is also copied to this URL, in the background: s3://bucket/prefix, or "
        "another that fsspec has a driver for. `keep` copies stay, in a folder of the run (docs/stores.md).",
    )

    _url = field_validator("upload")(_with_scheme)


TokenRole = Literal["env", "rollout", "train", "control"]


class Watchdog(Section):
    """When a run without progress is reported as stalled: in `dart status`, in `dart why`, to health checks."""

    start_seconds: Seconds = Field(
        600.0, description="While the run starts: time without another worker becoming ready."
    )
    sampling_seconds: Seconds = Field(
        300.0,
        description="The least bound on time without an answer of any environment, or without a finished episode.",
    )
    update_seconds: Seconds = Field(
        600.0,
        description="The least bound on the duration of an update or a checkpoint; the first update may take `factor` "
        "times as long.",
    )
    weights_seconds: Seconds = Field(
        600.0, description="Time that a replica has been behind without getting newer weights."
    )
    factor: float = Field(
        4.0,
        ge=1.0,
        description="The bounds on sampling and updates are this many times the slowest recent trajectory or update, "
        "if that is longer.",
    )
    end_after_seconds: Seconds | None = Field(
        None,
        description="A run without progress for this long ends, and can be continued with --resume; `dart train` does "
        "so by itself, at most three times in a row without a new checkpoint. none: never.",
    )
    exit_code: int = Field(
        75, ge=1, le=125, description="Exit code of a run that ended this way, and is not resumed by itself."
    )


class Dashboard(Section):
    """The pages of `dart view`, which a separate process serves while `dart train` or `dart coordinator` runs."""

    enabled: bool = Field(True, description="false: no dashboard; `dart view` shows the run as well.")
    host: str = Field(
        "127.0.0.1",
        description="An address that is open to the network requires a token: that of DART_VIEW_TOKEN, or a new one.",
    )
    port: int = Field(8700, ge=0, le=65535, description="0, or a port that another program has: any free port instead.")


TrackerKind = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]


class Tracking(Section):
    """Experiment trackers, to which a separate process sends the run (`dart track`).

    Addresses and keys are each tracker's own environment variables (WANDB_API_KEY, MLFLOW_TRACKING_URI, ...). Without
    them, everything is kept in `trackers` in the run directory; W&B does so only with WANDB_MODE=offline.
    """

    to: tuple[TrackerKind, ...] = Field((), description="Any number of them.")
    project: str = Field("dart", min_length=1, description="The project, or experiment, that the run belongs to.")
    pictures: int = Field(4, ge=0, le=64, description="Trajectories shown as pictures at a time; 0 for none.")
    pictures_every_updates: Positive = Field(20, description="Updates between pictures.")


class Server(Section):
    host: str = Field(
        "127.0.0.1", description="An address other than loopback requires all `tokens` and TLS (docs/machines.md)."
    )
    port: int = Field(0, ge=0, le=65535, description="0: any free port.")
    heartbeat_seconds: Seconds = Field(
        2.0,
        description="Time between heartbeats; longer with over 500 workers, up to a third of `lost_after_seconds`.",
    )
    lost_after_seconds: Seconds = Field(15.0, description="A worker that is silent for this long counts as lost.")
    reply_timeout_seconds: Seconds = Field(
        600.0,
        description="A command to an environment or a replica fails when it is not answered within this time; a "
        "worker whose answers are late for half of its environments, or half of its requests, counts as lost.",
    )
    share_screenshots: bool = Field(
        True,
        description="true: workers with access to the run's directory of screenshots write and read them there, and "
        "others exchange them with the coordinator; false: all exchange them with the coordinator.",
    )
    tls_certificate: Path | None = Field(
        None,
        description="PEM. Workers started by `dart train` trust exactly this file, so it must be self-signed there.",
    )
    tls_key: Path | None = Field(None, description="PEM: the key of tls_certificate.")
    tls_client_ca: Path | None = Field(
        None,
        description="If set, whoever connects must present a certificate of this authority; for `dart coordinator`, "
        "whose workers are started by hand with --tls-certificate. `dart status`, `why`, `control` and `health` and "
        "the dashboard have none, so they show only what is recorded.",
    )
    tokens: dict[TokenRole, str] = Field(
        default_factory=dict,
        description="A bearer token per role, as env:NAME or file:PATH, never the token itself. A host that is open to "
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
        if self.heartbeat_seconds >= self.lost_after_seconds:
            raise ValueError(
                f"heartbeat_seconds is {self.heartbeat_seconds:g}, and a worker that is silent for lost_after_seconds "
                f"({self.lost_after_seconds:g}) counts as lost: lower heartbeat_seconds, or raise lost_after_seconds"
            )
        for role, source in self.tokens.items():
            if not source.startswith(("env:", "file:")):
                raise ValueError(f"tokens.{role} must be env:NAME or file:PATH, so that no secret is in a config")
        return self
