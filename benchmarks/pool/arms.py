"""The arms of the comparison, one run of an arm, and what its VMs' time went into.

Real: the coordinator, and the env worker's role with its places, time limits, renewals and replacements. Simulated, on
a virtual clock: what happens inside a VM (`benchmarks.simulation.desktops`), replicas and trainer
(`benchmarks.simulation.timings`), and the streams between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks import efficiency
from benchmarks.simulation.cluster import DECOUPLED, simulate
from benchmarks.simulation.desktops import USEFUL, Booked, Cause, Desktops
from benchmarks.simulation.hosted import HostedEnvs
from dart.coordinator.run import Run

KIND = "benchmarks.simulation.desktops:Desktops"
WORKERS = 18


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    per_worker: int
    """VMs."""
    boots_in: str


NAIVE = Arm("boots in Reset", 10, "reset")
MANAGED = Arm("managed", 10, "background")
SPARE = Arm("managed, one spare VM for each worker", 11, "background")
PLAN = {efficiency.BALANCED: (NAIVE, MANAGED, SPARE), 8: (NAIVE, MANAGED)}
"""Training GPUs → arms. About as many as keep up; and the paper's, with which VMs wait for the trainer, so that spare
ones would only wait, too."""


@asynccontextmanager
async def hosted(run: Run, arm: Arm, number_of_workers: int) -> AsyncIterator[None]:
    """The arm's env workers, until the run is over. Their VMs' time is booked from their start on, for as many seconds
    as the config trains for."""
    settings, workers = run.config, []
    booking = asyncio.get_running_loop().call_later(settings.stop.train_seconds or 0.0, Desktops.booked.close)
    try:
        for number in range(number_of_workers):
            seed, tasks = f"{settings.run.seed}/{number}", settings.environment.tasks
            options = {"seed": seed, "boots_in": arm.boots_in, "tasks": len(tasks.names)}
            environment = settings.environment.model_copy(update={"options": options, "slots": arm.per_worker})
            workers.append(await HostedEnvs.start(run.fleet, f"env-{number:02d}", environment))
        yield
    finally:
        booking.cancel()
        for worker in workers:
            await worker.close()


def run(arm: Arm, trainer: int, seed: int, hours: float, workers: int = WORKERS) -> dict[str, Any]:
    """One run: shares of the VMs' time by cause, what was lost and gained."""
    set_up, timings = efficiency.with_trainer(trainer), efficiency.timings_for(trainer)
    booked = Desktops.booked = Booked()
    summary = simulate(
        set_up, DECOUPLED, timings, hours, seed, kind=KIND,
        host_envs=lambda made: hosted(made, arm, workers),
    )  # fmt: skip
    env = summary["time"]["env"]
    shares = shares_of(booked.seconds, env["idle_because"])
    return {
        "arm": arm.name,
        "training_gpus": trainer,
        "seed": seed,
        "hours": hours,
        "vms": workers * arm.per_worker,
        "shares": shares,
        "useful": sum(shares[cause] for cause in USEFUL),
        "vm_seconds": round(sum(booked.seconds.values())),
        "events": dict(booked.events),
        "trained_actions_per_minute": summary["trained_actions_per_minute"],
        "trajectories_per_hour": round(summary["trajectories"] / hours, 1),
        "staleness": summary["staleness"]["mean"],
        "failed_attempts": summary["infrastructure_failures"],
        "trainer_utilisation": summary["trainer_utilisation"],
        "rollout_utilisation": summary["rollout_utilisation"],
        "ledger": env["seconds"],
        "cpu_seconds": summary["cpu_seconds"],
    }


def shares_of(seconds: Mapping[Cause, float], idle_because: Mapping[str, float]) -> dict[str, float]:
    """Shares of all VM time by cause; idle time is divided as the coordinator's ledger divides its own."""
    total, idle = sum(seconds.values()), sum(idle_because.values())
    shares = {str(cause): seconds.get(cause, 0.0) / total for cause in Cause if cause is not Cause.IDLE}
    trainer = sum(spent for why, spent in idle_because.items() if "trainer" in why)
    behind = seconds.get(Cause.IDLE, 0.0) / total * (trainer / idle if idle else 0.0)
    rest = seconds.get(Cause.IDLE, 0.0) / total - behind
    return {**shares, "waiting for the trainer": behind, "idle for another reason": rest}
