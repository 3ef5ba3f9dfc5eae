"""Where `dart launch` starts a run, and what each of its processes asks the cluster for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from dart.config.base import Section
from dart.core.fleet.restarts import MOST_RESTARTS

Cpus = Annotated[float, Field(gt=0.0)]
Lines = tuple[str, ...]
Word = Annotated[str, Field(pattern=r"^\S+$")]


class Needs(Section):
    """What one process asks the cluster for; its GPUs follow from `rollout` and `trainer`."""

    cpus: Cpus = Field(1.0, description="Processor cores.")
    memory_gb: float | None = Field(None, gt=0.0, description="Memory in GB; none: the cluster's own default.")


class Ray(Section):
    """Of `dart launch ray` (docs/clusters.md)."""

    address: str = Field(
        "auto",
        description="HOST:PORT of a Ray cluster; auto: the one that this machine is in; local: a new one here, for "
        "this run.",
    )
    coordinator_resource: str = Field(
        "node:__internal_head__",
        min_length=1,
        description="The coordinator runs on a node with this resource of Ray's; as it is, on the head node.",
    )
    restarts: int = Field(
        MOST_RESTARTS, ge=0, description="How often in a row a process that fails within ten minutes is started again."
    )


class SlurmOptions(Section):
    """Further #SBATCH options of the components of a Slurm job, as `--constraint=a100`; they win over dart's own."""

    coordinator: Lines = Field((), description="Of the coordinator, on whose node the job's script runs.")
    env: Lines = Field((), description="Of the env workers.")
    rollout: Lines = Field((), description="Of the replicas.")
    train: Lines = Field((), description="Of the trainer ranks.")

    @model_validator(mode="after")
    def _are_options(self) -> SlurmOptions:
        for part in type(self).model_fields:
            for line in getattr(self, part):
                if not line.startswith("-") or "\n" in line:
                    raise ValueError(
                        f"options.{part}: {line!r} is not an option of sbatch: write it as on an #SBATCH line, for "
                        "example --constraint=a100"
                    )
        return self


class Slurm(Section):
    """What `dart launch slurm` asks Slurm for ([clusters.md](clusters.md#slurm))."""

    partition: Word | None = Field(None, description="none: the cluster's default, for `account` and `qos` too.")
    account: Word | None = Field(None, description="Who is charged.")
    qos: Word | None = Field(None, description="Quality of service.")
    time_limit_hours: float | None = Field(None, gt=0.0, description="Of the job. none: the partition's.")
    signal_seconds: int = Field(
        300,
        ge=60,
        le=65535,
        description="How long before the time limit the run begins to save a checkpoint; it gets 30 s less than that, "
        "so name more than an update and a checkpoint take together.",
    )
    requeue: bool = Field(
        True, description="true: the job queues again, and continues, when its time is up or it is pre-empted."
    )
    host: str = Field(
        "$(hostname)",
        min_length=1,
        description="The coordinator's node, as other nodes reach it: a word of bash, which is evaluated there.",
    )
    python: str | None = Field(
        None, min_length=1, description="Python with dart, on every node. none: the one that runs `dart launch`."
    )
    setup: Lines = Field((), description="Lines of bash that run before each process, for example `module load cuda`.")
    options: SlurmOptions = Field(default_factory=SlurmOptions, description="Further #SBATCH options.")


class K8s(Section):
    """What `dart launch k8s` tells the chart in addition to what follows from the rest of the config."""

    release: str | None = Field(
        None,
        pattern=r"^[a-z]([a-z0-9-]{0,28}[a-z0-9])?$",
        description="Name of the Helm release, of all its objects and of the run's directory; none: from run.name.",
    )
    image: str | None = Field(
        None, description="Required. For coordinator and env workers: `containers/cpu.Containerfile` makes it."
    )
    model_image: str | None = Field(
        None,
        description="For replicas and trainer ranks: `containers/gpu.Containerfile` makes it. Required with GPUs; "
        "none, without them: `image`.",
    )
    model_claim: str | None = Field(
        None, description="The PersistentVolumeClaim with model.path, unless that is builtin:NAME or in the image."
    )
    model_folder: str = Field("/models", pattern=r"^/", description="Where model_claim is mounted.")
    files: list[Path] = Field(
        default_factory=list,
        description="Files of your own that travel with the release, at most 1 MB of text: modules of worlds and "
        "losses, tasks. They are in the folder in which every process starts.",
    )
    values: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Other values of the chart: node selectors, tolerations, claims, secrets, autoscaling "
        "(`dart/launch/chart/values.yaml`). They win over what follows from the config.",
    )


class Cluster(Section):
    """What `dart launch` asks for; `dart train` and `dart coordinator` ignore it."""

    device: Literal["gpu", "cpu"] = Field("gpu", description="cpu: replicas and trainer ranks ask for no GPUs.")
    coordinator: Needs = Field(default=Needs(cpus=4.0), description="Of the coordinator.")
    env: Needs = Field(default=Needs(cpus=2.0), description="Of each env worker, with all its `environment.slots`.")
    rollout: Needs = Field(default=Needs(cpus=8.0), description="Of each replica.")
    train: Needs = Field(default=Needs(cpus=8.0), description="Of each trainer rank.")
    ray: Ray = Field(default_factory=Ray)
    slurm: Slurm = Field(default_factory=Slurm)
    k8s: K8s = Field(default_factory=K8s)
