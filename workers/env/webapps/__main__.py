"""`python -m dart.workers.env.webapps CONFIG`: try tasks before they are trained on (docs/worlds.md)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from dart.config import Config, load
from dart.core.action import Finish
from dart.core.types import Task
from dart.errors import UserError
from dart.workers.env.webapps.environment import SUITE, WebAppEnv
from dart.workers.env.webapps.options import WebAppsOptions
from dart.workers.env.webapps.world import WebApps
from dart.worlds import EnvironmentFailure
from dart.worlds.missing import at_home
from dart.worlds.plugs import read_options


async def try_tasks(config: Config, names: Sequence[str], pictures: Path | None) -> list[str]:
    """Print a line for each task; the names of those that are wrong. First screenshots go to the folder `pictures`."""
    options = read_options(WebApps, config.environment.options)
    assert isinstance(options, WebAppsOptions)
    world, wrong = WebApps(), []
    try:
        await world.start(options, config.environment.viewport)
        env = await world.lease()
        assert isinstance(env, WebAppEnv)
        for name in names:
            try:
                problem = await _tried(env, name, options, pictures)
            except (UserError, EnvironmentFailure) as error:
                problem = str(error)
            wrong += [name] if problem else []
            click.echo(f"{'wrong' if problem else 'ok   '}  {name}" + (f": {problem}" if problem else ""))
            await env.renew()
    finally:
        await world.close()
    return wrong


async def _tried(env: WebAppEnv, name: str, options: WebAppsOptions, pictures: Path | None) -> str:
    """What is wrong with the task; empty if nothing is."""
    seen = await env.reset(Task(SUITE, name))
    if pictures is not None:
        (pictures / f"{name}.png").write_bytes(seen.image.data)
    if reward := (await env.judge(Finish(), False)).reward:
        return f"its reward is {reward:g} when nothing has been done: the application may not show its state"
    golden = at_home(options.tasks_folder) / name / "golden_patch.py"
    if not golden.is_file():
        return ""
    await env.reset(Task(SUITE, name))
    assert env.session is not None
    ran = await env.session.run(golden.read_text(encoding="utf-8"))
    if ran.code:
        return f"its golden_patch.py ended with {ran.code}: {ran.told}"
    reward = (await env.judge(Finish(), False)).reward
    return "" if reward == 1 else f"its reward is {reward:g} after its golden_patch.py"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("tasks", nargs=-1)
@click.option("--screenshots", type=click.Path(path_type=Path), help="A folder for each task's first screenshot.")
def main(config: Path, tasks: tuple[str, ...], screenshots: Path | None) -> None:
    """Try TASKS of a CONFIG of the world webapps, or all of them, before they are trained on.

    Each is begun and judged with nothing done, which must give 0. If its bundle has a golden_patch.py, that is then run
    in a new session, which must give 1. The exit code is 1 if a task is wrong.
    """
    try:
        read = load(config)
        if read.environment.kind != SUITE:
            raise UserError(f"environment.kind is {read.environment.kind}: name a config of the world {SUITE}")
        if screenshots is not None:
            screenshots.mkdir(parents=True, exist_ok=True)
        wrong = asyncio.run(try_tasks(read, tasks or read.environment.tasks.all, screenshots))
    except UserError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
