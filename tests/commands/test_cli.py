"""The command line: fast, light, and every wrong input is one message with exit code 2."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dart.cli import GROUPS, main
from dart.commands import doctor
from dart.config import load
from dart.core.capacity import devices
from dart.job import Train
from dart.wire.channel import listen

ROOT = Path(__file__).parents[2]
MINIWOB = str(ROOT / "configs" / "miniwob_cpu.yaml")


def dart(*arguments: str, cwd: Path | None = None, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dart", *arguments], capture_output=True, text=True, timeout=120, cwd=cwd, input=stdin,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("what", ["dart.cli", "dart.coordinator", "dart.coordinator.run", "dart.commands.train"])
def test_imports_are_light(what: str) -> None:
    code = f"import {what}, sys; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_every_command() -> None:
    done = dart("--help")
    assert done.returncode == 0
    commands = ("train", "coordinator", "worker", "eval", "collect", "status", "why", "runs", "export", "doctor")
    for command in (*commands, "serve-world"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE), command


def test_help_has_each_command_in_one_group_on_one_line_of_a_terminal_that_is_not_cut() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(main.commands)
    said = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert "..." not in said.partition("Options:")[2] and "…" not in said
    for name, command in main.commands.items():
        (line,) = re.findall(rf"^  {name} +(.*)$", said, re.MULTILINE)
        assert line == (command.help or "").partition("\n")[0], "its docstring's whole first line"
    assert [heading for heading in GROUPS if f"\n{heading}:\n" not in said] == []


def test_readme_names_only_commands_that_exist() -> None:
    commands = set(re.findall(r"^  ([\w-]+) ", dart("--help").stdout, re.MULTILINE))
    named = set(re.findall(r"`dart ([\w-]+)", (ROOT / "README.md").read_text()))
    assert named <= commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "none.yaml"], "config none.yaml does not exist"),
        (["train", MINIWOB, "--set", "model.path=/none"], "model.path /none: the folder does not exist"),
        (["train", MINIWOB, "--set", "model.path=builtin:big"], "built in are builtin:"),
        (["train", MINIWOB, "--set", "environment.tasks.names=[click-tset]"], "did you mean click-test"),
        (["train", MINIWOB, "--set", "environment.browser=/none"], "environment.options.browser is '/none'"),
        (
            ["train", MINIWOB, "--set", "environment.kind=waa"],
            "environment.kind waa: no world of that name: use miniwob, ladder, ",
        ),
        (
            ["train", MINIWOB, "--set", "sync.transport=nccl"],
            "sync.transport: nccl needs a GPU for each of trainer.ranks",
        ),
        (["train", MINIWOB, "--set", "rollout.replica=1"], "did you mean replicas?"),
        (["train", MINIWOB, "--resume", "none"], "none is not a run directory"),
        (["worker", "--role", "cook", "--coordinator", "127.0.0.1:1"], "--role 'cook' is not a role"),
        (["worker", "--role", "env", "--coordinator", "here"], "--coordinator 'here' is not HOST:PORT"),
        (["status", "none"], "none is not a run directory"),
        (["status", MINIWOB], "miniwob_cpu.yaml is not a run directory: it has no run.db"),
        (["why", "x" * 300], "x cannot be read (File name too long): name a run directory that you may read"),
        (["train", MINIWOB, "--resume", MINIWOB], "miniwob_cpu.yaml is not a run directory"),
        (
            ["train", MINIWOB, "--set", f"curation.pool.sources=[{MINIWOB}]"],
            "curation.pool.sources: " + MINIWOB + " is not a run directory",
        ),
        (["status", "--address", "127.0.0.1:1"], "no coordinator answers there"),
        (["export", "none", "out"], "none is not a run directory"),
        (["runs", "none"], "none is not a directory"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_wrong_input_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = dart(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing was begun"


def test_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = dart("train", MINIWOB, "--set", f"server.port={port}", cwd=tmp_path)
    assert done.returncode == 2
    assert f"server.port {port} on 127.0.0.1" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1", "localhost"])
def test_a_free_port_is_free_on_any_loopback(host: str) -> None:
    try:
        taken = listen(host, 0)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with taken:
        config = load(Path(MINIWOB), [f"server.host='{host}'", f"server.port={taken.getsockname()[1]}"])
        problem = doctor._port(config)
    assert problem is not None and f"on {host}: Address already in use" in problem
    assert doctor._port(config) is None


def test_doctor_tries_a_loss_of_ones_own() -> None:
    settings = ["trainer.loss.kind=json:dumps"]
    checks = dict(doctor.checks(load(Path(MINIWOB), settings), Train()))
    told = checks["your loss"]()
    assert told is not None and told.startswith("trainer.loss.kind: json:dumps has the wrong signature")
    assert doctor._loss("dart.algo.objectives:cispo") is None
    assert "your loss" not in dict(doctor.checks(load(Path(MINIWOB)), Train()))


def test_a_config_json_without_fields_is_told(tmp_path: Path) -> None:
    for text in ("[]", '{"architectures": 5}'):
        (tmp_path / "config.json").write_text(text)
        told = doctor._model(load(Path(MINIWOB), [f"model.path={tmp_path}"]))
        assert told is not None and "the folder has no readable config.json" in told


def test_other_architecture_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    done = dart("train", MINIWOB, "--set", f"model.path={folder}", cwd=tmp_path)
    assert done.returncode == 2
    assert "architecture LlamaForCausalLM is not supported: use one of Qwen3VL" in done.stderr


@pytest.mark.parametrize(
    ("architecture", "grammar", "message"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "ui_tars", "the folder has no *.safetensors"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen3_vl", "agent.grammar qwen3_vl reads coordinates on a grid"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl", "the folder has no *.safetensors"),
    ],
)
def test_an_architecture_that_writes_otherwise_is_told(
    architecture: str, grammar: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    told = doctor._model(load(Path(MINIWOB), [f"model.path={tmp_path}", f"agent.grammar={grammar}"]))
    assert told is not None and message in told


@pytest.mark.parametrize(("version", "warned"), [("570.133.20", True), ("580.65.06", False), ("", False)])
def test_doctor_warns_of_an_old_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, *, warned: bool
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '{version}\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    said = [line for line in CliRunner().invoke(main, ["doctor"]).output.splitlines() if "driver" in line]
    assert [f"NVIDIA driver is {version}," in line and "needs 580 or newer" in line for line in said] == [True] * warned


@pytest.mark.parametrize(
    ("gpus", "free", "told"), [(1, 100, None), (1, 50, "64 are"), (2, 100, "256 are"), (2, 300, None)]
)
def test_doctor_wants_more_shared_memory_for_engines_of_several_processes(
    monkeypatch: pytest.MonkeyPatch, gpus: int, free: int, told: str | None
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free << 20))
    config = load(Path(MINIWOB), [f"rollout.tensor_parallel={gpus}"])
    why = dict(doctor.checks(config, Train()))["shared memory"]()
    assert (why is None) == (told is None) and (told or "") in (why or "")


def test_doctor_names_the_variables_of_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (said,) = [line for line in CliRunner().invoke(main, ["doctor"]).output.splitlines() if "WORLD_SIZE" in line]
    assert said.startswith("warning  environment: WORLD_SIZE tells") and "`dart train` does not pass it on" in said


def test_doctor_finds_a_missing_browser(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        Path(MINIWOB).read_text().replace("kind: miniwob", "kind: miniwob\n  options: {browser: /none/chromium}")
    )
    done = dart("doctor", str(config))
    assert done.returncode == 2
    assert (
        "missing  chromium: environment.options.browser is '/none/chromium', which is not an executable" in done.stdout
    )


def test_unreachable_coordinator_is_told() -> None:
    pytest.importorskip("miniwob")
    code = (
        "from dart.wire import worker; import dart.commands.worker as c;"
        "worker.WorkerOptions.__init__.__defaults__;"
        "options = c.WorkerOptions; c.WorkerOptions = lambda **k: options(connect_seconds=1.0, **k);"
        "from dart.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "worker", "--role", "env", "--coordinator", "127.0.0.1:1"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "coordinator 127.0.0.1:1 could not be reached for 1 s" in done.stderr
    assert "Traceback" not in done.stderr
