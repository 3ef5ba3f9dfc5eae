"""The chart, rendered by Helm's own library: what it makes, that Kubernetes' schemas allow it, what it refuses."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2_grpc
from launching.charts import MISSING, PYTHON, VERSIONS, manifests, render

from dart.config import parse
from dart.config.run import TokenRole
from dart.core.status import Status, TimeSpent
from dart.core.usage import WITHIN_EPISODE, EnvState
from dart.dashboard.metrics import exposition
from dart.launch.k8s import values
from dart.processes import secrets

GOLDEN = Path(__file__).parent / "golden"
RUN: dict[str, Any] = {
    "model": {"path": "builtin:tiny-qwen3vl"},
    "environment": {"tasks": {"names": ["click-test"]}, "workers": 3},
    "stop": {"updates": 1},
}
CPUS: dict[str, Any] = RUN | {
    "cluster": {
        "device": "cpu",
        "k8s": {
            "image": "registry.example/dart-cpu:1",
            "values": {"tokens": {"secret": "my-tokens"}, "tls": {"secret": "my-certificate"}},
        },
    }
}
GPUS: dict[str, Any] = RUN | {
    "model": {"path": "/models/UI-TARS-1.5-7B"},
    "rollout": {"replicas": 2, "tensor_parallel": 2, "environment": {"VLLM_LOGGING_LEVEL": "ERROR"}},
    "trainer": {"ranks": 4},
    "cluster": {
        "rollout": {"cpus": 16, "memory_gb": 120},
        "k8s": {
            "image": "registry.example/dart-cpu:1",
            "model_image": "registry.example/dart-gpu:1",
            "model_claim": "models",
            "values": {
                "images": {"pullSecrets": ["registry"]},
                "tokens": {"secret": "my-tokens"},
                "tls": {"issuer": {"name": "cluster-authority", "kind": "ClusterIssuer"}},
                "metrics": {"enabled": True, "podMonitor": True},
                "autoscaling": {"enabled": True, "maxWorkers": 40, "prometheus": "http://prometheus.monitoring:9090"},
                "train": {
                    "nodeSelector": {"gpu": "h100"},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                },
                "runs": {"storageClass": "shared", "sizeGb": 500},
            },
        },
    },
}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)


@pytest.mark.parametrize(("name", "settings"), [("cpus", CPUS), ("gpus", GPUS)])
def test_the_manifests_are_these_and_kubernetes_allows_them(name: str, settings: dict[str, Any]) -> None:
    given = values(parse(settings)) | {"config": "stop:\n  updates: 1\n"}
    rendered = render(given)
    assert rendered["messages"] == []
    assert rendered["broken"] == {version: [] for version in VERSIONS}
    assert set(rendered["unknown"]) <= {"Certificate", "PodMonitor", "ScaledObject"}, "kinds of other projects alone"
    text = "\n".join(
        f"# {template}\n{rendered['manifests'][template].strip()}\n"
        for template in sorted(rendered["manifests"])
        if rendered["manifests"][template].strip()
    )
    golden = GOLDEN / f"k8s-{name}.yaml"
    if not golden.exists():  # remove the file to write it anew, and read the difference
        golden.write_text(text, encoding="utf-8")
        pytest.fail(f"{golden} was missing and has been written: read it and commit it")
    assert text == golden.read_text(encoding="utf-8")


def test_the_whole_config_arrives_as_it_was() -> None:
    config = parse(GPUS)
    (mapped,) = [one for one in manifests(values(config)) if one["kind"] == "ConfigMap"]
    arrived = parse(yaml.safe_load(mapped["data"]["config.yaml"]))
    assert arrived.model_dump(exclude={"cluster"}) == config.model_dump(exclude={"cluster"})


def test_the_coordinator_is_told_the_command_that_continues_the_run() -> None:
    again = """dart launch k8s '/my configs/{{ a }} "b".yaml' --namespace rl"""
    (one,) = [
        each
        for each in manifests(values(parse(GPUS)) | {"again": again})
        if "coordinator" in str(each.get("spec", {}).get("serviceName"))
    ]
    assert f"--again={again}" in one["spec"]["template"]["spec"]["containers"][0]["args"]


def test_two_releases_share_no_name() -> None:
    given = values(parse(GPUS)) | {"tokens": {}, "tls": {}}
    assert all(one["metadata"]["name"].startswith("demo-") for one in manifests(given))


def test_a_job_has_another_name_when_it_consists_of_something_else() -> None:
    def names(settings: dict[str, Any]) -> set[str]:
        return {one["metadata"]["name"] for one in manifests(values(parse(settings))) if one["kind"] == "Job"}

    before = names(GPUS)
    assert len(before) == 2
    assert names(GPUS | {"stop": {"updates": 7}}) == before, "workers are told the config by the coordinator"
    assert len(names(GPUS | {"trainer": {"ranks": 8}}) & before) == 1


def test_files_of_ones_own_are_where_every_process_starts(tmp_path: Path) -> None:
    (tmp_path / "my_world.py").write_text('class World:\n    "Mine."\n')
    (tmp_path / "tasks.yaml").write_text("tasks:\n- a: 1\n")
    files = {"files": [str(file) for file in tmp_path.iterdir()]}
    given = values(parse(GPUS | {"cluster": GPUS["cluster"] | {"k8s": GPUS["cluster"]["k8s"] | files}}))
    assert render(given)["broken"] == {version: [] for version in VERSIONS}
    made = manifests(given)
    (config,) = [one for one in made if one["metadata"]["name"] == "demo-files"]
    assert config["data"] == {file.name: file.read_text() for file in tmp_path.iterdir()}
    pods = [one["spec"]["template"] for one in made if "template" in one.get("spec", {})]
    assert len(pods) == 4
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == "files"]
        assert container["workingDir"] == mount["mountPath"] and mount["readOnly"]
        assert {"name": "files", "configMap": {"name": "demo-files"}} in pod["spec"]["volumes"]
        assert len(pod["metadata"]["annotations"]["dart/files"]) == 64, "other files restart it"


def test_wrong_values_are_refused() -> None:
    for wrong in ({"autoscalling": {}}, {"env": {"replicas": 3}}, {"user": 0}):
        assert next(iter(wrong)) in render(values(parse(CPUS)) | wrong)["error"]
    assert "autoscaling.prometheus" in render(values(parse(CPUS)) | {"autoscaling": {"enabled": True}})["error"]


async def test_what_the_chart_makes_serves_the_probe(tmp_path: Path) -> None:
    """Its tokens have the names that the coordinator reads, and its certificate is good for the service's names."""
    made = {one["metadata"]["name"]: one for one in manifests(values(parse(CPUS)) | {"tokens": {}, "tls": {}})}
    tokens = made["demo-tokens"]["data"]
    assert {f"{role}.token" for role in get_args(TokenRole)} <= set(tokens)
    assert len({base64.b64decode(token) for token in tokens.values()}) == len(tokens) == 5
    for file, content in made["demo-tls"]["data"].items():
        (tmp_path / file).write_bytes(base64.b64decode(content))
    key, certificate = (tmp_path / secrets.KEY).read_bytes(), (tmp_path / secrets.CERTIFICATE).read_bytes()
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    trusted = grpc.ssl_channel_credentials((tmp_path / secrets.AUTHORITY).read_bytes())
    try:
        for name in ("demo-coordinator", "demo-coordinator.rl.svc", "demo-coordinator-0"):
            options = (("grpc.ssl_target_name_override", name),)
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options) as channel:
                await channel.channel_ready()
    finally:
        await server.stop(None)


def test_the_autoscaler_asks_for_metrics_that_the_dashboard_has() -> None:
    (scaled,) = [one for one in manifests(values(parse(GPUS))) if one["kind"] == "ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    said = exposition([Status("demo", "training", env_time=TimeSpent({EnvState.IDLE: 2.0}))]).decode()
    (series,) = re.findall(r'^(dart_environments_slot_seconds_total{run="demo")', said, re.MULTILINE)
    assert query.count(series) == 2
    busy, absent = (set(names.split("|")) for names in re.findall(r'state[=!]~"([^"]*)"', query))
    assert busy == WITHIN_EPISODE - {EnvState.QUEUED} | {EnvState.RENEWING}
    assert absent == {EnvState.LOST, EnvState.MISSING}, "nobody could use them"


def test_the_schemas_are_strict() -> None:
    """A field that Kubernetes does not know is found: `affinity` reaches the manifest as it is given."""
    wrong = {"env": {"count": 1, "affinity": {"nodeAfinity": {}}}}
    rendered = render(values(parse(CPUS)) | wrong)
    assert all("nodeAfinity" in found[0] for found in rendered["broken"].values())
