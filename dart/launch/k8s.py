"""`dart launch k8s`: a run as a release of the Helm chart beside this file.

What the config says becomes the chart's values; everything else, from restarts to where a pod runs, is the chart's and
the cluster's. Whoever keeps releases in another tool (Argo CD, Flux) takes the values that --dry-run prints.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import click
import yaml
from pydantic import JsonValue

from dart.config import Config, load
from dart.errors import UserError, unwritable
from dart.launch.plan import Group, ending_seconds, plan

CHART = Path(__file__).parent / "chart"
LONGEST_RELEASE = 30
"""Characters: names of a release's pods and of its jobs, which have a digest, stay within the 63 of a DNS label."""

RANKS_SECONDS = 30
"""How much longer than the coordinator a trainer rank may take to end."""

MOST_BYTES_OF_FILES = 1_000_000
"""A ConfigMap holds 1 MiB, names and all."""


@dataclass(frozen=True, slots=True)
class K8sOptions:
    """The command line of `dart launch k8s`. `namespace` None: that of kubectl's context."""

    config: Path
    overrides: tuple[str, ...] = ()
    namespace: str | None = None
    dry_run: bool = False


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as such."""


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def start(options: K8sOptions) -> None:
    """Write the values and have Helm install or upgrade the release; with `dry_run`, print them. Raises UserError."""
    config = load(options.config, options.overrides)
    release = release_name(config)
    again = {"again": shlex.join(_again(options))}
    text = yaml.dump(again | values(config), Dumper=_Readable, sort_keys=False, width=1000)
    if config.trainer.ranks > 1 and config.cluster.device == "gpu":
        click.echo(
            f"warning: each of the {config.trainer.ranks} trainer ranks is a pod, and NCCL takes pods for machines: "
            "they talk over the network, not over NVLink (docs/clusters.md). On one node, `dart train` is faster",
            err=True,
        )
    file = options.config.with_name(f"{release}.values.yaml")
    command = ["helm", "upgrade", "--install", release, str(CHART), "-f", str(file)]
    command += ["--namespace", options.namespace, "--create-namespace"] if options.namespace else []
    if options.dry_run:
        click.echo(text, nl=False)
        click.echo(f"# with these values in {file}: {' '.join(command)}")
        click.echo(f"# to see the manifests: helm template {release} {CHART} -f {file}")
        return
    if shutil.which("helm") is None:
        raise UserError(
            "helm is not installed here: install Helm 3 or 4 (helm.sh), or print the values with --dry-run and render "
            f"the chart in {CHART} elsewhere"
        )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{file} cannot be written {unwritable(error, 'put the config into a writable folder')}"
        ) from None
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"helm did not start {release}: {done.stdout.strip()[-2000:]}\n"
            "check that `kubectl auth can-i create statefulsets` says yes, and --namespace; the values are in "
            f"{file}"
        )
    click.echo(done.stdout, nl=False)


def _again(options: K8sOptions) -> list[str]:
    """The command that continues the run. Its pods do it by themselves until the release is removed."""
    given = [word for override in options.overrides for word in ("--set", override)]
    namespace = ["--namespace", options.namespace] if options.namespace else []
    return ["dart", "launch", "k8s", str(options.config.absolute()), *given, *namespace]


def release_name(config: Config) -> str:
    """A DNS label, from `cluster.k8s.release` or the run's name. Raises UserError when that gives none."""
    if config.cluster.k8s.release:
        return config.cluster.k8s.release
    name = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")
    if len(name) > LONGEST_RELEASE or not name[:1].isalpha():
        raise UserError(
            f"run.name {config.run.name!r} gives no valid Kubernetes name: set cluster.k8s.release to at most "
            f"{LONGEST_RELEASE} lower-case letters, digits and hyphens, beginning with a letter"
        )
    return name


def values(config: Config) -> dict[str, JsonValue]:
    """The chart's values. Raises UserError for what the config lacks."""
    k8s = config.cluster.k8s
    if not k8s.image:
        raise UserError("cluster.k8s.image is not set: name the image that containers/cpu.Containerfile made")
    if config.server.tls_client_ca:
        raise UserError("server.tls_client_ca: the chart gives workers tokens and no certificates: leave it out")
    groups = plan(config)
    if any(group.gpus for group in groups) and not k8s.model_image:
        raise UserError(
            "cluster.k8s.model_image is not set: name the image that containers/gpu.Containerfile made, or set "
            "cluster.device: cpu"
        )
    if k8s.model_claim and not PurePosixPath(config.model.path).is_relative_to(k8s.model_folder):
        raise UserError(
            f"model.path is {config.model.path!r}, which is not in cluster.k8s.model_folder, {k8s.model_folder!r}, "
            "where model_claim is mounted: name a folder of it, or change model_folder"
        )
    roles: dict[str, dict[str, JsonValue]] = {group.part: _role(group) for group in groups}
    ending = math.ceil(ending_seconds(config))
    roles["coordinator"]["terminationGracePeriodSeconds"] = ending
    if "train" in roles:  # ranks wait for the coordinator's goodbye
        roles["train"]["terminationGracePeriodSeconds"] = ending + RANKS_SECONDS
    if "env" in roles:
        roles["env"]["terminationGracePeriodSeconds"] = math.ceil(config.environment.timeouts.ending)
    derived: dict[str, JsonValue] = {
        "config": config.as_yaml(without=["cluster"]),
        "images": {"coordinator": k8s.image, "model": k8s.model_image or k8s.image},
        **roles,
    }
    if k8s.files:
        derived["files"] = _texts(k8s.files)
    if k8s.model_claim:
        derived["model"] = {"claim": k8s.model_claim, "folder": k8s.model_folder}
    return _merged(derived, k8s.values)


def _texts(files: Sequence[Path]) -> dict[str, JsonValue]:
    """Each file's name and text. Raises UserError for what a ConfigMap does not take."""
    texts: dict[str, JsonValue] = {}
    left = MOST_BYTES_OF_FILES
    for file in files:
        if file.name in texts:
            raise UserError(f"cluster.k8s.files: two of them are called {file.name}: rename one")
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", file.name):
            raise UserError(f"cluster.k8s.files: {file.name!r} has more than letters, digits and . _ -: rename it")
        try:
            texts[file.name] = text = file.read_bytes().decode()
        except OSError as error:
            raise UserError(f"cluster.k8s.files: {file} cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise UserError(f"cluster.k8s.files: {file} is not text: put it into an image of your own") from None
        left -= len(text.encode())
        if left < 0:
            raise UserError(
                f"cluster.k8s.files: together they are more than {MOST_BYTES_OF_FILES:,} bytes, which a ConfigMap does "
                "not hold: put them into an image of your own"
            )
    return texts


def _role(group: Group) -> dict[str, JsonValue]:
    return {
        "count": group.count,
        "cpus": group.needs.cpus,
        "memoryGb": group.needs.memory_gb or 0,
        "gpus": group.gpus,
        "environment": dict(group.environment),
    }


def _merged(below: dict[str, JsonValue], above: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """As Helm merges two files of values: maps key by key, and everything else whole."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
