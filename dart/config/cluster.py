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


class Cluster(Section):
    """What `dart launch` asks for; `dart train` and `dart coordinator` ignore it."""

    device: Literal["gpu", "cpu"] = Field("gpu", description="cpu: replicas and trainer ranks ask for no GPUs.")
    coordinator: Needs = Field(default=Needs(cpus=4.0), description="Of the coordinator.")
    env: Needs = Field(default=Needs(cpus=2.0), description="Of each env worker, with all its `environment.slots`.")
    rollout: Needs = Field(default=Needs(cpus=8.0), description="Of each replica.")
    train: Needs = Field(default=Needs(cpus=8.0), description="Of each trainer rank.")
