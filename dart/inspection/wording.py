"""A `Status` as text, for `dart status`, `dart why`, the live view and the dashboard: the same facts in the same words.
And an action in a few words.

What a worker sends (its name, its failures) may hold anything. Everything that leaves this module is free of control
characters (`plain`), so that no worker can move the viewer's cursor, and none of it is rich markup.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dart.core import action as a
from dart.core.status import LEARNING, Quarantined, Stall, Status, WorkerStatus

MOST_ROWS = 12
"""Tasks, or workers of one role, that are shown one by one; more are shown together."""
SHOWN_ABOVE = ("updates", "trajectories", "prompt_tokens", "cached_tokens")
"""Counters that `headline` and `details` have words for."""
MOST_CHARACTERS = 300
"""Characters shown of one text from a worker."""


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text on one line, without control characters, and not longer than `most`."""
    line = "".join(character for character in " ".join(text.split()) if character.isprintable())
    return line if len(line) <= most else line[: most - 1] + "…"


def elapsed(seconds: float) -> str:
    """ "07:12" for minutes and seconds; hours are minutes too."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:02d}:{rest:02d}"


def headline(status: Status) -> str:
    """The run's state on one line."""
    if status.activity:
        return f"{status.phase}: {plain(status.activity)}"
    figures = status.figures
    counts, usage = figures.counts, figures.usage
    per_minute = 60 * counts.trajectories / figures.train_seconds if figures.train_seconds > 0 else 0.0
    versions = [worker.weight_version for worker in status.workers if worker.role == "rollout"]
    if not figures.train_seconds and not counts.trajectories:
        return status.phase  # nothing has been trained (yet)
    success = "" if figures.success_rate is None else f"success {figures.success_rate:.0%}, "
    phase = f"{status.phase} (paused)" if status.paused else status.phase
    line = (
        f"{phase}: update {counts.updates}, {success}{counts.trajectories} trajectories ({per_minute:.0f}/min), "
        f"environments {usage.env_utilisation:.0%}, "
        f"replicas {usage.rollout_utilisation:.0%}, staleness {counts.staleness.mean:.1f}"
    )
    return f"{line}, version {span(versions)}" if versions else line


def details(status: Status) -> Iterator[str]:
    """Lines that say what was sampled and trained on, where the time went and why, what became of the trajectories."""
    counts, usage = status.figures.counts, status.figures.usage
    yield (
        f"{counts.env_steps} steps, {usage.trained_actions_per_minute:.0f} actions/min trained on "
        f"({usage.trained_tokens_per_minute / 60:,.0f} tokens/s), "
        f"trainer busy {usage.trainer_utilisation:.0%}"
    )
    if counts.prefix_cached is not None:
        yield f"prompts: {counts.prefix_cached:.0%} of their tokens were in a replica's prefix cache"
    for name, spent in (("environments", status.env_time), ("replicas", status.rollout_time)):
        if spent.seconds:
            yield f"{name}: {shares(spent.seconds)}"
    for state, because in (("idle", status.env_time.idle_because), ("queued", status.env_time.queued_because)):
        if because:
            yield f"{state} because {shares(because)}"
    for fate, count in sorted(counts.fates.items()):
        yield f"{plain(fate)}: {count}"
    if line := counters(status):
        yield line
    if counts.reading_rules:
        rules = sorted(counts.reading_rules.items(), key=lambda item: -item[1])
        yield f"steps read by a rule: {', '.join(f'{plain(name)} {count}' for name, count in rules)}"


def counters(status: Status) -> str:
    """The other counters that are not 0, by their names: "weight syncs 18, unparsable 2"."""
    counts = status.figures.counts.whole()
    return ", ".join(
        f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count and name not in SHOWN_ABOVE
    )


def stall_lines(stall: Stall) -> Iterator[str]:
    """Lines that say what waits for what, or why nothing is learnt, the culprit's last failure, and what to do."""
    learning = stall.kind == LEARNING
    word = "waiting" if stall.deliberate else "stalled"
    yield plain(stall.told) if learning else f"{word} for {elapsed(stall.seconds)}: {plain(stall.told)}"
    if stall.failure:
        yield f"  {'the last one' if learning else 'its last failure'}: {plain(stall.failure)}"
    if stall.advice:
        yield f"  what to do: {plain(stall.advice, 400)}"


_WITHOUT_WORK = {
    "task": ("quarantined", "task"), "environments": ("quarantined", "environments of"),
    "worker": ("quarantined", "worker"), "refused": ("refused", "worker"),
}  # fmt: skip
"""Kind of `Quarantined` → what became of what."""


def quarantine_lines(quarantined: Sequence[Quarantined]) -> Iterator[str]:
    """A line for each task, worker, and worker's environments, that get no work; no more than fit on a screen."""
    for one in quarantined[:MOST_ROWS]:
        rests = f" for {elapsed(one.seconds_left)} more" if one.seconds_left else ""
        state, what = _WITHOUT_WORK[one.kind]
        yield f"{state}{rests}: {what} {plain(one.name, 60)}: {plain(one.reason)}"
    if (more := len(quarantined) - MOST_ROWS) > 0:
        yield f"quarantined: {more} more"


def quiet_line(quiet: Mapping[str, float]) -> str:
    """ "last step 2 s ago, last update 40 s ago"; empty before any progress."""
    return ", ".join(f"last {plain(name)} {seconds:.0f} s ago" for name, seconds in sorted(quiet.items()))


def shares(seconds: Mapping[str, float]) -> str:
    """Each one's share, largest first: "acting 61%, idle 39%"."""
    total = sum(seconds.values()) or 1.0
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{plain(name)} {spent / total:.0%}" for name, spent in ordered)


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The row of one worker, or of all workers of a role together. Cells that do not apply to the role are empty."""

    name: str
    role: str
    state: str
    busy: str
    version: str
    heard: str
    doing: str


COLUMNS = ("worker", "role", "state", "busy", "version", "heard", "does")


def worker_rows(status: Status) -> Iterator[WorkerRow]:
    """A row for each worker; one row for all workers of a role when it has too many for a screen."""
    for role, members in itertools.groupby(status.workers, key=lambda worker: worker.role):
        workers = list(members)
        if len(workers) > MOST_ROWS:
            yield _row(f"{len(workers)} workers", role, workers, status.doing.get(role, ""))
        else:
            yield from (_row(worker.worker_id, role, [worker], worker.doing) for worker in workers)


def _row(name: str, role: str, workers: Sequence[WorkerStatus], doing: str) -> WorkerRow:
    states = Counter(worker.state for worker in workers)
    state = ", ".join(f"{count} {state}" for state, count in states.items()) if len(workers) > 1 else workers[0].state
    return WorkerRow(
        name=plain(name, 60),
        role=role,
        state=plain(state),
        busy="" if role == "train" else f"{sum(w.busy for w in workers)}/{sum(w.slots for w in workers)}",
        version="" if role == "env" else span([worker.weight_version for worker in workers]),
        heard=f"{max(worker.seconds_since_heard for worker in workers):.1f} s ago",
        doing=plain(doing),
    )


def worker_lines(status: Status) -> Iterator[str]:
    """The rows as aligned lines, under the column names."""
    rows = [(row.name, row.role, row.state, row.busy, row.version, row.heard, row.doing) for row in worker_rows(status)]
    if not rows:
        return
    widths = [max(len(cells[column]) for cells in (COLUMNS, *rows)) for column in range(len(COLUMNS))]
    for cells in (COLUMNS, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def span(values: Sequence[int]) -> str:
    """ "3" where all are the same, else "2 to 4"."""
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"


# ---- actions ----


def action_label(action: a.Action | None, parse_error: str = "") -> str:
    """The action in a few words: "click (0.50, 0.25)", "type “hello”". Without an action, why there is none."""
    if action is None:
        return f"no action: {plain(parse_error, 80)}" if parse_error else "no action"
    return _LABELS[type(action)](action)


def _at(point: a.Point | None) -> str:
    return "" if point is None else f" ({point.x:.2f}, {point.y:.2f})"


def _click(click: a.Click) -> str:
    times = {1: "", 2: "double ", 3: "triple "}.get(click.count, f"{click.count}× ")
    held = f" for {click.hold_seconds:g} s" if click.hold_seconds else ""
    button = "" if click.button == "left" else f"{click.button} "
    modifiers = "".join(f"{name}+" for name in click.modifiers)
    return f"{modifiers}{times}{button}click{_at(click.at)}{held}"


def _scroll(scroll: a.Scroll) -> str:
    ways = [(scroll.dy, "down", "up"), (scroll.dx, "right", "left")]
    moved = [f"{more if amount > 0 else less} {abs(amount)}" for amount, more, less in ways if amount]
    return f"scroll {' '.join(moved) or '0'}{_at(scroll.at)}"


def _drag(drag: a.Drag) -> str:
    return f"drag{_at(drag.path[0])} to{_at(drag.path[-1])}" if drag.path else "drag"


def _keys(keys: a.Keys) -> str:
    mode = "" if keys.mode == "press" else f" {keys.mode}"
    return f"keys {plain('+'.join(keys.keysyms), 40)}{mode}"


def _finish(finish: a.Finish) -> str:
    answer = f": {plain(finish.answer, 60)}" if finish.answer else ""
    return f"finish ({finish.status}){answer}"


def _several(several: a.Several) -> str:
    return "; ".join(action_label(one) for one in several.actions)


_LABELS: Mapping[type, Callable[..., str]] = {
    a.Move: lambda it: f"move{_at(it.at)}",
    a.Click: _click,
    a.Button: lambda it: f"{it.button} button {it.mode}{_at(it.at)}",
    a.Drag: _drag,
    a.Scroll: _scroll,
    a.Keys: _keys,
    a.TypeText: lambda it: f"type “{plain(it.text, 60)}”",
    a.Wait: lambda it: f"wait {it.seconds:g} s",
    a.Observe: lambda it: "look again",
    a.Finish: _finish,
    a.System: lambda it: f"{it.kind}{': ' + plain(it.argument, 60) if it.argument else ''}",
    a.Code: lambda it: f"run {plain(it.language, 20)}: {plain(it.source, 60)}",
    a.Several: _several,
}
