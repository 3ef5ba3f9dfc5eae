"""`dart launch slurm`: its script, its refusals, and a run that is pre-empted in a real Slurm cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from clusters.slurm import SlurmCluster, missing, slurm_cluster
from run_processes.told import events

from dart.cli import main
from dart.config import load, parse
from dart.errors import NOT_READY, UserError
from dart.launch.slurm import _not_submitted, script

ROOT = Path(__file__).parents[2]
LADDER = ROOT / "configs" / "ladder_demo.yaml"
HANG_SECONDS = 1200
SETTINGS: dict[str, Any] = {
    "model": {"path": "builtin:tiny-qwen3vl"},
    "environment": {"tasks": {"names": ["click-test"]}, "workers": 3},
    "rollout": {"replicas": 2, "tensor_parallel": 2, "environment": {"VLLM_LOGGING_LEVEL": "it's ERROR"}},
    "trainer": {"ranks": 4},
    "stop": {"updates": 1},
    "cluster": {
        "train": {"cpus": 3, "memory_gb": 6},
        "slurm": {
            "partition": "small",
            "time_limit_hours": 36,
            "signal_seconds": 120,
            "setup": ["module load cuda"],
            "options": {"train": ["--partition=large"]},
        },
    },
}


# ---- the script ----


@pytest.mark.parametrize(("said", "allowed"), [("Invalid job id specified", True), ("Unable to contact", False)])
def test_a_job_that_slurm_does_not_speak_of_may_be_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, allowed: bool
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "slurm.job").write_text("7")
    with contextlib.nullcontext() if allowed else pytest.raises(UserError, match=r"job 7 has ended .Unable to contact"):
        _not_submitted(tmp_path)


def test_slurms_controller_is_asked_again(tmp_path: Path) -> None:
    helper = script(parse(SETTINGS), tmp_path).partition("asked() {")[2].partition("\n}\n")[0]
    tries = 'sleep() { :; }; n=0; fails_once() { n=$((n + 1)); [ "$n" -gt 1 ]; }'
    shell = f"asking_seconds=600; pause_seconds=5; asked() {{{helper}\n}}; {tries}; asked fails_once && echo $n"
    done = subprocess.run(["bash", "-c", shell], check=True, capture_output=True, text=True)
    assert done.stdout == "2\n" and "fails_once failed" in done.stderr


def directives(text: str) -> list[list[str]]:
    """Of each component."""
    components: list[list[str]] = [[]]
    for line in text.splitlines():
        if line == "#SBATCH hetjob":
            components.append([])
        elif line.startswith("#SBATCH "):
            components[-1].append(line.removeprefix("#SBATCH "))
    return components


def test_each_part_is_a_component_that_asks_for_what_it_needs() -> None:
    coordinator, env, rollout, train = directives(script(parse(SETTINGS), Path("/shared/runs/r1")))
    assert {"--signal=B:USR1@120", "--output=/shared/runs/r1/logs/slurm-%j.log", "--requeue"} <= set(coordinator)
    assert {"--ntasks=3", "--cpus-per-task=2", "--time=2160", "--partition=small"} <= set(env)
    assert "--gpus-per-task=2" in rollout and "--ntasks=2" in rollout
    assert {"--ntasks=4", "--gpus-per-task=1", "--mem-per-cpu=2000M"} <= set(train)
    assert train.index("--partition=large") > train.index("--partition=small"), "the last one counts"


def test_on_processors_no_component_asks_for_gpus_and_a_run_without_sampling_has_two() -> None:
    settings = SETTINGS | {
        "algorithm": "sft", "sft": {"sources": ["/data"]}, "evaluation": {"episodes": 0}, "cluster": {"device": "cpu"}
    }  # fmt: skip
    text = script(parse(settings), Path("/r"))
    assert len(directives(text)) == 2 and "gpus" not in text.partition("# What follows")[0]


def test_ranks_of_a_node_see_each_others_gpus_and_certificates_of_workers_are_refused() -> None:
    settings = parse(SETTINGS)
    steps = [line for line in script(settings, Path("/r")).splitlines() if "='--het-group=" in line]
    assert [line.strip().partition("]")[0] for line in steps if "--gpu-bind=none" in line] == ["[train"]
    with pytest.raises(UserError, match=r"server\.tls_client_ca: .* gives workers no certificates"):
        script(parse(SETTINGS | {"server": {"tls_client_ca": "ca.pem"}}), Path("/r"))


@pytest.mark.parametrize("name", ["plain", "with space", 'it\'s $HOME `id` 100% "q"'])
def test_bash_reads_the_script_as_it_is_meant(tmp_path: Path, name: str) -> None:
    run = tmp_path / name
    text = script(parse(SETTINGS), run)
    file = tmp_path / "job.sbatch"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    head = text.partition("# What follows")[0]
    asked = f'{head}\nmodule() {{ :; }}; prepare rollout; printf "%s\\n" "$run" "$continuing" "$VLLM_LOGGING_LEVEL"'
    said = subprocess.run(["bash", "-c", asked], check=True, capture_output=True, text=True).stdout.splitlines()
    continuing = "dart launch slurm @run/slurm.yaml --run @run"
    assert said == [str(run), continuing, "it's ERROR"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here: apt-get install shellcheck")
def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    file = tmp_path / "job.sbatch"
    file.write_text(script(parse(SETTINGS), tmp_path / "a run"))
    done = subprocess.run(["shellcheck", str(file)], check=False, capture_output=True, text=True)
    assert not done.stdout


# ---- one process of it ----


def process(
    run: Path, part: str, program: str, lasting_seconds: int = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script as srun does for one task, with the lines of bash in place of Python and no pause.

    What lives for longer than `lasting_seconds` has lasted.
    """
    run.mkdir(exist_ok=True)
    stand_in, file = run / "stand-in", run / "job.sbatch"
    stand_in.write_text(f'#!/bin/bash\nrun={run}\necho "$*" >> "$run/started"\n{program}\n')
    stand_in.chmod(0o755)
    slurm = {"python": str(stand_in)}
    text = script(parse(SETTINGS | {"cluster": {"slurm": slurm}}), run)
    assert "pause_seconds=5" in text and "lasting_seconds=600" in text
    text = text.replace("lasting_seconds=600", f"lasting_seconds={lasting_seconds}")
    file.write_text(text.replace("pause_seconds=5", "pause_seconds=0"))
    return subprocess.run(
        ["bash", str(file), part], env=os.environ | {"SLURM_PROCID": "0"} | environment,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_bad_input_is_no_reason_to_start_again_and_a_lost_trainer_is_wherever_the_database_is(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    assert process(bad, "coordinator", "exit 2").returncode == 2 and started(bad, "coordinator") == 1
    begun = tmp_path / "begun"
    lost = 'if [ -e "$run/config.yaml" ]; then touch "$run/summary.json"; else touch "$run/config.yaml"; exit 2; fi'
    assert process(begun, "coordinator", lost).returncode == 0 and started(begun, "coordinator") == 2


@pytest.mark.parametrize(("code", "starts"), [(1, 4), (130, 1)])
def test_one_that_keeps_failing_is_given_up_and_one_that_was_interrupted_is_left(
    tmp_path: Path, code: int, starts: int
) -> None:
    done = process(tmp_path / "run", "coordinator", f"exit {code}")
    assert (done.returncode, done.stderr) == (code, "")
    assert started(tmp_path / "run", "coordinator") == starts


def test_a_coordinator_is_given_up_when_it_makes_no_new_checkpoint_however_long_it_takes(tmp_path: Path) -> None:
    counts = 'n=$(wc -l < "$run/started"); [ "$n" -gt 6 ] || mkdir -p "$run/checkpoints/v00000$n"; exit 1'
    assert process(tmp_path / "run", "coordinator", counts, lasting_seconds=-1).returncode == 1
    assert started(tmp_path / "run", "coordinator") == 6 + 3


@pytest.mark.parametrize(("code", "starts"), [(NOT_READY, 4), (1, 7)])
def test_a_worker_that_has_lasted_has_worked_unless_it_was_never_ready(tmp_path: Path, code: int, starts: int) -> None:
    counts = f'n=$(wc -l < "$run/started"); [ "$n" -lt 7 ] || touch "$run/summary.json"; exit {code}'
    process(tmp_path / "run", "rollout", counts, lasting_seconds=-1)
    assert len((tmp_path / "run" / "started").read_text().splitlines()) == starts


def test_a_worker_gets_no_token_of_the_shell_that_submitted(tmp_path: Path) -> None:
    exported = {"DART_TOKEN": "control", "DART_VIEW_TOKEN": "view"}
    tells = 'echo "${DART_TOKEN-none} ${DART_VIEW_TOKEN-none}" >> "$run/tokens"; touch "$run/summary.json"'
    for part, seen in (("env", "none none"), ("coordinator", "control view")):
        done = process(tmp_path / part, part, tells, **exported)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / part / "tokens").read_text().strip() == seen


# ---- wrong use ----


def test_wrong_fields_are_named() -> None:
    for slurm, said in (
        ({"time_limit_hours": "24:00:00"}, "cluster.slurm.time_limit_hours"),
        ({"partition": "a b"}, "cluster.slurm.partition"),
        ({"signal_seconds": 10}, "cluster.slurm.signal_seconds"),
        ({"options": {"env": ["constraint=x"]}}, "options.env: 'constraint=x' is not an option of sbatch"),
    ):
        with pytest.raises(UserError, match=said):
            parse(SETTINGS | {"cluster": {"slurm": slurm}})
    with pytest.raises(UserError, match="line break"):
        script(parse(SETTINGS), Path("/a\nb"))


def test_without_slurm_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(SETTINGS))
    monkeypatch.setenv("PATH", "/nowhere")
    run = tmp_path / "run"
    refused = CliRunner().invoke(main, ["launch", "slurm", str(file), "--run", str(run)])
    assert refused.exit_code == 2 and "no sbatch here" in refused.output
    shown = CliRunner().invoke(main, ["launch", "slurm", str(file), "--run", str(run), "--dry-run"])
    assert shown.exit_code == 0 and shown.output == script(load(file), run)
    assert not run.exists()


# ---- a real cluster ----


ASKED = "DART_TEST_SLURM"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if not os.environ.get(ASKED):
        pytest.skip(f"`make test-slurm` runs it: it takes ten minutes ({ASKED}=1)")
    if why := missing():
        pytest.skip(why)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def launch(cluster: SlurmCluster, run: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    always = (
        "cluster.device=cpu", "cluster.slurm.host=$SLURMD_NODENAME", "checkpoint.every_updates=1000",
        "dashboard.enabled=false", "environment.slots=8", "evaluation.before=false",
        "trainer.trajectories_per_update=16",
    )  # fmt: skip
    sets = [word for setting in (*always, *settings) for word in ("--set", setting)]
    return subprocess.run(
        [sys.executable, "-m", "dart", "launch", "slurm", str(LADDER), "--run", str(run), *sets],
        env=cluster.environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def job_of(launched: subprocess.CompletedProcess[str]) -> str:
    assert launched.returncode == 0, launched.stderr
    return launched.stdout.split()[1].rstrip(",")


def wait(run: Path, holds: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG_SECONDS
    while not holds():
        logs = "\n".join(f"== {log}\n{log.read_text()[-2000:]}" for log in (run / "logs").glob("*.log"))
        assert time.monotonic() < until, logs
        time.sleep(0.5)


def started_again(cluster: SlurmCluster, job: str) -> bool:
    if cluster.state(job) == "PENDING":
        cluster.stir(job)
    return cluster.state(job) != "PENDING"


def test_what_sbatch_refuses_is_said(cluster: SlurmCluster, tmp_path: Path) -> None:
    refused = launch(cluster, tmp_path / "run", "cluster.slurm.partition=nowhere")
    assert refused.returncode == 2 and "sbatch refuses the job" in refused.stderr and "partition" in refused.stderr


def test_bad_input_ends_the_job_with_its_exit_code(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = job_of(launch(cluster, run, "cluster.slurm.host=192.0.2.1"))
    wait(run, lambda: cluster.state(job) == "FAILED")
    assert cluster.field(job, "ExitCode") == "2:0" and cluster.field(job, "Restarts") == "0"


STAND_IN = """#!/bin/bash
# In place of Python: what each process is started with, and ends as the test wants it.
run={run}
echo "$*" >> "$run/started"
case "$*" in
*" coordinator "*) touch "$run/config.yaml"; {coordinator} ;;
*" train "*)
    echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT $CUDA_VISIBLE_DEVICES" >> "$run/ranks"
    sleep 600 ;;
*" rollout "*) echo "$CUDA_VISIBLE_DEVICES" >> "$run/replicas"; sleep 600 ;;
*) {env} ;;
esac
"""
FINISHES = 'until [ "$(cat "$run/ranks" "$run/replicas" | wc -l)" = 4 ]; do sleep 0.2; done; touch "$run/summary.json"'


def with_stand_in(cluster: SlurmCluster, run: Path, *settings: str, coordinator: str, env: str) -> str:
    """The job."""
    run.mkdir()
    program = run / "stand-in"
    program.write_text(STAND_IN.format(run=run, coordinator=coordinator, env=env))
    program.chmod(0o755)
    return job_of(launch(cluster, run, f"cluster.slurm.python={program}", *settings))


def started(run: Path, what: str) -> int:
    return sum(f" {what} " in line for line in (run / "started").read_text().splitlines())


def test_each_replica_and_each_rank_has_its_own_gpu(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    gpus = ("cluster.device=gpu", "rollout.replicas=2", "trainer.ranks=2")
    job = with_stand_in(cluster, run, *gpus, coordinator=FINISHES, env="sleep 600")
    wait(run, lambda: cluster.state(job) == "COMPLETED")
    assert len(set((run / "replicas").read_text().split())) == 2
    ranks = sorted(line.split() for line in (run / "ranks").read_text().splitlines())
    assert [rank[:2] for rank in ranks] == [["0", "2"], ["1", "2"]]
    assert {rank[5]: rank[2] for rank in ranks} == {"0": "0", "1": "0"}, "each sees its own GPU, which is its first"
    assert ranks[0][3:5] == ranks[1][3:5] and ranks[0][3].startswith("127.0.0.")


def test_two_runs_share_a_cluster(cluster: SlurmCluster, tmp_path: Path) -> None:
    runs = [tmp_path / "one" / "run", tmp_path / "two" / "run"]
    jobs, small = [], ("trainer.ranks=2", "cluster.train.cpus=2", "cluster.rollout.cpus=2")
    for run, other in zip(runs, reversed(runs), strict=True):
        run.parent.mkdir()
        both = f'until [ -e "$run/ranks" ] && [ -e {other}/ranks ]; do sleep 0.2; done; touch "$run/summary.json"'
        jobs.append(with_stand_in(cluster, run, *small, coordinator=both, env="sleep 600"))
    wait(runs[0], lambda: {cluster.state(job) for job in jobs} == {"COMPLETED"})
    assert len({(run / "ranks").read_text().split()[4] for run in runs}) == 2, "each has a port of its own"


def test_a_worker_that_keeps_failing_ends_the_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = with_stand_in(cluster, run, coordinator="exec sleep 600", env="exit 3")
    wait(run, lambda: cluster.state(job) == "FAILED")
    assert started(run, "env") == 4 and started(run, "coordinator") == 1 and cluster.field(job, "Restarts") == "0"


def test_a_coordinator_that_has_lost_its_trainer_is_started_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fails_once = '[ "$(grep -c " coordinator " "$run/started")" = 2 ] || exit 2; touch "$run/summary.json"'
    job = with_stand_in(cluster, run, coordinator=fails_once, env="sleep 600")
    wait(run, lambda: cluster.state(job) == "COMPLETED")
    assert started(run, "coordinator") == 2


def test_a_run_that_its_user_cancels_does_not_come_back(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    saves = 'trap "sleep 3; touch $run/saved; exit 130" TERM; while true; do sleep 0.2; done'
    job = with_stand_in(cluster, run, coordinator=saves, env="sleep 600")
    wait(run, (run / "ranks").is_file)
    cluster.command("scancel", job)
    wait(run, lambda: cluster.state(job) == "CANCELLED")
    assert (run / "saved").is_file() and started(run, "coordinator") == 1


SAVES_AND_THEN_FINISHES = (
    '[ ! -e "$run/saved" ] || { touch "$run/summary.json"; exit; }; '
    'trap "sleep 3; touch $run/saved; exit 130" TERM; while true; do sleep 0.2; done'
)


def test_a_pre_empted_run_saves_and_queues_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = with_stand_in(cluster, run, coordinator=SAVES_AND_THEN_FINISHES, env="sleep 600")
    wait(run, (run / "ranks").is_file)
    cluster.command("sbatch", "--partition=high", "--nodes=5", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    wait(run, lambda: started_again(cluster, job) and cluster.state(job) == "COMPLETED")
    assert cluster.field(job, "Restarts") == "1" and started(run, "coordinator") == 2


def test_a_run_whose_time_is_nearly_up_saves_and_queues_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    limits = ("cluster.slurm.time_limit_hours=0.03", "cluster.slurm.signal_seconds=60")
    job = with_stand_in(cluster, run, *limits, coordinator=SAVES_AND_THEN_FINISHES, env="sleep 600")
    wait(run, lambda: started_again(cluster, job) and cluster.state(job) in ("COMPLETED", "TIMEOUT"))
    assert cluster.state(job) == "COMPLETED" and cluster.field(job, "Restarts") == "1"


@pytest.mark.browser
@pytest.mark.engine
@pytest.mark.torch
def test_a_run_is_signalled_saves_queues_again_and_finishes(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "a run's"
    launched = launch(cluster, run, "rollout.replicas=1", "stop.updates=4", "evaluation.episodes=4")
    job = job_of(launched)
    wait(run, lambda: len(events(run / "metrics.jsonl", "update")) >= 2)
    again = launch(cluster, run)
    assert again.returncode == 2 and f"its job {job} is running" in again.stderr

    cluster.command("scancel", "--batch", "--signal=USR1", job)
    wait(run, lambda: cluster.field(job, "Restarts") == "1")
    (saved,) = events(run / "metrics.jsonl", "checkpoint")
    assert saved["version"] >= 2

    wait(run, lambda: cluster.state(job) == "PENDING")
    wait(run, lambda: started_again(cluster, job))
    wait(run, (run / "summary.json").is_file)
    wait(run, lambda: cluster.state(job) == "COMPLETED")
    assert cluster.field(job, "Restarts") == "1" and cluster.field(job, "ExitCode") == "0:0"
    made = [event["update"] for event in events(run / "metrics.jsonl", "update")]
    assert made == list(range(1, made[-1] + 1)) and made[-1] >= 4, "no update is lost or made twice"
    finished = launch(cluster, run)
    assert finished.returncode == 0 and "is finished" in finished.stdout
