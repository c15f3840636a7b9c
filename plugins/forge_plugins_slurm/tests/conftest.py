"""A real Slurm of a few nodes on this machine, as a fixture, and a small job to run on it."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import fork_server
from rank_ports import free_ports

REQUIRE = "FORGE_REQUIRE_SLURM"
"""Environment variable that turns "there is no Slurm here" from a skip into a failure."""


def slurm_prefix() -> tuple[Path | None, str]:
    """The folder with Slurm's ``usr/``, or ``None`` and why there is none: installed, unpacked before, unpacked now."""
    if Path("/usr/sbin/slurmctld").exists() and Path("/usr/bin/srun").exists():
        return Path("/"), ""
    folder = Path(sys.prefix) / "slurm"
    if not (folder / "usr/sbin/slurmctld").exists():
        script = Path(__file__).with_name("unpack_slurm.sh")
        try:
            whole = {**os.environ, "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
            done = subprocess.run([script, folder], env=whole, capture_output=True, text=True, timeout=240)
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"Slurm is not installed and cannot be unpacked: {error}"
        if done.returncode:
            return None, f"Slurm is not installed and cannot be unpacked: {done.stderr.strip()[-300:]}"
    return folder, ""


CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
PluginDir={plugins}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{controller}
KillWait={killwait}
MinJobAge=300
InactiveLimit=0
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
SlurmctldTimeout=30
BatchStartTimeout=10
MessageTimeout=10
UnkillableStepTimeout=20
TCPTimeout=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=2 RealMemory=4000 \
State=UNKNOWN
PartitionName=low  Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1  PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=ALL Default=NO  MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    """A controller and its nodes, all on this machine, everything under one folder.

    ``auth/none`` trusts everyone on the host: for tests on the loopback interface only.
    """

    def __init__(
        self,
        prefix: Path,
        folder: Path,
        *,
        grace: int,
        user_signal: bool,
        killwait: int,
        nodes: int,
        slurmd_timeout: int,
    ) -> None:
        self.folder = folder
        self.nodes = nodes
        self.conf = folder / "etc/slurm.conf"
        self._sbin = prefix / "usr/sbin"
        libraries = prefix / "usr/lib/x86_64-linux-gnu"
        found = next(iter(sorted(prefix.glob("usr/lib/*/slurm-wlm"))), libraries / "slurm-wlm")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        self.environment = {**clean, "SLURM_CONF": str(self.conf), "OMP_NUM_THREADS": "1"}
        self.environment["PATH"] = f"{prefix / 'usr/bin'}:{prefix / 'usr/sbin'}:/usr/bin:/bin"
        if prefix != Path("/"):
            self.environment["LD_LIBRARY_PATH"] = f"{found}:{found.parent}"
        for part in ("etc", "run", "log", "state", *(f"spool/n{node}" for node in range(nodes))):
            (folder / part).mkdir(parents=True)
        port = free_ports(nodes + 1)
        text = CONF.format(
            host=socket.gethostname().partition(".")[0],
            port=port,
            user=getpass.getuser(),
            plugins=found,
            folder=folder,
            controller="SlurmctldParameters=preempt_send_user_signal" if user_signal else "",
            killwait=killwait,
            slurmd_timeout=slurmd_timeout,
            last=nodes - 1,
            first_port=port + 1,
            last_port=port + nodes,
            grace=grace,
        )
        self.conf.write_text(text)

    def start(self) -> None:
        self.start_controller("-c")  # a cold start: there is no state yet
        for node in range(self.nodes):
            self.start_node(node)
        self.wait(lambda: self.call("sinfo", "-h", "-N", "-o", "%N %T").count("idle") >= self.nodes, "all nodes idle")

    def start_controller(self, *options: str) -> None:
        self._daemon("slurmctld", "-f", self.conf, *options)

    def start_node(self, node: int) -> None:
        self._daemon("slurmd", "-f", self.conf, "-d", self._sbin / "slurmstepd", "-N", f"n{node}")

    def stop(self) -> None:
        """Ends what was started here, by id: daemons, and whatever carries this cluster's ``SLURM_CONF``."""
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            self.call("scancel", "--user", getpass.getuser(), check=False)
            self.wait(lambda: not self.call("squeue", "-h", check=False).strip(), "an empty queue", seconds=10)
        for _ in range(50):
            remaining = self.processes()
            for process in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if not remaining:
                return
            time.sleep(0.1)
        raise AssertionError(f"processes of {self.folder} do not end: {remaining}")

    def processes(self, *, containing: str = "") -> list[int]:
        """Ids of all processes of this cluster, jobs included, whose command line has this in it."""
        mark = f"SLURM_CONF={self.conf}\0".encode()
        ours = [int(one.name) for one in Path("/proc").glob("[0-9]*") if mark in _read(int(one.name), "environ")]
        return [one for one in ours if containing.encode() in _read(one, "cmdline").replace(b"\0", b" ")]

    def processes_of_node(self, node: int) -> list[int]:
        """A node's daemons, then all that they have started: before each ``srun`` its child, which cancels the step
        when it sees ``srun`` die."""
        name = f"SLURMD_NODENAME=n{node}\0".encode()
        tasks = [one for one in self.processes() if name in _read(one, "environ")]
        parents = {one: int(_read(one, "stat").rpartition(b")")[2].split()[1]) for one in tasks}
        steps = [one for one in {*parents.values()} if _read(one, "cmdline").startswith(b"slurmstepd")]
        tasks.sort(key=lambda one: not _read(parents[one], "cmdline").startswith(b"srun"))
        return [self.pid(f"slurmd.n{node}"), *steps, *tasks]

    def pid(self, daemon: str) -> int:
        """``"slurmctld"`` or ``"slurmd.n0"``."""
        return int((self.folder / f"run/{daemon}.pid").read_text())

    def call(self, *command: str | Path, check: bool = True, cwd: Path | None = None, **variables: str) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            env={**self.environment, **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def show(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says: ``JobState``, ``Restarts``, …"""
        words = self.call("scontrol", "show", "job", job, "-o", check=False).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def preempt(self, seconds: int = 1) -> str:
        """Submit a job that takes all nodes from the ones below it; returns its id."""
        options = ["-p", "high", f"-N{self.nodes}", "--exclusive", "-o", "/dev/null", "-t", "2", "--parsable"]
        return self.call("sbatch", *options, "--wrap", f"sleep {seconds}").strip()

    def wait(self, happened: Callable[[], object], what: str, seconds: float = 150) -> None:
        """Polls; fails with the ends of all logs."""
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, f"{what}: not within {seconds} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        parts = [self.call("scontrol", "show", "jobs", check=False)]
        for log in sorted((self.folder / "log").glob("*.log")):
            parts.append(f"-- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]))
        return "\n".join(parts)

    def _daemon(self, name: str, *options: str | Path) -> None:
        log = self.folder / f"log/{name}.start.log"
        with log.open("ab") as file:  # not a pipe: the daemon would keep it open
            done = subprocess.run(
                [self._sbin / name, *options], env=self.environment, stdout=file, stderr=file, timeout=60
            )
        assert done.returncode == 0, log.read_text(errors="replace")


def _read(process: int, what: str) -> bytes:
    """A file of ``/proc``; nothing of a process that has just ended."""
    try:
        return Path(f"/proc/{process}/{what}").read_bytes()
    except OSError:
        return b"(gone) S 0" if what == "stat" else b""


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SlurmCluster]]:
    """``slurm_cluster(grace=30, user_signal=False, killwait=5, nodes=2)``: a cluster like that, started once."""
    prefix, reason = slurm_prefix()
    if prefix is None:
        if os.environ.get(REQUIRE):
            pytest.fail(f"{REQUIRE} is set, but: {reason}")
        pytest.skip(reason)
    started: dict[tuple, SlurmCluster] = {}

    def make(
        *, grace: int = 30, user_signal: bool = False, killwait: int = 5, nodes: int = 2, slurmd_timeout: int = 60
    ) -> SlurmCluster:
        settings = (grace, user_signal, killwait, nodes, slurmd_timeout)
        if settings not in started:
            cluster = SlurmCluster(
                prefix,
                tmp_path_factory.mktemp("slurm"),
                grace=grace,
                user_signal=user_signal,
                killwait=killwait,
                nodes=nodes,
                slurmd_timeout=slurmd_timeout,
            )
            started[settings] = cluster
            cluster.start()
        return started[settings]

    yield make
    for cluster in started.values():
        cluster.stop()


TOML = """
[run]
name = "tiny"
dir = "{folder}/runs"
device = "cpu"

[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4

[data]
name = "text_files"
path = "{folder}/text"

[train]
steps = 60
seq_len = 32
batch_size = 4
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[scheduler]
name = "cosine"
warmup_steps = 2

[metrics]
interval = 1

[checkpoint]
interval = 1000
"""

PACE = {
    "pace/plugin.py": """
        from forge_core.api import Component, hookimpl
        FORGE_API = "1.0"
        @hookimpl
        def forge_callbacks():
            yield Component(name="pace", summary="takes its time", factory="pace.pace:Pace", config="pace.config:Pace")
    """,
    "pace/config.py": '''
        import attrs
        @attrs.frozen(kw_only=True)
        class Pace:
            """How slow."""
            seconds: float = 0.1
            """What each step takes at least."""
            die_at: int = 0
            """The step at which the last rank dies; 0 never."""
            dies: int = 1
            """How many times."""
            cause: str = "killed"
            """What it dies of: killed, segfault or memory."""
            stop_at: int = 0
            """The step at which the callback asks to stop."""
    ''',
    "pace/pace.py": """
        import ctypes, os, resource, signal, time
        import torch
        from forge_core.contracts.callback import Callback
        class Pace(Callback):
            def __init__(self, config):
                self.config = config
            def step_start(self, run, step):
                time.sleep(self.config.seconds)
                if step == self.config.die_at and run.rank == run.world_size - 1:
                    deaths = run.run_dir / "deaths"
                    count = len(deaths.read_text()) if deaths.exists() else 0
                    if count < self.config.dies:
                        deaths.write_text("x" * (count + 1))
                        die_of(self.config.cause)
            def step_end(self, run, context):
                if context.step == self.config.stop_at:
                    run.requests.stop = "enough"
        def die_of(cause):
            if cause == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif cause == "segfault":
                ctypes.string_at(0)
            else:
                resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
                torch.ones(1 << 26)
    """,
}
"""A plugin whose callback makes steps last, so that something can happen to them."""


class SlurmJob:
    """A small job in a folder of its own, with ways to run it by hand and on a cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "tiny.toml"
        self.config.write_text(TOML.format(folder=folder))
        (folder / "text").mkdir()
        for i in range(12):
            lines = "\n".join(f"line {j} of file {i}: {(i * 7919 + j * 104729) % 9973}" for j in range(60))
            (folder / "text" / f"{i}.txt").write_text(lines)
        self.site = folder / "site"
        contents = {
            **PACE,
            "pace-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pace\nVersion: 1.0\n",
            "pace-1.0.dist-info/entry_points.txt": "[forge.v1]\npace = pace.plugin\n",
            "pace/__init__.py": "",
        }
        for path, text in contents.items():
            (self.site / path).parent.mkdir(parents=True, exist_ok=True)
            (self.site / path).write_text(dedent(text))

    @property
    def variables(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join([str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def forge(
        self, *arguments: str | Path, cluster: SlurmCluster | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = cluster.environment if cluster else os.environ
        return fork_server.run(
            [sys.executable, "-m", "forge_core", *map(str, arguments)],
            env={**environment, "OMP_NUM_THREADS": "1", **self.variables, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def submit(self, cluster: SlurmCluster, name: str, *arguments: str, time: str = "30") -> str:
        """Returns the id of the job."""
        nodes = () if any(one.startswith("--nodes") for one in arguments) else ("--nodes", "2")
        done = self.forge(
            "submit", self.config, *nodes, "--time", time, "--partition", "low", f"run.name={name}", *arguments,
            cluster=cluster,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((self.path(name) / "slurm/jobs.jsonl").read_text().splitlines()[-1])["job_id"]

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def steps(self, name: str) -> int:
        """The last step that was logged."""
        metrics = self.path(name) / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def log(self, name: str) -> str:
        log = self.path(name) / "slurm/output.log"
        return log.read_text(errors="replace") if log.exists() else ""


@pytest.fixture
def slurm_job(tmp_path: Path) -> SlurmJob:
    return SlurmJob(tmp_path)


@pytest.fixture(scope="session")
def make_slurm_job() -> Callable[[Path], SlurmJob]:
    return SlurmJob
