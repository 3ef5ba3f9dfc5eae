"""What a run asks of Ray: places for its groups, an actor in each, and answers. Everything that imports Ray."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dart.config.cluster import Ray
from dart.errors import UserError
from dart.launch.plan import Group, Part
from dart.launch.restarts import End
from dart.launch.supervisor import Place, Supervisor, Unusable

Actor = Any
"""A handle of a `Supervisor` somewhere. Ray's types are unknown to the type checker."""
THREADS = 4
"""An actor's: one each to run the process, wait until it listens, stop it, and tell its place."""
A_LITTLE = 0.001
"""How much to ask for of a resource that only names a node."""
BYTES_PER_GB = 10**9
STRATEGY: dict[Part, str] = {"coordinator": "PACK", "train": "PACK", "rollout": "SPREAD"}
"""How places are reserved for each part. Ranks talk all the time; a lost node should take few replicas with it."""
REPORT_SECONDS = 20
REACHED_SECONDS = 20.0
HOST_AND_PORT = re.compile(r"[^/]+:\d{1,5}")
NODE_LETTERS = 8


class _Placed(Supervisor):
    """A supervisor that knows its node."""

    def here(self) -> Place:
        import ray

        host = str(ray.util.get_node_ip_address())
        return self.place(host, f"{host}, Ray's node {ray.get_runtime_context().get_node_id()[:NODE_LETTERS]}")


@dataclass(slots=True)
class RayCluster:
    settings: Ray
    groups: tuple[Group, ...]
    _reserved: dict[Part, Any] = field(default_factory=dict)
    _made: int = 0

    @classmethod
    @contextlib.contextmanager
    def joined(cls, settings: Ray, groups: tuple[Group, ...]) -> Iterator[RayCluster]:
        """Connected until the end of the block, after which nothing of this run is left. Raises UserError."""
        try:
            import ray
        except ImportError:
            raise UserError("dart launch ray needs Ray: pip install 'dart-gui-rl[ray]' on every node") from None
        local = settings.address == "local"
        # Cores are not rationed on a machine of one's own, as little as by `dart train`.
        cores = math.ceil(sum(group.count * group.needs.cpus for group in groups)) if local else None
        try:
            if HOST_AND_PORT.fullmatch(settings.address):  # Ray would try for minutes
                host, _, port = settings.address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), REACHED_SECONDS).close()
            ray.init(settings.address, num_cpus=cores, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cluster.ray.address: {settings.address!r} is not a Ray cluster that can be joined ({error}): start "
                "one with `ray start --head`, or --set cluster.ray.address=local"
            ) from None
        cluster = cls(settings, groups)
        try:
            if local:
                cluster._check_gpus(int(ray.cluster_resources().get("GPU", 0)))
            yield cluster
        finally:
            cluster._release()
            ray.shutdown()

    def _check_gpus(self, there: int) -> None:
        wanted = sum(group.count * group.gpus for group in self.groups)
        if wanted > there:
            raise UserError(
                f"the run needs {wanted} GPUs, and this machine has {there}: set cluster.device: cpu, lower "
                "trainer.ranks or rollout.replicas, or name a cluster with cluster.ray.address"
            )

    def reserve(self, say: Callable[[str], None], stopped: Callable[[], bool]) -> None:
        """Places for all but env workers, each group as a whole; returns when they are there, or `stopped`.

        Replicas come last: they are spread, after which no node may have room for all ranks.
        """
        import ray

        for group in sorted(self.groups, key=lambda group: group.part == "rollout"):
            if group.part not in STRATEGY:
                continue
            bundles = [self._resources(group)] * group.count
            places = ray.util.placement_group(bundles, strategy=STRATEGY[group.part])
            self._reserved[group.part] = places
            waited = 0
            while not places.wait(1) and not stopped():
                waited += 1
                if waited == REPORT_SECONDS:
                    say(f"waiting until the cluster has room for {group.count} of {group.part}: {self.wanted(group)}")

    def wanted(self, group: Group) -> str:
        """What one process needs, and what there is, for a person."""
        import ray

        needs = ", ".join(f"{amount:g} {name}" for name, amount in self._resources(group).items())
        there = ray.cluster_resources()
        return f"each needs {needs}; the cluster has {there.get('CPU', 0):g} CPU and {there.get('GPU', 0):g} GPU in all"

    def actor(self, group: Group, number: int, name: str) -> Actor:
        """One that will be there when Ray finds a place. `name`: what Ray's dashboard shows."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._made += 1  # a name is taken until Ray has forgotten the actor that had it
        needs = self._resources(group)
        places = self._reserved.get(group.part)
        made = ray.remote(_Placed).options(
            name=f"{name}/{self._made}",
            num_cpus=needs.pop("CPU"),
            num_gpus=needs.pop("GPU", 0),
            memory=needs.pop("memory", None),
            resources=needs,
            max_concurrency=THREADS,
            max_restarts=0,
            scheduling_strategy="SPREAD" if places is None else PlacementGroupSchedulingStrategy(places, number),
        )
        return made.remote()

    def ask_place(self, actor: Actor) -> object:
        return actor.here.remote()

    def answered(self, references: Sequence[object], seconds: float) -> list[tuple[object, object]]:
        """Those with an answer, after at most so many seconds; an End without a code from an actor that is lost, and
        Unusable from a node that has no dart."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if not references:
            time.sleep(seconds)
            return []
        ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(references), num_returns=1, timeout=seconds)
        answers: list[tuple[object, object]] = []
        for reference in ready:
            try:
                answers.append((reference, ray.get(reference)))
            except RayActorError as error:
                if "No module named 'dart" in str(error):
                    lacking = Unusable("a node of the cluster has no dart: install this release of it there")
                    answers.append((reference, lacking))
                else:
                    answers.append((reference, End(None, "its node or its actor is gone")))
            except RayTaskError as error:  # a file system that fails, say
                answers.append((reference, End(None, f"its actor has failed: {error.cause}")))
        return answers

    def kill(self, actor: Actor) -> None:
        """Its process has ended, or ends with it. Nothing happens if it is gone already."""
        import ray

        ray.kill(actor)

    def _release(self) -> None:
        import ray

        for places in self._reserved.values():
            ray.util.remove_placement_group(places)

    def _resources(self, group: Group) -> dict[str, float]:
        """What one process needs, under Ray's names."""
        needs = {
            "CPU": group.needs.cpus,
            "GPU": group.gpus,
            "memory": (group.needs.memory_gb or 0) * BYTES_PER_GB,
            self.settings.coordinator_resource: A_LITTLE if group.part == "coordinator" else 0,
        }
        return {name: amount for name, amount in needs.items() if amount}
