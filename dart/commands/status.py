"""`dart status` and `dart runs`: live state from the coordinator, the rest from the run's database."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc
from google.protobuf.json_format import MessageToDict

from dart.commands.running import go_on
from dart.commands.view import MOST_ROWS, worker_states
from dart.coordinator.fleet.server import ROLE_NAMES
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store.records import RunRecord, RunState
from dart.v1 import control_pb2 as cpb
from dart.v1 import control_pb2_grpc
from dart.wire.channel import TOKEN_ENVIRONMENT, Dial

TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """The command line of `dart status`. `run` None: the newest under runs/; `address`: ask that coordinator."""

    run: Path | None = None
    address: str | None = None
    tls_ca: Path | None = None
    as_json: bool = False


def status(options: StatusOptions) -> None:
    """Print a run's state. Raises UserError when there is nothing to ask."""
    if options.address is not None:
        answer = asyncio.run(ask(options.address, options.tls_ca))
        if answer is None:
            raise UserError(
                f"--address {options.address}: no coordinator answers there: `dart runs` lists runs and addresses"
            )
        _print_live(answer, options.as_json)
        return
    directory = RunDirectory.existing(options.run) if options.run else RunDirectory.all_under(Path("runs"))[0]
    record, totals = asyncio.run(_read(directory))
    state = directory.state(record)
    if state == RunState.RUNNING and record.control_address:
        answer = asyncio.run(ask(record.control_address, options.tls_ca or _own_certificate(record)))
        if answer is not None:
            _print_live(answer, options.as_json)
            return
    _print_past(directory.path, record, state, totals, options.as_json)


def _own_certificate(record: RunRecord) -> Path | None:
    """What the run's coordinator shows, as its workers on this machine trust it."""
    certificate = record.config.get("server", {}).get("tls_certificate")
    return Path(certificate) if certificate else None


async def ask(address: str, tls_ca: Path | None = None) -> cpb.GetStatusResponse | None:
    """A coordinator's status, or None when it does not answer."""
    dial = Dial(address, os.environ.get(TOKEN_ENVIRONMENT), tls_ca)
    async with dial.channel() as channel:
        try:
            answer: cpb.GetStatusResponse = await control_pb2_grpc.ControlServiceStub(channel).GetStatus(
                cpb.GetStatusRequest(), timeout=TIMEOUT_SECONDS, metadata=dial.metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise UserError(
                    f"coordinator {address} refused the token: set DART_TOKEN to the control token"
                ) from None
            return None
        return answer


async def _read(directory: RunDirectory) -> tuple[RunRecord, dict[str, Any]]:
    async with await directory.open() as database:
        totals: dict[str, Any] = next((json.loads(one.json) for one in await database.newest_events("update")), {})
        return await database.run(), totals


def _print_live(answer: cpb.GetStatusResponse, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(MessageToDict(answer, preserving_proto_field_name=True)))
        return
    click.echo(
        f"{answer.run_id}: {answer.phase}, update {answer.update}, version {answer.weight_version}, "
        f"{answer.trajectories} trajectories, {answer.env_steps} steps, success {answer.success_rate:.0%}"
    )
    click.echo(
        f"environments busy {answer.env_utilisation:.0%}, replicas {answer.rollout_utilisation:.0%}, "
        f"trainer {answer.trainer_utilisation:.0%}; {answer.trained_actions_per_minute:.0f} actions/min trained on"
    )
    for name, spent in (("environments", answer.env_time), ("replicas", answer.rollout_time)):
        click.echo(f"  {name}: {_shares(spent.seconds)}")
    for state, because in (("idle", answer.env_time.idle_because), ("queued", answer.env_time.queued_because)):
        if because:
            click.echo(f"  {state} because {_shares(because)}")
    for fate, count in sorted(answer.fates.items()):
        click.echo(f"  {fate}: {count}")
    for role, workers in itertools.groupby(answer.workers, key=lambda worker: worker.role):
        _print_workers(ROLE_NAMES[role], list(workers))


def _print_workers(role: str, workers: Sequence[Any]) -> None:
    """A line for each; where there are too many for a screen, one for all of them."""
    if len(workers) > MOST_ROWS:
        busy, slots = sum(worker.busy for worker in workers), sum(worker.slots for worker in workers)
        longest = max(worker.seconds_since_heard for worker in workers)
        click.echo(
            f"  {len(workers)} {role} workers: {worker_states(workers)}, {busy}/{slots} busy, all heard within "
            f"{longest:.1f} s (--json lists them)"
        )
        return
    for worker in workers:
        click.echo(
            f"  {worker.worker_id:16s} {worker.state:8s} {worker.busy}/{worker.slots} "
            f"version {worker.weight_version}, heard {worker.seconds_since_heard:.1f} s ago; {worker.doing}"
        )


def _shares(seconds: Mapping[str, float]) -> str:
    """Each one's share, largest first: "acting 61%, idle 39%"."""
    total = sum(seconds.values()) or 1.0
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {spent / total:.0%}" for name, spent in ordered)


def _print_past(directory: Path, record: RunRecord, state: str, totals: dict[str, Any], as_json: bool) -> None:
    fields = {
        "run": record.id,
        "state": str(state),
        "started": record.started,
        "finished": record.finished,
        "updates": totals.get("updates", 0),
        "trajectories": totals.get("trajectories", 0),
        "success_rate": totals.get("success_rate"),
        "summary": dict(record.summary) if record.summary else None,
    }
    if as_json:
        click.echo(json.dumps(fields))
        return
    click.echo(f"{record.id}: {state}, {fields['updates']} updates, {fields['trajectories']} trajectories")
    if record.finished:
        click.echo(f"ended {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record.finished))}")
    if state in (RunState.INTERRUPTED, RunState.FAILED):
        click.echo(go_on(record.kind, directory))
    if record.summary and (collected := record.summary.get("collected")):
        kept = ", ".join(f"{name} {counts['kept']}" for name, counts in collected["per_task"].items())
        click.echo(f"collected from {collected['teacher']}: {kept}")
    if record.summary and (after := record.summary.get("success_after")):
        before = record.summary.get("success_before")
        then = f"{before['mean']:.1%} -> " if before else ""
        click.echo(f"held-out success {then}{after['mean']:.1%}")


def list_runs(directory: Path) -> None:
    """One line per run, newest first. Raises UserError when there is none."""
    for run in RunDirectory.all_under(directory):
        record, totals = asyncio.run(_read(run))
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
        rate = totals.get("success_rate")
        success = "" if rate is None else f", recent success {rate:.0%}"
        state = run.state(record)
        click.echo(f"{started}  {state:12s} {run.path}  {totals.get('updates', 0)} updates{success}")
