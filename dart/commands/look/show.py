"""`dart show`: one trajectory in the terminal, step by step, with screenshots where the terminal can draw them."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
from pydantic import TypeAdapter
from rich.console import Console, RenderableType
from rich.text import Text

from dart.core.json_text import to_json
from dart.errors import UserError
from dart.inspection.inspector import Inspector
from dart.inspection.records import StepDetail, TrajectoryDetail
from dart.inspection.wording import plain, span
from dart.rundir import RunDirectory

MOST_TEXT = 2000
"""Characters of one text that are shown."""
ROWS = 18
"""Height of a screenshot, in lines of the terminal."""


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """The command line of `dart show`. `trajectory` None: the newest. `step`: only that one, counted from 1."""

    trajectory: str | None = None
    run: Path | None = None
    step: int | None = None
    images: bool | None = None
    """None: where the output is a terminal that has an image protocol."""
    as_json: bool = False


def show(options: ShowOptions) -> None:
    """Print it. Raises UserError for a trajectory or a step that is not there."""
    asyncio.run(_show(options))


async def _show(options: ShowOptions) -> None:
    directory = RunDirectory.chosen(options.run)
    inspector = await Inspector.open(directory)
    try:
        detail = await inspector.trajectory(options.trajectory or await _newest(inspector))
        steps = _chosen(detail, options.step)
        if options.as_json:
            click.echo(TypeAdapter(TrajectoryDetail).dump_json(replace(detail, steps=steps)))
            return
        draw = _pictures(options.images)
        console = Console(highlight=False)
        for line in _header(detail):
            console.print(line, soft_wrap=True)
        for step in steps:
            console.print()
            if draw is not None and step.image is not None and step.image.held:
                data, _ = await inspector.image(step.image.sha256)
                console.print(draw(data))
            for line in _step(step, len(detail.steps)):
                console.print(line, soft_wrap=True)
    finally:
        await inspector.close()


async def _newest(inspector: Inspector) -> str:
    page = await inspector.trajectories(limit=1)
    if not page.rows:
        raise UserError(f"run {inspector.run_id} has no trajectory yet: wait for the first, or name another run")
    return page.rows[0].id


def _chosen(detail: TrajectoryDetail, step: int | None) -> tuple[StepDetail, ...]:
    if step is None:
        return detail.steps
    if not 1 <= step <= len(detail.steps):
        raise UserError(f"--step {step}: {detail.row.id} has steps 1 to {len(detail.steps)}")
    return (detail.steps[step - 1],)


def _header(detail: TrajectoryDetail) -> Iterator[RenderableType]:
    row = detail.row
    yield Text(plain(row.instruction or row.task, MOST_TEXT), style="bold")
    yield Text(
        f"{'success' if row.success else 'failure'}, reward {row.reward:g}, ended by {plain(row.termination)} after "
        f"{row.steps} of {row.step_limit} steps; {plain(row.fate)}"
    )
    versions = [version for version in (row.oldest_version, row.newest_version) if version is not None]
    yield Text(
        f"{plain(row.id)}: {plain(row.suite)}/{plain(row.task)} seed {row.seed}, attempt {row.attempt}"
        + (f", version {span(versions)}" if versions else "")
        + f", {row.finished - row.started:.1f} s"
        + (f", a copy of {plain(row.pooled_from)} from the pool" if row.pooled_from else ""),
        style="dim",
    )
    if detail.evidence:
        yield Text(f"evidence: {plain(to_json(detail.evidence), MOST_TEXT)}", style="dim")


def _step(step: StepDetail, count: int) -> Iterator[RenderableType]:
    facts = [f"{len(step.token_ids)} tokens"]
    if step.versions:
        facts.append(f"version {span([version for version, _, _ in step.versions])}")
    if step.logprobs:
        facts.append(f"mean log-probability {sum(step.logprobs) / len(step.logprobs):.3f}")
    if step.advantage is not None:
        facts.append(f"advantage {step.advantage:+.3f}")
    if step.entropy is not None:
        chosen = "selected" if step.selected else "not selected for training: less uncertain than others of its group"
        facts.append(f"entropy {step.entropy:.3f} ({chosen})")
    if step.reading_rules:
        facts.append(f"read by {plain(step.reading_rules)}")
    if step.truncated:
        facts.append("cut off at the most tokens")
    yield Text(f"step {step.index + 1} of {count}: ", style="bold") + Text(plain(step.label), style="bold cyan")
    yield Text("  " + ", ".join(facts), style="dim")
    text = step.text.strip()
    for line in text[:MOST_TEXT].splitlines():
        yield Text(f"  {plain(line, MOST_TEXT)}")
    if len(text) > MOST_TEXT:
        yield Text(f"  … and {len(text) - MOST_TEXT:,} more characters: `dart view` shows all", style="dim")
    if step.parse_error:
        yield Text(f"  cannot be read: {plain(step.parse_error)}", style="red")
    if step.last_action_error:
        yield Text(f"  the action before failed: {plain(step.last_action_error)}", style="red")


def _pictures(wanted: bool | None) -> Callable[[bytes], RenderableType] | None:
    """Draws a screenshot's bytes; None where there are to be no pictures."""
    if wanted is False or (wanted is None and not sys.stdout.isatty()):
        return None
    try:
        from PIL import Image
        from textual_image import renderable
    except ImportError as error:
        if wanted:
            raise UserError(f"--images needs {error.name}: pip install 'dart-gui-rl[view]'") from None
        return None
    protocols = (renderable.TGPImage, renderable.SixelImage)
    if wanted is None and renderable.Image not in protocols:
        return None
    return lambda data: renderable.Image(Image.open(io.BytesIO(data)), height=ROWS)
