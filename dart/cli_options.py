"""Options that several commands have. Only click is imported here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def _config(command: Callable[..., Any], *, required: bool = True) -> Callable[..., Any]:
    """The config's path, which is read and checked before the command imports what it needs to run: a mistake in it is
    told at once. A pipe can be read only once, which is left to the command."""

    @functools.wraps(command)
    def checked(config: Path | None, overrides: tuple[str, ...], **choices: Any) -> Any:
        if config is not None and (config.is_file() or config.is_dir() or not config.exists()):
            from dart.config import load

            load(config, overrides)
        return command(config=config, overrides=overrides, **choices)

    return click.argument("config", required=required, type=click.Path(path_type=Path))(checked)


CONFIG = _config
OPTIONAL_CONFIG = functools.partial(_config, required=False)
SET = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Change a field of the config."
)
RESUME = click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Continue this run.")
INITIAL_WEIGHTS = click.option(
    "--initial-weights",
    is_flag=True,
    help="With a run that is continued: start from the weights of model.path, whatever checkpoints there are.",
)
EXTERNAL_WORKERS = click.option(
    "--external-workers",
    is_flag=True,
    help="Start no workers on this machine; start them elsewhere with `dart worker`, as for `dart coordinator`.",
)


def endpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The address of a model behind an OpenAI-compatible chat endpoint (`dart.commands.endpoint`)."""
    options = (
        click.option(
            "--endpoint",
            metavar="URL",
            help="Base URL of an OpenAI-compatible chat endpoint, for example http://127.0.0.1:8000/v1.",
        ),
        click.option("--endpoint-model", metavar="NAME", help="The endpoint's model, as its /models lists it."),
        click.option("--endpoint-key", metavar="SOURCE", help="The endpoint's key, as env:NAME or file:PATH."),
        click.option(
            "--endpoint-system",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Text sent to the endpoint first, when agent.prompt does not say how actions are written.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


ENDPOINT = ("endpoint", "endpoint_model", "endpoint_key", "endpoint_system")


def take(choices: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Remove the named options from `choices` and return them."""
    return {name: choices.pop(name) for name in names}


def run_options(command: Callable[..., object]) -> Callable[..., object]:
    """Options that name a run, live or past, and say how to reach its coordinator."""
    options = (
        click.argument("run", required=False, type=click.Path(path_type=Path)),
        click.option("--address", metavar="HOST:PORT", help="Ask this coordinator. [default: the newest run's]"),
        click.option(
            "--tls-ca", type=click.Path(path_type=Path), help="Trust this certificate authority, and use TLS."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command
