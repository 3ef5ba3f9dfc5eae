"""`dart eval`: a policy's success on held-out instances, alone or compared with another policy's on the same instances.

The policy is a checkpoint, or a model behind an OpenAI-compatible endpoint.

Every evaluation has a run directory of its own with an evaluation.json (docs/evaluation.md); a comparison is made
from two of those, so that an evaluation that finished long ago serves as well as one that has just run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dart.commands.endpoint import EndpointOptions
from dart.commands.running import JobRun, check_before, given_again, run_in_loop, seed_range
from dart.config import BUILTIN_MODELS, Config, TaskSet, load, parse
from dart.coordinator.sampling.endpoint import probe
from dart.coordinator.sampling.evaluation import instances
from dart.coordinator.summary import write_json
from dart.core.evaluation.documents import Against, Document, Interval, Protocol, Rate, Side, Success
from dart.core.evaluation.outcomes import compare
from dart.errors import INTERRUPTED, UserError
from dart.job import Address, Evaluate
from dart.rundir import HERE, RunDirectory
from dart.store.regular import read_regular

FILE = RunDirectory(Path()).evaluation.name
"""What a finished evaluation leaves in its run directory."""
EPISODES = 200
"""Instances when neither the config nor the command line says how many."""
SHOWN = 10
"""Instances that were not evaluated and are printed; all are in evaluation.json."""
MOST_AGAINST = 256 << 20
"""Bytes of the evaluation that is compared with."""
NO_EPISODE: Rate = {"mean": 0.0, "low": 0.0, "high": 1.0, "episodes": 0}


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """The command line of `dart eval`. None means not given."""

    config: Path
    overrides: tuple[str, ...] = ()
    checkpoint: str | None = None
    endpoint: EndpointOptions = field(default_factory=EndpointOptions)
    against: str | None = None
    tasks: str | None = None
    seeds: str | None = None
    episodes: int | None = None
    samples: int | None = None
    temperature: float | None = None
    resume: Path | None = None
    external_workers: bool = False
    quiet: bool = False


def evaluate(options: EvaluateOptions) -> None:
    """Evaluate, compare if asked to, print, and draw. Raises UserError for anything wrong, before it starts."""
    resumed = RunDirectory.existing(options.resume) if options.resume else None
    address = _address(options)
    loaded = load(options.config, options.overrides)
    trained, config = loaded.environment.tasks.training, _chosen(loaded, options)
    job, local = Evaluate(address, trained), not options.external_workers
    if local:
        check_before(config, job, "--checkpoint" if options.checkpoint else "model.path")
    if address:
        probe(address)
    other = _opponent(config, options.against) if options.against is not None else None
    if isinstance(other, Config):
        if options.external_workers:
            raise UserError(
                f"--against {options.against} has to be evaluated too, and external workers end with the first "
                "evaluation: evaluate each separately, then compare with --against RUN"
            )
        check_before(other, Evaluate(), "--against")
    begun = resumed or RunDirectory.make(config.run.directory, f"{config.run.name}-eval")
    wanted = JobRun(config, begun, job, options.quiet, resume=resumed is not None, local=local)
    document = _run(replace(wanted, again=_again(options, begun)))
    if document is None:
        sys.exit(INTERRUPTED)
    if isinstance(other, Config):
        second = RunDirectory.make(other.run.directory, f"{other.run.name}-eval-against")
        if (found := _run(JobRun(other, second, Evaluate(trained=trained), options.quiet))) is None:
            click.echo(f"{document['checkpoint']} has been evaluated: compare with it by --against {begun.path}")
            sys.exit(INTERRUPTED)
        other = found
    if other is not None:
        document["against"] = _against(document, other)
        write_json(begun.evaluation, document)
    from dart.commands.plot import evaluation_picture

    picture = evaluation_picture(begun.path, document)
    report(document)
    click.echo(f"numbers in {begun.evaluation}" + (f", picture {picture}" if picture else ""))


def _again(options: EvaluateOptions, directory: RunDirectory) -> tuple[str, ...]:
    """The command that continues the evaluation. The config in its directory has what the command line chose."""
    words = ["dart", "eval", f"{HERE}/{directory.config.name}"]
    if options.resume is not None:
        words[2:] = given_again(options.config, options.overrides, directory)
    words += ["--resume", HERE, *options.endpoint.words]
    if (against := options.against) is not None:
        words += ["--against", str(Path(against).absolute()) if Path(against).exists() else against]
    return (*words, *(["--external-workers"] if options.external_workers else []))


def _address(options: EvaluateOptions) -> Address | None:
    """The endpoint to evaluate, or None for a checkpoint. Raises UserError."""
    if not options.endpoint.given:
        return None
    if options.checkpoint is not None:
        raise UserError(
            f"--checkpoint {options.checkpoint} and --endpoint are two policies: evaluate one; to compare the endpoint "
            "with a checkpoint, name the checkpoint with --against"
        )
    return options.endpoint.address("evaluating an endpoint")


# ---- what to evaluate ----


def _chosen(config: Config, options: EvaluateOptions) -> Config:
    """The config with the command line's choices."""
    raw, episodes = config.model_dump(), options.episodes
    evaluation, environment = raw["evaluation"], raw["environment"]
    if options.checkpoint is not None:
        raw["model"]["path"] = options.checkpoint
    if options.tasks is not None:
        environment["tasks"] = _only(config, _names(options.tasks))
    if options.seeds is not None:
        environment["tasks"]["eval_seeds"] = _seeds(options.seeds, config)
    tasks = TaskSet.model_validate(environment["tasks"])
    if options.seeds is not None:
        episodes = episodes or tasks.instances
    if options.samples is not None:
        evaluation["samples"] = options.samples
    if options.temperature is not None:
        evaluation["temperature"] = options.temperature
    configured = evaluation["episodes"] or EPISODES
    if tasks.single_instance:
        configured = min(configured, tasks.instances)
    evaluation["episodes"] = episodes or configured
    return parse(raw, "command line")


def _only(config: Config, names: tuple[str, ...]) -> Mapping[str, object]:
    """The config's tasks, of which these alone are evaluated. They are held out by name if training has none of them.
    Where all tasks of the config have one instance, as in OSWorld, so has any other."""
    tasks = config.environment.tasks
    if set(names) & set(tasks.training):
        chosen = {"names": names, "train_names": (), "eval_names": ()}
    else:
        chosen = {"names": tasks.names, "train_names": tasks.train_names, "eval_names": names}
    known = {name for listed in chosen.values() for name in listed}
    single = set(tasks.single_instance)
    return {
        **tasks.model_dump(),
        **chosen,
        "step_limits": {name: limit for name, limit in tasks.step_limits.items() if name in known},
        "single_instance": sorted(known if single.issuperset(tasks.all) else known & single),
    }


def _names(tasks: str) -> tuple[str, ...]:
    names = [name.strip() for name in tasks.split(",")]
    if not all(names):
        raise UserError(f"--tasks {tasks!r} has an empty name: write them as in click-test,enter-text")
    return tuple(dict.fromkeys(names))


def _seeds(seeds: str, config: Config) -> tuple[int, int]:
    if (given := seed_range(seeds)) is None:
        raise UserError(
            f"--seeds {seeds[:60]!r} is not FIRST:LAST with FIRST below LAST, up to 2^63: 1000000:1000050 is 50, from "
            "1000000 to 1000049"
        )
    first, last = given
    start, end = config.environment.tasks.train_seeds
    if first < end and start < last:
        raise UserError(
            f"--seeds {seeds}: environment.tasks.train_seeds is [{start}, {end}), so these are not held out: choose "
            f"others, for example {end}:{end + last - first}, or move the training seeds with --set"
        )
    return given


def _opponent(config: Config, against: str) -> Config | Document:
    """What to compare with: a finished evaluation, or the checkpoint to evaluate. Raises UserError."""
    path = Path(against)
    if path.is_file() or (path / FILE).is_file():
        return _finished(config, path)
    if RunDirectory(path).is_run:
        raise UserError(
            f"--against {against} is a run directory without {FILE}: name a finished evaluation, "
            "or one of the run's checkpoints"
        )
    if not path.is_dir() and not against.startswith("builtin:"):
        known = ", ".join(f"builtin:{folder.parent.name}" for folder in sorted(BUILTIN_MODELS.glob("*/config.json")))
        raise UserError(
            f"--against {against} does not exist: name a checkpoint's folder ({known} ship with dart), "
            f"or a finished evaluation's run directory or {FILE}"
        )
    return parse(config.model_dump() | {"model": config.model.model_dump() | {"path": against}}, "--against")


def _finished(config: Config, path: Path) -> Document:
    """The finished evaluation. Raises UserError unless it has the same instances and samples as this one will have."""
    file = path / FILE if path.is_dir() else path.resolve()
    try:
        document: Document = json.loads(read_regular(file.parent, file.name, MOST_AGAINST))
        there = successes(document)
        if missing := Side.__required_keys__ - document.keys():
            raise KeyError(*sorted(missing))
        protocol = document["protocol"]
        names, (first, last) = [str(name) for name in protocol["tasks"]], map(int, protocol["seeds"])
        number, each = protocol["episodes"], protocol["samples"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--against {path}: {file} is not an evaluation ({error!r}): name an {FILE} that `dart eval` wrote"
        ) from None
    wanted = {task.id for task in instances(config, config.evaluation.episodes)}
    samples, shared = config.evaluation.samples, len(wanted & there.keys())
    single = set(names) <= set(config.environment.tasks.single_instance) or (first, last) == (0, 1)
    seeds = "" if single else f"--seeds {first}:{last} "  # a task with one instance has seed 0, which is no choice
    if there.keys() != wanted or each != samples:
        raise UserError(
            f"--against {path} has {number} instances of {','.join(names)}, seeds {first}:{last}, {each} samples each; "
            f"this one has {len(wanted)}, {shared} of them the same, {samples} samples each; only these can be paired: "
            f"add --tasks {','.join(names)} {seeds}--episodes {number} --samples {each}"
        )
    return document


# ---- running and comparing ----


def _run(wanted: JobRun) -> Document | None:
    """Its evaluation.json; None when it was interrupted."""
    summary = run_in_loop(wanted)
    if summary is None:
        return None
    write_json(wanted.directory.summary, summary)
    document: Document = json.loads(wanted.directory.evaluation.read_text(encoding="utf-8"))
    if not document["success"]["episodes"]:
        raise UserError("\n".join(["no episode could be run", *undone(document["success"])]))
    return document


def successes(document: Document) -> dict[str, list[bool]]:
    """Instance → successes of its samples."""
    return {each["id"]: [bool(one["success"]) for one in each["samples"]] for each in document["instances"]}


def _against(document: Document, other: Document) -> Against:
    """The comparison, as evaluation.json has it. Raises UserError if there is no instance that both have."""
    ours, theirs = successes(document), successes(other)
    paired = {name for name in ours if ours[name] and theirs[name]}
    if not paired:
        raise UserError("the two evaluations have no instance that both could run: see not_evaluated in each")
    found = compare({name: ours[name] for name in paired}, {name: theirs[name] for name in paired})
    difference = found.difference
    return {
        "run": other["run"],
        "checkpoint": other["checkpoint"],
        "protocol": other["protocol"],
        "success": other["success"],
        "pass_at_k": other["pass_at_k"],
        "difference": {"mean": difference.mean, "low": difference.low, "high": difference.high},
        "better": found.better,
        "worse": found.worse,
        "p_value": found.p_value,
        "unpaired": len(ours) - len(paired),
    }


# ---- printing ----


def report(document: Document) -> None:
    """The evaluation, and what it is compared with, as a table and a few lines."""
    sides: dict[str, Side] = {"A": document, "B": document["against"]} if "against" in document else {"": document}
    for name, side in sides.items():
        click.echo(f"{name} {side['checkpoint']}, temperature {side['protocol']['temperature']:g}".strip())
    Console().print(_table(sides))
    for name, side in sides.items():
        success = side["success"]
        failed = ", ".join(f"{kind} {count}" for kind, count in success["failures"].items())
        click.echo(
            f"{name} {success['steps']:.2f} steps and {success['seconds']:.2f} s per episode; failed: {failed}; "
            f"retried after infrastructure failures: {success['infrastructure_attempts']}".strip()
        )
        reward = success.get("reward", success["mean"])
        if not math.isclose(reward, success["mean"]):
            click.echo(f"{name} mean reward {reward:.4f}, with partial credit".strip())
        if (by_state := success.get("by_state")) and by_state["mean"] != success["mean"]:
            rate = f"{by_state['mean']:.1%} ({by_state['low']:.1%} to {by_state['high']:.1%})"
            click.echo(f"{name} {rate} if text that is not an action were judged by the state it left behind".strip())
        for line in (*undone(success), *_seen(side["protocol"])):
            click.echo(f"{name} {line}".strip())
    if "against" in document:
        against = document["against"]
        difference, unpaired = against["difference"], against.get("unpaired", 0)
        click.echo(
            f"A - B: {100 * difference['mean']:+.1f} points ({100 * difference['low']:+.1f} to "
            f"{100 * difference['high']:+.1f}); A is better on {against['better']} instances and worse on "
            f"{against['worse']}, exact p = {against['p_value']:.2g}"
            + (f"; {unpaired} instances that one of the two could not run are left out" if unpaired else "")
        )
        for line in _unlike(document["protocol"], against["protocol"]):
            click.echo(f"differs: {line}")


def undone(success: Success) -> list[str]:
    """What was not evaluated, and why; and what the world could not judge at first."""
    lacking, unjudged = success.get("not_evaluated", []), success.get("unjudged_attempts", {})
    lines = []
    if lacking:
        count = sum(one["episodes"] for one in lacking)
        lines += [f"not evaluated, and not in any mean: {count} episodes of {len(lacking)} instances"]
        lines += [f"  {one['id']}: {one['why']}" for one in lacking[:SHOWN]]
    if len(lacking) > SHOWN:
        lines += [f"  and {len(lacking) - SHOWN} more"]
    if unjudged:
        most = max(unjudged, key=unjudged.__getitem__)
        lines += [
            f"not judged: {sum(unjudged.values())} attempts failed at their verdict, {unjudged[most]} of them of "
            f"{most}; if the world cannot judge a task that is not done, success looks too high"
        ]
    return lines


def _unlike(ours: Protocol, theirs: Protocol) -> Iterator[str]:
    """Settings recorded by both that differ."""
    a, b = _settings(ours), _settings(theirs)
    for name in sorted(a.keys() & b.keys()):
        if a[name] != b[name]:
            yield f"{name} is {_short(a[name])} in A and {_short(b[name])} in B"


def _settings(protocol: Mapping[str, Any]) -> dict[str, object]:
    named = {name: protocol[name] for name in ("temperature", "step_limit", "step_limits") if name in protocol}
    return {**named, **protocol.get("settings", {})}


def _short(value: object) -> str:
    return shorten(str(value), 80)


def _seen(protocol: Protocol) -> list[str]:
    seen = protocol.get("not_held_out", [])
    return [f"not held out, because training has their only instance: {', '.join(seen)}"] if seen else []


def _table(sides: Mapping[str, Side]) -> Table:
    """Success per task, overall, and pass@k, with two columns per side."""
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    table.add_column("episodes", justify="right")
    for name in sides:
        table.add_column(f"{name} success".strip(), justify="right")
        table.add_column("95 % interval")
    successes_of = [side["success"] for side in sides.values()]
    rows: list[tuple[str, Sequence[Rate]]] = [
        (task, [success["per_task"].get(task, NO_EPISODE) for success in successes_of])
        for task in dict.fromkeys(task for success in successes_of for task in success["per_task"])
    ]
    for name, rates in [*rows, ("all", successes_of)]:
        table.add_row(name, "/".join(dict.fromkeys(str(rate["episodes"]) for rate in rates)), *_cells(rates))
    curves = [side["pass_at_k"] for side in sides.values()]
    most = min(map(len, curves))
    for k in sorted({1, most} | {2**i for i in range(most.bit_length())}) if most > 1 else ():
        table.add_row(f"pass@{k}", "", *_cells([curve[str(k)] for curve in curves]))
    return table


def _cells(rates: Sequence[Interval]) -> list[str]:
    return [
        cell
        for rate in rates
        for cell in (
            (f"{rate['mean']:.1%}", f"{rate['low']:.1%} to {rate['high']:.1%}")
            if rate.get("episodes", 1)
            else ("", "not evaluated")
        )
    ]
