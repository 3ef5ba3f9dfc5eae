"""Runs the pods of rendered manifests as processes of this machine: what a kubelet would do.

Called within mount and network namespaces of its own (`unshare -mn`), as root. Each container gets a read-only root
(this machine's, below an overlay), its volumes, its environment and its user, and nothing else; pods find one another
by name. What is not here: a scheduler, images, limits, and networks that can be cut.

Argument: a file with {"manifests": [...], "folder": for claims and logs, "source": the sources, "python": its prefix}.
The coordinator is stopped once there is an update, as a drained node would, and goes on with `stop.updates` at one more
than have been made. Out: {"exits": by pod, "probe": what it printed, "metrics": the dashboard's}.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HANG_SECONDS = 1800
Manifest = dict[str, Any]


@dataclass
class Pod:
    name: str
    policy: str
    spec: Manifest
    index: int
    process: subprocess.Popen[bytes] | None = None
    exits: list[int] = field(default_factory=list)

    @property
    def container(self) -> Manifest:
        container: Manifest = self.spec["containers"][0]
        return container


class Node:
    def __init__(self, asked: Manifest) -> None:
        self.folder, self.source, self.python = (Path(asked[name]) for name in ("folder", "source", "python"))
        self.objects = {(one["kind"], one["metadata"]["name"]): one for one in asked["manifests"]}
        self.pods = list(pods(asked["manifests"]))
        self.hosts = self.folder / "hosts"
        names = {name for kind, name in self.objects if kind == "Service"} | {pod.name for pod in self.pods}
        names |= {f"{pod.name}.{pod.spec['subdomain']}" for pod in self.pods if "subdomain" in pod.spec}
        self.hosts.write_text(f"127.0.0.1 localhost {' '.join(sorted(names))}\n")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.objects["Secret", name]["data"][key]).decode()

    def environment(self, pod: Pod) -> dict[str, str]:
        fields = {
            "metadata.name": pod.name,
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(pod.index),
        }
        found = {}
        for one in pod.container["env"]:
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                found[one["name"]] = self.secret(source["secretKeyRef"]["name"], source["secretKeyRef"]["key"])
            else:
                found[one["name"]] = one["value"]
        return found

    def volume(self, pod: Pod, name: str) -> Path | None:
        """Its folder; None: an empty one."""
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == name]
        group = pod.spec["securityContext"]["fsGroup"]
        folder = self.folder / "volumes" / pod.name / name
        if "persistentVolumeClaim" in volume:
            folder = self.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["chgrp", str(group), folder], check=True)
            folder.chmod(0o2775)
        elif "emptyDir" in volume:
            return None
        else:
            folder.mkdir(parents=True, exist_ok=True)
            for file, content in self.files(volume).items():
                (folder / file).write_bytes(content)
                (folder / file).chmod(volume.get("secret", {}).get("defaultMode", 0o644))
            subprocess.run(["chgrp", "-R", str(group), folder], check=True)
        return folder

    def files(self, volume: Manifest) -> dict[str, bytes]:
        if "configMap" in volume:
            found = self.objects["ConfigMap", volume["configMap"]["name"]]["data"]
            return {name: text.encode() for name, text in found.items()}
        secret = volume["secret"]
        every = {
            key: base64.b64decode(text) for key, text in self.objects["Secret", secret["secretName"]]["data"].items()
        }
        return {one["path"]: every[one["key"]] for one in secret["items"]} if "items" in secret else every

    def start(self, pod: Pod) -> None:
        """In a root of its own, until it execs the container's command: the process is the container's."""
        environment = self.environment(pod)
        root = self.folder / "root"
        lines = [
            f"set -e; hostname {pod.name}",
            f"mkdir -p {root}; mount -t tmpfs none {root}; cd {root}; mkdir u w m",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={root}/u,workdir={root}/w m",
            "chmod 755 m/root; mkdir -p m/opt/source m/opt/venv m/opt/bin",
            f"cp {self.hosts} m/etc/hosts",
            "printf '#!/bin/sh\\nexec /opt/venv/bin/python -m dart \"$@\"\\n' > m/opt/bin/dart",
            "chmod 755 m/opt/bin/dart",
            *(f"mkdir -p m{mount['mountPath']}" for mount in pod.container["volumeMounts"]),
            *(f"mount --rbind /{name} m/{name}" for name in ("proc", "dev", "sys")),
            "mount -o remount,ro m",
            f"mount --bind {self.source} m/opt/source; mount --bind {self.python} m/opt/venv",
        ]
        for mount in pod.container["volumeMounts"]:
            where, folder = f"m{mount['mountPath']}", self.volume(pod, mount["name"])
            lines.append(f"mount --bind {folder} {where}" if folder else f"mount -t tmpfs -o mode=1777 none {where}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,ro,bind {where}")
        words = [expanded(word, environment) for word in pod.container["command"] + pod.container["args"]]
        lines.append(f"exec chroot m {shlex.join([*as_user(pod, environment), *words])}")
        log = self.folder / f"{pod.name}.log"
        with log.open("ab") as stream:
            pod.process = subprocess.Popen(
                ["unshare", "-mu", "--propagation", "private", "bash", "-c", "\n".join(lines)],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            )  # fmt: skip

    def tend(self) -> bool:
        """Start what is not running and should be. True when every Job is complete."""
        for pod in self.pods:
            if pod.process is not None and (code := pod.process.poll()) is not None:
                pod.exits.append(code)
                pod.process = None
            done = pod.exits[-1:] == [0] and pod.policy == "OnFailure"
            ended = pod.exits[-1:] == [0] and pod.name.endswith("coordinator-0")  # it would say so again and again
            if pod.process is None and not done and not ended:
                self.start(pod)
        return all(pod.exits[-1:] == [0] for pod in self.pods if pod.policy == "OnFailure")

    def probe(self, pod: Pod) -> str:
        """What the readiness probe prints; nothing while it fails."""
        if pod.process is None:
            return ""
        enter = ["nsenter", "--target", str(pod.process.pid), "--mount", "--root", "--wd=/"]
        command = pod.container["readinessProbe"]["exec"]["command"]
        done = subprocess.run([*enter, *as_user(pod, {}), *command], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""


def pods(manifests: list[Manifest]) -> list[Pod]:
    found = []
    for one in manifests:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] not in ("StatefulSet", "Deployment", "Job"):
            continue
        policy = spec["template"]["spec"].get("restartPolicy", "Always")
        for index in range(spec.get("replicas", spec.get("completions", 1))):
            found.append(Pod(f"{name}-{index}", policy, spec["template"]["spec"], index))
    return found


def as_user(pod: Pod, environment: dict[str, str]) -> list[str]:
    security = pod.spec["securityContext"]
    paths = {"PATH": "/opt/bin:/usr/bin:/bin", "PYTHONPATH": "/opt/source"}
    return [
        "setpriv", f"--reuid={security['runAsUser']}", f"--regid={security['runAsGroup']}",
        f"--groups={security['fsGroup']}", "--no-new-privs", "--inh-caps=-all",
        "env", "-i", *(f"{name}={value}" for name, value in (paths | environment).items()),
    ]  # fmt: skip


def expanded(word: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word)


def metrics(node: Node, tokens: str) -> str:
    """The dashboard's, as Prometheus asks for them; nothing while it does not answer."""
    token = node.secret(tokens, "view.token")
    request = urllib.request.Request("http://127.0.0.1:8700/metrics", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text: str = answer.read().decode()
            return text
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return ""


def updates(run: Path) -> int:
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()[:-1]] if file.is_file() else []
    return max((int(one["update"]) for one in lines if one["event"] == "update"), default=0)


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    node = Node(asked)
    (coordinator,) = [pod for pod in node.pods if pod.name.endswith("-coordinator-0")]
    release = coordinator.name.removesuffix("-coordinator-0")
    run = node.folder / "claims" / f"{release}-runs" / release
    told = {"probe": "", "metrics": ""}
    stopped, until = False, time.monotonic() + HANG_SECONDS
    try:
        while not node.tend() or coordinator.process is not None:
            if time.monotonic() > until:
                break
            time.sleep(0.5)
            told["probe"] = told["probe"] or node.probe(coordinator)
            if not stopped and coordinator.process and updates(run) and (text := metrics(node, f"{release}-tokens")):
                told["metrics"], stopped = text, True
                mapped = node.objects["ConfigMap", f"{release}-coordinator"]["data"]
                config = yaml.safe_load(mapped["config.yaml"])
                config["stop"]["updates"] = updates(run) + 1
                mapped["config.yaml"] = yaml.safe_dump(config)
                coordinator.process.send_signal(signal.SIGTERM)
    finally:
        for pod in node.pods:
            if pod.process is not None:
                pod.process.terminate()
                pod.process.wait(60)
    json.dump(told | {"exits": {pod.name: pod.exits for pod in node.pods}}, sys.stdout)


if __name__ == "__main__":
    main()
