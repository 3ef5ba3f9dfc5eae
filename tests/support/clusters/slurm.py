"""A Slurm cluster of several nodes: munged, slurmctld and slurmds of Debian's slurm-wlm, all on this machine, as root.

Nothing of the machine's own Slurm is touched: configuration, state, key and sockets are in the folder that is given.
Slurm's scheduler gives each component of a heterogeneous job nodes of its own, so there are several, each with
processors and GPUs of its own in Slurm's eyes: for a GPU Slurm wants no more than a device file. They are named by
addresses that all are this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
HANG_SECONDS = 240
NETWORK, FIRST, LAST, CPUS, GPUS = "127.0.0", 11, 15, 16, 4
CONF = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
GresTypes=gpu
KillWait=30
UnkillableStepTimeout=120
NodeName={nodes} NodeHostname={host} Port=[{ports}] CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 State=UP
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no {', '.join(absent)} here: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "a Slurm cluster is started as root only"


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """Of a job, in a word: PENDING, RUNNING, COMPLETING, COMPLETED, ..."""
        return self.field(job, "JobState")

    def stir(self, job: str) -> None:
        """Change something: Slurm's backfill looks again only then, and here nothing else happens when a job that was
        requeued may start again."""
        words = ["scontrol", "update", f"jobid={job}", f"comment={time.monotonic()}"]
        subprocess.run(words, env=self.environment, capture_output=True, check=False)  # refused while the job ends

    def field(self, job: str, name: str) -> str:
        """One that `scontrol show job` prints, of the job or of its first component."""
        words = self.command("scontrol", "show", "job", job).split()
        return next(word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}="))


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Started, with an idle node; all its jobs and processes are ended with it."""
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir()
    cluster = SlurmCluster(folder)
    conf = CONF.format(
        folder=folder,
        host=socket.gethostname(),
        controller=_port(),
        ports=_ports(),
        nodes=f"{NETWORK}.[{FIRST}-{LAST}]",
        cpus=CPUS,
        gpus=GPUS,
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    for number in range(GPUS):
        os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    daemons = (
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
         f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge/seed", f"--log-file={folder}/munge.log"],
        ["slurmctld", "-D", "-f", str(folder / "slurm.conf")],
        *(["slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", node] for node in _names()),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for words in daemons:
            stack.enter_context(_daemon(words, cluster))
        _wait_for_node(cluster)
        try:
            yield cluster
        finally:
            cluster.command("scancel", "--user=root", "--full", "--signal=KILL")
            cluster.command("scancel", "--user=root")
            _wait_for_no_job(cluster)


@contextlib.contextmanager
def _daemon(words: list[str], cluster: SlurmCluster) -> Iterator[None]:
    with (cluster.folder / "daemons.out").open("ab") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=cluster.environment, start_new_session=True)
    if words[0] == "munged":
        _wait_until((cluster.folder / "munge.socket").exists, "munged has no socket")
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def _wait_for_node(cluster: SlurmCluster) -> None:
    def idle() -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=cluster.environment, capture_output=True, text=True, check=False
        )
        return set(done.stdout.split()) == {"idle"}

    _wait_until(idle, "the node does not become idle")


def _wait_for_no_job(cluster: SlurmCluster) -> None:
    _wait_until(lambda: not cluster.command("squeue", "--noheader").strip(), "jobs do not end")


def _wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < until, otherwise
        time.sleep(0.2)


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _names() -> list[str]:
    return [f"{NETWORK}.{number}" for number in range(FIRST, LAST + 1)]


def _ports() -> str:
    """As many as there are nodes, one after the other, and free a moment ago."""
    first = _port()
    return f"{first}-{first + len(_names()) - 1}"
