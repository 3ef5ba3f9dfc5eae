"""Where `dart launch` starts a run, and what each of its processes asks the cluster for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from dart.config.base import Section

Cpus = Annotated[float, Field(gt=0.0)]


class Needs(Section):
    """What one process asks the cluster for; its GPUs follow from `rollout` and `trainer`."""

    cpus: Cpus = Field(1.0, description="Processor cores.")
    memory_gb: float | None = Field(None, gt=0.0, description="Memory in GB; none: the cluster's own default.")


class K8s(Section):
    """What `dart launch k8s` tells the chart beside what follows from the rest of the config."""

    release: str | None = Field(
        None,
        pattern=r"^[a-z]([a-z0-9-]{0,28}[a-z0-9])?$",
        description="The Helm release, whose name everything bears, and the run's directory too; none: from run.name.",
    )
    image: str | None = Field(
        None, description="For coordinator and env workers: `containers/cpu.Containerfile` makes it. Needed."
    )
    model_image: str | None = Field(
        None,
        description="For replicas and trainer ranks: `containers/gpu.Containerfile` makes it; none: the same image.",
    )
    model_claim: str | None = Field(
        None, description="The PersistentVolumeClaim with model.path, unless that is builtin:NAME or in the image."
    )
    model_folder: str = Field("/models", pattern=r"^/", description="Where model_claim is mounted.")
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
    k8s: K8s = Field(default_factory=K8s, description="For `dart launch k8s`.")
