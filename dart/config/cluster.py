"""Where `dart launch` starts a run, and what each of its processes asks the cluster for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dart.config.base import Section

Cpus = Annotated[float, Field(gt=0.0)]


class Needs(Section):
    """What one process asks the cluster for; its GPUs follow from `rollout` and `trainer`."""

    cpus: Cpus = Field(1.0, description="Processor cores.")
    memory_gb: float | None = Field(None, gt=0.0, description="Memory in GB; none: the cluster's own default.")


class Ray(Section):
    """Of `dart launch ray` (docs/clusters.md)."""

    address: str = Field(
        "auto", description="A Ray cluster: auto finds the one of this machine; local starts one here, for this run."
    )
    coordinator_resource: str = Field(
        "node:__internal_head__",
        min_length=1,
        description="The coordinator runs on a node with this resource of Ray's; as it is, on the head node.",
    )
    restarts: int = Field(
        3, ge=0, description="How often in a row a process that ends within ten minutes is started again."
    )


class Cluster(Section):
    """What `dart launch` asks for; `dart train` and `dart coordinator` ignore it."""

    device: Literal["gpu", "cpu"] = Field("gpu", description="cpu: replicas and trainer ranks ask for no GPUs.")
    coordinator: Needs = Field(default=Needs(cpus=4.0), description="Of the coordinator.")
    env: Needs = Field(default=Needs(cpus=2.0), description="Of each env worker, with all its `environment.slots`.")
    rollout: Needs = Field(default=Needs(cpus=8.0), description="Of each replica.")
    train: Needs = Field(default=Needs(cpus=8.0), description="Of each trainer rank.")
    ray: Ray = Field(default_factory=Ray)
