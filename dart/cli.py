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
    RESUME,
    SET,
    endpoint_options,
    run_options,
    take,
)
from dart.core.loopback import without_proxy
from dart.errors import USER_ERROR, UserError
from dart.launch.command import launch

# Child processes call exec at once, so gRPC has nothing to prepare for a fork; it would log every one of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")


class _Group(click.Group):
    """Lists commands in the order of definition; prints a UserError as one message and exits with its code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            fail(str(error), error.exit_code)


def fail(message: str, exit_code: int = USER_ERROR) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Asynchronous multi-turn reinforcement learning for agents that operate a computer.

    Try `make demo`, or: dart train configs/ladder_demo.yaml
    """
    from dart.processes.settings import name_user

    without_proxy(os.environ)
    name_user(os.environ)


@main.command()
@CONFIG
@SET
@RESUME
@INITIAL_WEIGHTS
@click.option("--quiet", is_flag=True, help="Plain lines instead of the live view.")
def train(config: Path, overrides: tuple[str, ...], resume: Path | None, initial_weights: bool, quiet: bool) -> None:
    """Train: run the coordinator and all workers of CONFIG on this machine. Ctrl-C stops all of them."""
    from dart.commands.train import TrainOptions
    from dart.commands.train import train as run

    run(TrainOptions(config, overrides, resume, quiet, initial_weights))


@main.command()
@CONFIG
@SET
@RESUME
@INITIAL_WEIGHTS
@click.option("--quiet", is_flag=True, help="Plain lines instead of the live view.")
@click.option(
    "--run",
    "run_directory",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Begin a run in this directory, or continue the one that is there: for a cluster that restarts it.",
)
@click.option(
    "--host",
    metavar="HOST",
    help="Listen on this address, with tokens and a certificate that RUN keeps; for `dart worker --run`.",
)
@click.option("--parent-watch", is_flag=True, hidden=True, help="End when standard input closes.")
def coordinator(
    config: Path,
    overrides: tuple[str, ...],
    resume: Path | None,
    initial_weights: bool,
    quiet: bool,
    run_directory: Path | None,
    host: str | None,
    parent_watch: bool,
) -> None:
    """Run only the coordinator; start workers elsewhere with `dart worker`."""
    from dart.commands.train import TrainOptions
    from dart.commands.train import train as run

    run(TrainOptions(config, overrides, resume, quiet, initial_weights, False, run_directory, host, parent_watch))


@main.command()
@click.option("--role", required=True, help="env, rollout or train.")
@click.option("--coordinator", "address", metavar="HOST:PORT", help="The coordinator to connect to.")
@click.option(
    "--run",
    "run_directory",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Instead of --coordinator: the directory of `dart coordinator --run`, which has its address and tokens.",
)
@click.option(
    "--id", "worker_id", metavar="NAME", help="A name that stays the same after a restart. [default: host-role-pid]"
)
@click.option("--tls-ca", type=click.Path(path_type=Path), help="Trust this certificate authority, and use TLS.")
@click.option("--tls-certificate", type=click.Path(path_type=Path), help="This worker's certificate, for mTLS.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="The private key of --tls-certificate.")
@click.option("--until-finished", is_flag=True, help="Exit with 0 only when the run is finished, else with 75.")
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
    """Run one worker. The coordinator sends it all other settings; its token is read from DART_TOKEN.

    For more than one training rank: accelerate launch --multi_gpu --gpu_ids all --num_machines 1 --num_processes N
    --main_process_port 0 -m dart worker --role train ...
    """
    from dart.commands.worker import run_worker

    tls = tls_ca, tls_certificate, tls_key
    run_worker(
        role, address, run_directory, worker_id, tls,
        until_finished=until_finished, ending_seconds=ending_seconds if parent_watch else None,
    )  # fmt: skip


main.add_command(launch)


@main.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--tls-ca", type=click.Path(path_type=Path), help="Trust this certificate authority, and use TLS.")
def health(address: str, tls_ca: Path | None) -> None:
    """Ask the coordinator at HOST:PORT whether it is there, as a cluster's probe. It prints what the coordinator says.

    SERVING, or NOT_SERVING while the run makes no progress: the exit code is 0 for both, and 2 if nothing answers.
    """
    from dart.commands.look.health import health as check

    check(address, tls_ca)


@main.command("eval")
@CONFIG
@SET
@click.option(
    "--checkpoint", metavar="FOLDER", help="A checkpoint, or builtin:NAME. [default: the config's model.path]"
)
@endpoint_options
@click.option(
    "--against",
    metavar="FOLDER",
    help="Compare on the same instances with this: another checkpoint, which is evaluated after the first, or the run "
    "directory or evaluation.json of a finished evaluation.",
)
@click.option("--tasks", metavar="A,B,...", help="Task names. [default: the held-out tasks of environment.tasks]")
@click.option(
    "--seeds",
    metavar="FIRST:LAST",
    help="Seeds from FIRST to LAST - 1; none may be a training seed. [default: environment.tasks.eval_seeds]",
)
@click.option(
    "--episodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of instances, going round the tasks, each with its next seed. "
    "[default: every task with each of --seeds if given, else evaluation.episodes]",
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
    help="Sampling temperature; 0 is greedy. [default: evaluation.temperature, else rollout.temperature]",
)
@RESUME
@EXTERNAL_WORKERS
@click.option("--quiet", is_flag=True, help="Plain lines instead of the live view.")
def evaluate(config: Path, overrides: tuple[str, ...], **choices: Any) -> None:
    """Evaluate without training: held-out success with a 95 % interval, overall and per task, pass@k, failure causes.

    With --endpoint, the model behind it is evaluated and none is loaded here. With --against, also print the difference
    between the two on the same instances, with its interval and an exact p-value.
    """
    from dart.commands.endpoint import EndpointOptions
    from dart.commands.evaluate import EvaluateOptions
    from dart.commands.evaluate import evaluate as run

    endpoint = EndpointOptions(**take(choices, ENDPOINT))
    run(EvaluateOptions(config, overrides, endpoint=endpoint, **choices))


@main.command()
@CONFIG
@SET
@click.option(
    "--from",
    "teacher",
    type=click.Choice(["oracle", "endpoint", "policy"]),
    required=True,
    help="What performs the tasks: the scripted oracle, which reads the page; a teacher behind an OpenAI-compatible "
    "chat endpoint; or the config's own model.",
)
@click.option(
    "--checkpoint", metavar="FOLDER", help="With policy: use these weights. [default: the config's model.path]"
)
@endpoint_options
@click.option(
    "--per-task",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="M",
    help="Successes to collect for each task name.",
)
@click.option(
    "--most-attempts",
    type=click.IntRange(min=1),
    metavar="N",
    help="The most attempts at each task name. [default: 10 times --per-task]",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    metavar="K",
    help="With endpoint or policy: attempts at each task instance (name and seed). [default: 1]",
)
@click.option(
    "--seeds",
    metavar="FIRST:LAST",
    help="Seeds from FIRST to LAST - 1; none may be an evaluation seed. [default: environment.tasks.train_seeds]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, max=2),
    metavar="T",
    help="With endpoint or policy: sampling temperature; 0 is greedy. [default: rollout.temperature]",
)
@EXTERNAL_WORKERS
@click.option("--quiet", is_flag=True, help="Plain lines instead of the live view.")
def collect(config: Path, overrides: tuple[str, ...], **choices: Any) -> None:
    """Collect successes on the training tasks, for curation.pool.sources and as a data set, without training."""
    from dart.commands.collect import CollectOptions
    from dart.commands.collect import collect as run
    from dart.commands.endpoint import EndpointOptions

    endpoint = EndpointOptions(**take(choices, ENDPOINT))
    run(CollectOptions(config, overrides=overrides, endpoint=endpoint, **choices))


@main.command()
@run_options
@click.option("--watch", is_flag=True, help="Keep showing it until the run ends or Ctrl-C.")
def status(run: Path | None, address: str | None, tls_ca: Path | None, as_json: bool, watch: bool) -> None:
    """Show what a running run is doing, or how a past one ended. RUN defaults to the newest under runs/.

    If the coordinator requires a token, it is read from the file that the run's config names, or from DART_TOKEN; with
    --address, from DART_TOKEN.
    """
    from dart.commands.look import status as command

    if watch and as_json:
        raise UserError("--watch draws a picture and --json prints a document: leave one of them out")
    show = command.watch if watch else command.status
    show(command.StatusOptions(run, address, tls_ca, as_json))


@main.command()
@run_options
def why(run: Path | None, address: str | None, tls_ca: Path | None, as_json: bool) -> None:
    """Explain why a run makes no progress and what causes it, or why it ended. RUN defaults to the newest under runs/.

    If the coordinator requires a token, it is read from the file that the run's config names, or from DART_TOKEN; with
    --address, from DART_TOKEN.
    """
    from dart.commands.look.status import StatusOptions
    from dart.commands.look.why import why as explain

    explain(StatusOptions(run, address, tls_ca, as_json))


@main.command()
@click.argument("action", type=click.Choice(("pause", "resume", "drain", "checkpoint")))
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--address", metavar="HOST:PORT", help="Control the run of this coordinator. [default: the newest run's]")
@click.option("--tls-ca", type=click.Path(path_type=Path), help="Trust this certificate authority, and use TLS.")
def control(action: str, run: Path | None, address: str | None, tls_ca: Path | None) -> None:
    """Control a run while it trains. RUN defaults to the newest under runs/.

    pause and resume: begin no more trajectories, and begin them again; a run that was paused is still paused after
    --resume. drain: end the run as if the update in progress were its last; it is then finished and cannot be
    continued. checkpoint: save one after the update in progress, and wait for it, up to an hour.

    If the coordinator requires a token, it is read from the file that the run's config names, or from DART_TOKEN; with
    --address, from DART_TOKEN.
    """
    from dart.commands.control import control as command

    command(action, run, address, tls_ca)


@main.command()
@click.argument("directory", default="runs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all", "below", is_flag=True, help="Every run below DIRECTORY, and where its coordinator listens.")
def runs(directory: Path, as_json: bool, below: bool) -> None:
    """List the runs in DIRECTORY, newest first, with their state and success. [default: runs]"""
    from dart.commands.look.status import list_runs

    list_runs(directory, as_json, below=below)


@main.command()
@click.argument("trajectory", required=False)
@click.option("--run", type=click.Path(path_type=Path), help="The run directory. [default: the newest under runs/]")
@click.option("--step", type=click.IntRange(min=1), help="Only this step, counted from 1.")
@click.option(
    "--images/--no-images", default=None, help="Draw the screenshots. [default: where the terminal shows pictures]"
)
@click.option("--json", "as_json", is_flag=True, help="Everything that is known of it, as JSON.")
def show(trajectory: str | None, run: Path | None, step: int | None, images: bool | None, as_json: bool) -> None:
    """Show one TRAJECTORY step by step: what the policy saw, wrote and did. [default: the newest]"""
    from dart.commands.look.show import ShowOptions
    from dart.commands.look.show import show as draw

    draw(ShowOptions(trajectory, run, step, images, as_json))


@main.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="The port; 0 for any free one. [default: 8700, or else any free one]"
)
@click.option("--listening", type=int, hidden=True, help="The file descriptor of a socket that listens already.")
@click.option("--parent-watch", is_flag=True, hidden=True, help="End when standard input closes.")
def view(runs: tuple[Path, ...], host: str, port: int | None, listening: int | None, parent_watch: bool) -> None:
    """Show runs in a browser: curves, workers, tasks, and every trajectory with its screenshots.

    RUNS are run directories, or folders of them; by default all runs under runs/. They may be running, finished or
    interrupted, and nothing in them is changed. A host that is open to the network needs a token, which is read from
    DART_VIEW_TOKEN or made, and is part of the address that is printed.
    """
    from dart.commands.look.dashboard import ViewOptions
    from dart.commands.look.dashboard import view as serve

    serve(ViewOptions(runs, host, port, listening, parent_watch))


@main.command()
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option(
    "--to",
    multiple=True,
    metavar="TRACKER",
    help="tensorboard, wandb, trackio, mlflow or swanlab; may be repeated. [default: the config's tracking.to]",
)
@click.option("--project", help="The project or experiment. [default: the config's tracking.project]")
@click.option("--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--parent-watch", is_flag=True, hidden=True, help="End when standard input closes.")
def track(run: Path | None, to: tuple[str, ...], project: str | None, follow: bool, parent_watch: bool) -> None:
    """Send a run to experiment trackers: curves, held-out success, trajectories as pictures, config and outcome.

    Only what they have not been told yet is sent. `dart train` does this by itself where tracking.to names a tracker.
    RUN defaults to the newest under runs/.
    """
    from dart.commands.track import TrackOptions
    from dart.commands.track import track as send

    send(TrackOptions(run, to, project, follow, parent_watch))


@main.command()
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--version", "weight_version", type=int, help="Weight version. [default: the newest checkpoint]")
def export(run: str, out: Path, weight_version: int | None) -> None:
    """Copy a run's checkpoint to OUT as a Hugging Face folder that `from_pretrained` loads.

    RUN is a run directory, or the URL of a checkpoint that checkpoint.upload has copied: s3://bucket/prefix/RUN/v000050.
    """
    from dart.commands.export import ExportOptions
    from dart.commands.export import export as copy

    copy(ExportOptions(run, out, weight_version))


@main.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@SET
def doctor(config: Path | None, overrides: tuple[str, ...]) -> None:
    """Show what is missing on this machine and how to fix it. With CONFIG, check what that run needs."""
    from dart.commands.doctor import doctor as check

    check(config, overrides)


@main.command("serve-world")
@CONFIG
@SET
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="The port; 0 for any free one."
)
def serve_world(config: Path, overrides: tuple[str, ...], host: str, port: int) -> None:
    """Serve the world of CONFIG as an OpenEnv environment server, with environment.slots sessions at most.

    A token that clients have to send is read from DART_TOKEN; a host that is open to the network needs one.
    """
    from dart.commands.serve_world import ServeOptions
    from dart.commands.serve_world import serve_world as serve

    serve(ServeOptions(config, overrides, host, port))
