"""The command line. Only click is imported here; each command brings in what it needs when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from dart import __version__
from dart.cli_options import (
    CONFIG,
    ENDPOINT,
    EXTERNAL_WORKERS,
    INITIAL_WEIGHTS,
    OPTIONAL_CONFIG,
    QUIET,
    RESUME,
    SET,
    endpoint_options,
    run_options,
    take,
)
from dart.core.loopback import without_proxy
from dart.errors import MAY_PASS, USER_ERROR, UserError, first_of
from dart.launch.command import launch
from dart.shortage import raise_open_files, shortage

# Child processes call exec at once, so gRPC has nothing to prepare for a fork; it would log every one of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")


GROUPS = {  # every command, as `dart --help` lists them
    "Train and evaluate": ("train", "eval", "control"),
    "Look at runs": ("status", "why", "runs", "show", "view", "track"),
    "Data and models": ("collect", "export"),
    "Clusters": ("launch", "coordinator", "worker", "health"),
    "Machines and worlds": ("doctor", "serve-world"),
}


class _Group(click.Group):
    """Lists commands by GROUPS; prints a UserError as one message and exits with its code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        grouped = [name for names in GROUPS.values() for name in names]
        return [*grouped, *sorted(self.commands.keys() - {*grouped})]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        others = tuple(self.list_commands(ctx)[sum(map(len, GROUPS.values())) :])
        for heading, names in (*GROUPS.items(), *([("Others", others)] if others else [])):
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=200)) for name in names])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            fail(str(error), error.exit_code)
        except (OSError, MemoryError, RuntimeError, ExceptionGroup) as error:
            if not (short := shortage(first_of(error))):
                raise
            fail(short, MAY_PASS)


def fail(message: str, exit_code: int = USER_ERROR) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(exit_code)


@click.group(
    cls=_Group,
    epilog="Example: dart train configs/ladder_demo.yaml",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__)
def main() -> None:
    """Asynchronous multi-turn reinforcement learning for agents that operate a computer."""
    from dart.processes.settings import name_user

    raise_open_files()
    without_proxy(os.environ)
    name_user(os.environ)


@main.command(epilog="Example: dart train configs/ladder_demo.yaml --set stop.updates=20")
@CONFIG
@SET
@RESUME
@INITIAL_WEIGHTS
@QUIET
def train(config: Path, overrides: tuple[str, ...], resume: Path | None, initial_weights: bool, quiet: bool) -> None:
    """Train with all processes on this machine; Ctrl-C ends them."""
    from dart.commands.train import TrainOptions
    from dart.commands.train import train as run

    run(TrainOptions(config, overrides, resume, quiet, initial_weights))


@main.command(epilog="Example: dart coordinator configs/miniwob_cpu.yaml --run runs/shared")
@CONFIG
@SET
@RESUME
@INITIAL_WEIGHTS
@QUIET
@click.option(
    "--run",
    "run_directory",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Begin the run in this directory, or continue the one that is there.",
)
@click.option("--host", metavar="HOST", help="Listen on this address, with tokens and a certificate that RUN keeps.")
@click.option("--parent-watch", is_flag=True, hidden=True, help="End when standard input closes.")
@click.option("--again", hidden=True, help="The command that continues the run; @run is its directory.")
def coordinator(
    config: Path,
    overrides: tuple[str, ...],
    resume: Path | None,
    initial_weights: bool,
    quiet: bool,
    run_directory: Path | None,
    host: str | None,
    parent_watch: bool,
    again: str | None,
) -> None:
    """Run only the coordinator, for workers of `dart worker`."""
    from dart.commands.train import TrainOptions
    from dart.commands.train import train as run

    run(
        TrainOptions(config, overrides, resume, quiet, initial_weights, False, run_directory, host, parent_watch, again)
    )


@main.command(epilog="Example: dart worker --role env --run runs/shared")
@click.option("--role", required=True, help="env, rollout or train.")
@click.option("--coordinator", "address", metavar="HOST:PORT", help="The coordinator to connect to.")
@click.option(
    "--run",
    "run_directory",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Instead of --coordinator: the directory of `dart coordinator --run`.",
)
@click.option("--id", "worker_id", metavar="NAME", help="Its name, also after a restart. [default: host-role-pid]")
@click.option("--tls-ca", type=click.Path(path_type=Path), help="Trust this certificate authority, and use TLS.")
@click.option("--tls-certificate", type=click.Path(path_type=Path), help="This worker's certificate, for mTLS.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="The private key of --tls-certificate.")
@click.option("--until-finished", is_flag=True, help="Exit with 0 only if the run is finished, else with 75.")
@click.option("--parent-watch", is_flag=True, hidden=True, help="End when standard input closes.")
@click.option("--ending-seconds", type=float, default=20.0, hidden=True, help="How long that may take.")
def worker(
    role: str,
    address: str | None,
    run_directory: Path | None,
    worker_id: str | None,
    tls_ca: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    until_finished: bool,
    parent_watch: bool,
    ending_seconds: float,
) -> None:
    """Run one worker; its settings come from the coordinator.

    Its token is read from DART_TOKEN. For several training ranks: accelerate launch --multi_gpu --gpu_ids all
    --num_machines 1 --num_processes N --main_process_port 0 -m dart worker --role train ...
    """
    from dart.commands.worker import run_worker

    tls = tls_ca, tls_certificate, tls_key
    run_worker(
        role, address, run_directory, worker_id, tls,
        until_finished=until_finished, ending_seconds=ending_seconds if parent_watch else None,
    )  # fmt: skip


main.add_command(launch)


@main.command(epilog="Example: dart health 10.0.0.5:50051")
@click.argument("address", metavar="HOST:PORT")
@click.option("--tls-ca", type=click.Path(path_type=Path), help="Trust this certificate authority, and use TLS.")
def health(address: str, tls_ca: Path | None) -> None:
    """Ask a coordinator whether it is there, as probes do.

    It says SERVING, or NOT_SERVING while the run makes no progress. Exit code: 0 for both, 2 if nothing answers.
    """
    from dart.commands.look.health import health as check

    check(address, tls_ca)


@main.command("eval", epilog="Example: dart eval runs/demo/config.yaml --checkpoint runs/demo/checkpoints/v000050")
@CONFIG
@SET
@click.option(
    "--checkpoint", metavar="FOLDER", help="A checkpoint, or builtin:NAME. [default: the config's model.path]"
)
@endpoint_options
@click.option(
    "--against",
    metavar="FOLDER",
    help="Compare on the same instances with another checkpoint, or with a finished evaluation's directory.",
)
@click.option("--tasks", metavar="A,B,...", help="Task names. [default: the config's held-out tasks]")
@click.option(
    "--seeds",
    metavar="FIRST:LAST",
    help="Seeds from FIRST to LAST - 1, no training seeds. [default: environment.tasks.eval_seeds]",
)
@click.option(
    "--episodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Instances: tasks in turn, each with its next seed. [default: all of --seeds, or evaluation.episodes]",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    metavar="K",
    help="Episodes per instance, for pass@1 to pass@K. [default: evaluation.samples]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, max=2),
    metavar="T",
    help="Sampling temperature; 0 is greedy. [default: the config's]",
)
@RESUME
@EXTERNAL_WORKERS
@QUIET
def evaluate(config: Path, overrides: tuple[str, ...], **choices: Any) -> None:
    """Measure held-out success, without training.

    It is printed with its 95 % interval, overall and per task, with pass@k, what failures have in common, and how it
    differs from --against. With --endpoint, the model behind it is evaluated, and none is loaded here.
    """
    from dart.commands.endpoint import EndpointOptions
    from dart.commands.evaluate import EvaluateOptions
    from dart.commands.evaluate import evaluate as run

    endpoint = EndpointOptions(**take(choices, ENDPOINT))
    run(EvaluateOptions(config, overrides, endpoint=endpoint, **choices))


@main.command(epilog="Example: dart collect configs/ladder_demo.yaml --from oracle")
@CONFIG
@SET
@click.option(
    "--from",
    "teacher",
    type=click.Choice(["oracle", "endpoint", "policy"]),
    required=True,
    help="What acts: a script that reads the page, the model behind --endpoint, or the config's own.",
)
@click.option("--checkpoint", metavar="FOLDER", help="With policy: its weights. [default: the config's model.path]")
@endpoint_options
@click.option(
    "--per-task",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="M",
    help="Successes for each task name.",
)
@click.option(
    "--most-attempts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Attempts at each task name. [default: 10 times --per-task]",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    metavar="K",
    help="With endpoint or policy: attempts at each instance. [default: 1]",
)
@click.option(
    "--seeds",
    metavar="FIRST:LAST",
    help="Seeds from FIRST to LAST - 1, no evaluation seeds. [default: environment.tasks.train_seeds]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, max=2),
    metavar="T",
    help="With endpoint or policy: sampling temperature; 0 is greedy. [default: the config's]",
)
@EXTERNAL_WORKERS
@QUIET
def collect(config: Path, overrides: tuple[str, ...], **choices: Any) -> None:
    """Collect successes to imitate, or for curation.pool.sources."""
    from dart.commands.collect import CollectOptions
    from dart.commands.collect import collect as run
    from dart.commands.endpoint import EndpointOptions

    endpoint = EndpointOptions(**take(choices, ENDPOINT))
    run(CollectOptions(config, overrides=overrides, endpoint=endpoint, **choices))


@main.command(epilog="Example: dart status --watch")
@run_options
@click.option("--watch", is_flag=True, help="Until the run ends, or Ctrl-C.")
def status(run: Path | None, address: str | None, tls_ca: Path | None, as_json: bool, watch: bool) -> None:
    """Show what a run is doing, or how it ended.

    RUN is the newest under runs/ by default. Its coordinator's token is read from the file that its config names, or
    from DART_TOKEN.
    """
    from dart.commands.look import status as command

    if watch and as_json:
        raise UserError("--watch draws a picture and --json prints a document: leave one of them out")
    show = command.watch if watch else command.status
    show(command.StatusOptions(run, address, tls_ca, as_json))


@main.command(epilog="Example: dart why runs/demo")
@run_options
def why(run: Path | None, address: str | None, tls_ca: Path | None, as_json: bool) -> None:
    """Explain why a run makes no progress, or why it ended.

    RUN is the newest under runs/ by default. For tokens see `dart status`.
    """
    from dart.commands.look.status import StatusOptions
    from dart.commands.look.why import why as explain

    explain(StatusOptions(run, address, tls_ca, as_json))


@main.command(epilog="Example: dart control checkpoint runs/demo")
@click.argument("action", type=click.Choice(("pause", "resume", "drain", "checkpoint")))
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--address", metavar="HOST:PORT", help="Control the run of this coordinator. [default: the newest run's]")
@click.option("--tls-ca", type=click.Path(path_type=Path), help="Trust this certificate authority, and use TLS.")
def control(action: str, run: Path | None, address: str | None, tls_ca: Path | None) -> None:
    """Pause, resume, finish or save a run while it trains.

    pause: begin no more trajectories, also after --resume; resume: begin them again. drain: end the run as if the
    update in progress were its last; it is then finished for good. checkpoint: save one after that update, and wait for
    it, up to an hour. RUN is the newest under runs/ by default. For tokens see `dart status`.
    """
    from dart.commands.control import control as command

    command(action, run, address, tls_ca)


@main.command(epilog="Example: dart runs --all")
@click.argument("directory", default="runs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all", "below", is_flag=True, help="At any depth, with coordinators' addresses.")
def runs(directory: Path, as_json: bool, below: bool) -> None:
    """List the runs in DIRECTORY (runs/) with their success."""
    from dart.commands.look.status import list_runs

    list_runs(directory, as_json, below=below)


@main.command(epilog="Example: dart show g12-3 --run runs/demo --step 2")
@click.argument("trajectory", required=False)
@click.option("--run", type=click.Path(path_type=Path), help="Its run. [default: the newest under runs/]")
@click.option("--step", type=click.IntRange(min=1), help="Only this step, counted from 1.")
@click.option("--images/--no-images", default=None, help="Draw the screenshots. [default: if the terminal can]")
@click.option("--json", "as_json", is_flag=True, help="All of it, as JSON.")
def show(trajectory: str | None, run: Path | None, step: int | None, images: bool | None, as_json: bool) -> None:
    """Show a trajectory: what the policy saw, wrote and did.

    TRAJECTORY is the newest by default.
    """
    from dart.commands.look.show import ShowOptions
    from dart.commands.look.show import show as draw

    draw(ShowOptions(trajectory, run, step, images, as_json))


@main.command(epilog="Example: dart view runs")
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="The port; 0: any free one. [default: 8700, or any free one]"
)
@click.option("--listening", type=int, hidden=True, help="The file descriptor of a socket that listens already.")
@click.option("--parent-watch", is_flag=True, hidden=True, help="End when standard input closes.")
def view(runs: tuple[Path, ...], host: str, port: int | None, listening: int | None, parent_watch: bool) -> None:
    """Show runs in a browser: curves, workers, tasks, trajectories.

    RUNS are run directories, or folders of them, in any state; by default runs. Nothing in them is changed. A host that
    is open to the network needs a token: that of DART_VIEW_TOKEN, or one that is made and printed with the address.
    """
    from dart.commands.look.dashboard import ViewOptions
    from dart.commands.look.dashboard import view as serve

    serve(ViewOptions(runs, host, port, listening, parent_watch))


@main.command(epilog="Example: dart track runs/demo --to tensorboard")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option(
    "--to",
    multiple=True,
    metavar="TRACKER",
    help="tensorboard, wandb, trackio, mlflow or swanlab; repeatable. [default: tracking.to]",
)
@click.option("--project", help="The project or experiment. [default: tracking.project]")
@click.option("--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--parent-watch", is_flag=True, hidden=True, help="End when standard input closes.")
def track(run: Path | None, to: tuple[str, ...], project: str | None, follow: bool, parent_watch: bool) -> None:
    """Send a run to experiment trackers, as far as they lack it.

    That is curves, held-out success, trajectories as pictures, config and outcome. `dart train` does so by itself if
    tracking.to names a tracker. RUN is the newest under runs/ by default.
    """
    from dart.commands.track import TrackOptions
    from dart.commands.track import track as send

    send(TrackOptions(run, to, project, follow, parent_watch))


@main.command(epilog="Example: dart export runs/demo model")
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--version", "weight_version", type=int, help="Weight version. [default: the newest checkpoint]")
def export(run: str, out: Path, weight_version: int | None) -> None:
    """Copy a checkpoint to OUT, a folder for `from_pretrained`.

    RUN is a run directory, or the URL of an uploaded checkpoint: s3://bucket/prefix/RUN/v000050.
    """
    from dart.commands.export import ExportOptions
    from dart.commands.export import export as copy

    copy(ExportOptions(run, out, weight_version))


@main.command(epilog="Example: dart doctor configs/ladder_demo.yaml")
@OPTIONAL_CONFIG
@SET
def doctor(config: Path | None, overrides: tuple[str, ...]) -> None:
    """Say what this machine lacks (for CONFIG), and the remedy."""
    from dart.commands.doctor import doctor as check

    check(config, overrides)


@main.command("serve-world", epilog="Example: dart serve-world configs/miniwob_cpu.yaml")
@CONFIG
@SET
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="The port; 0: any free one."
)
def serve_world(config: Path, overrides: tuple[str, ...], host: str, port: int) -> None:
    """Serve CONFIG's world as an OpenEnv environment server.

    It has environment.slots sessions. Clients have to send the token of DART_TOKEN, which an open host needs.
    """
    from dart.commands.serve_world import ServeOptions
    from dart.commands.serve_world import serve_world as serve

    serve(ServeOptions(config, overrides, host, port))
