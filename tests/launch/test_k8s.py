"""`dart launch k8s`: the values that follow from a config, what it refuses, and what it asks of Helm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from dart.cli import main
from dart.config import parse
from dart.errors import UserError
from dart.launch.k8s import release_name, values

CPUS: dict[str, Any] = {"device": "cpu", "k8s": {"image": "registry.example/dart-cpu:1"}}
RUN: dict[str, Any] = {
    "run": {"name": "Mini_WoB.2"},
    "model": {"path": "builtin:tiny-qwen3vl"},
    "environment": {"tasks": {"names": ["click-test"]}, "workers": 3},
    "stop": {"updates": 1},
    "cluster": CPUS,
}


def launch(folder: Path, *options: str, settings: dict[str, Any] | None = None) -> Result:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings or RUN))
    return CliRunner().invoke(main, ["launch", "k8s", str(file), *options])


def cluster(**k8s: object) -> dict[str, Any]:
    return RUN | {"cluster": {"device": "cpu", "k8s": CPUS["k8s"] | k8s}}


def test_a_dry_run_prints_the_values_and_writes_nothing(tmp_path: Path) -> None:
    result = launch(tmp_path, "--dry-run", "--set", "rollout.replicas=2", "--set", "cluster.env.memory_gb=3")
    assert result.exit_code == 0
    told = yaml.safe_load(result.stdout)
    assert {part: told[part]["count"] for part in ("coordinator", "env", "rollout", "train")} == {
        "coordinator": 1, "env": 3, "rollout": 2, "train": 1,
    }  # fmt: skip
    assert told["env"]["memoryGb"] == 3 and told["rollout"]["gpus"] == 0
    assert told["images"] == dict.fromkeys(("coordinator", "model"), "registry.example/dart-cpu:1")
    assert parse(yaml.safe_load(told["config"])).rollout.replicas == 2
    assert "helm template mini-wob-2" in result.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_a_run_that_samples_nothing_has_no_env_workers_and_replicas() -> None:
    imitation = RUN | {"algorithm": "sft", "sft": {"sources": ["/runs/demos"]}, "evaluation": {"episodes": 0}}
    assert {"env", "rollout"}.isdisjoint(values(parse(imitation)))


@pytest.mark.parametrize(("interrupt_seconds", "grace"), [(3.0, 60), (30.5, 61), (600.0, 630)])
def test_the_coordinator_has_the_time_that_its_checkpoint_may_take(interrupt_seconds: float, grace: int) -> None:
    told = values(parse(RUN | {"checkpoint": {"interrupt_seconds": interrupt_seconds}}))
    assert isinstance(told["coordinator"], dict) and isinstance(told["train"], dict)
    assert told["coordinator"]["terminationGracePeriodSeconds"] == grace
    assert told["train"]["terminationGracePeriodSeconds"] == grace + 30, "ranks outlast the coordinator's last save"


@pytest.mark.parametrize(("timeouts", "grace"), [({}, 60), ({"close": 300.5}, 301)])
def test_env_workers_have_the_time_that_giving_machines_back_takes(timeouts: dict[str, float], grace: int) -> None:
    told = values(parse(RUN | {"environment": {"tasks": {"names": ["click-test"]}, "timeouts": timeouts}}))
    assert isinstance(told["env"], dict) and told["env"]["terminationGracePeriodSeconds"] == grace


def test_other_values_win_key_by_key() -> None:
    told = values(parse(cluster(values={"env": {"count": 5}, "images": {"pullSecrets": ["mine"]}, "user": 7})))
    assert isinstance(told["env"], dict) and isinstance(told["images"], dict)
    assert (told["env"]["count"], told["env"]["cpus"], told["user"]) == (5, 2.0, 7)
    assert told["images"]["coordinator"] == "registry.example/dart-cpu:1"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (RUN | {"cluster": {"device": "cpu"}}, "cluster.k8s.image is not set: name the image"),
        (RUN | {"cluster": {"k8s": CPUS["k8s"]}}, "cluster.k8s.model_image is not set: name the image"),
        (cluster(model_claim="models"), "not in cluster.k8s.model_folder, '/models'"),
        (RUN | {"server": {"tls_client_ca": "ca.pem"}}, "server.tls_client_ca: the chart gives workers tokens"),
    ],
)
def test_what_the_config_lacks_is_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        values(parse(settings))
    assert said in str(raised.value)


def test_files_that_a_config_map_does_not_hold_are_told(tmp_path: Path) -> None:
    good, binary, large, spaced = (tmp_path / name for name in ("world.py", "model.bin", "large.txt", "my world.py"))
    (tmp_path / "other").mkdir()
    for file, content in ((good, b"x"), (binary, b"\xff"), (large, b"y" * 1_000_000), (spaced, b"x")):
        file.write_bytes(content)
    (same := tmp_path / "other" / "world.py").write_bytes(b"x")
    assert values(parse(cluster(files=[str(good)])))["files"] == {"world.py": "x"}
    for files, said in (
        ([tmp_path / "none.py"], "none.py cannot be read (No such file or directory)"),
        ([binary], "model.bin is not text: put it into an image"),
        ([good, same], "two of them are called world.py"),
        ([spaced], "'my world.py' has more than letters, digits and . _ -: rename it"),
        ([good, large], "together they are more than 1,000,000 bytes"),
    ):
        with pytest.raises(UserError, match=r"cluster\.k8s\.files") as raised:
            values(parse(cluster(files=[str(file) for file in files])))
        assert said in str(raised.value)


def test_the_release_has_a_name_that_kubernetes_takes() -> None:
    assert release_name(parse(RUN)) == "mini-wob-2"
    assert release_name(parse(cluster(release="other"))) == "other"
    for name in ("7days", "x" * 31):
        with pytest.raises(UserError, match=r"set cluster\.k8s\.release"):
            release_name(parse(RUN | {"run": {"name": name}}))
    with pytest.raises(UserError, match=r"cluster\.k8s\.release"):
        parse(cluster(release="Not A Name"))


# ---- Helm ----


def put_helm(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program of this name, first on the PATH."""
    helm = folder / "helm"
    helm.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    helm.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_helm_gets_the_chart_the_values_and_the_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    put_helm(tmp_path / "bin", monkeypatch, "print(*sys.argv[1:])")
    result = launch(tmp_path, "--namespace", "rl")
    assert result.exit_code == 0
    file = tmp_path / "mini-wob-2.values.yaml"
    chart = Path(__file__).parents[2] / "dart" / "launch" / "chart"
    assert result.stdout.split() == [
        "upgrade", "--install", "mini-wob-2", str(chart), "-f", str(file), "--namespace", "rl", "--create-namespace",
    ]  # fmt: skip
    again = f"dart launch k8s {tmp_path}/config.yaml --namespace rl"
    assert yaml.safe_load(file.read_text()) == {"again": again, **values(parse(RUN))}


def test_what_helm_says_when_it_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    put_helm(tmp_path / "bin", monkeypatch, "sys.exit('Error: Kubernetes cluster unreachable')")
    result = launch(tmp_path)
    assert result.exit_code == 2
    assert "helm did not start mini-wob-2: Error: Kubernetes cluster unreachable" in result.output


def test_without_helm_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = launch(tmp_path)
    assert result.exit_code == 2 and "helm is not installed here" in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


# ---- the probe ----


def test_the_probe_says_when_nothing_answers() -> None:
    result = CliRunner().invoke(main, ["health", "127.0.0.1:1"])
    assert result.exit_code == 2 and "127.0.0.1:1: no coordinator answers there (UNAVAILABLE" in result.output
