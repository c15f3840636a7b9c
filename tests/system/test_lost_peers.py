"""A rank that dies or hangs is named by the others, and nothing is left of the run: no rank, no launcher.

Times are those of reliability goal G11 (timeout + 2 s, timeout + 35 s) with room for a machine that is busy.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fork_server
from rank_ports import free_ports

TIMEOUT = 6
SETTINGS = [
    *(f"run.step_timeout={TIMEOUT}", "run.first_step_timeout=60", "train.steps=100000", "train.batch_size=1"),
    *("checkpoint.interval=0", "data.workers=0"),
]

LOST = r"rank {} on \S+ has lost another rank in step \d+: rank {} on \S+ "

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="/proc is looked at")]


@pytest.fixture
def start(tiny):
    """Start a command of its own session; nothing of it is left after the test."""
    yield from _starting(tiny)


def _starting(*jobs):
    """Gives a function that starts a command in the folder of a job, by which all processes of it are found; ends
    them."""
    started = []

    def start(command, *, job=jobs[0], popen=fork_server.Popen, **environment):
        process = popen(
            command,
            env={**job.environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=job.folder,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
    for number in [number for job in jobs for number in processes_of(job)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    for process in started:
        process.communicate(timeout=30)


@pytest.fixture
def start_ranks(tiny, start):
    return lambda n, *overrides, **environment: _start_ranks(start, tiny, n, *overrides, **environment)


def _start_ranks(start, job, n, *overrides, **environment):
    group = {"WORLD_SIZE": str(n), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports()), **environment}
    return [
        start(job.command(*SETTINGS, *overrides), job=job, RANK=str(rank), LOCAL_RANK=str(rank), **group)
        for rank in range(n)
    ]


def processes_of(tiny):
    """All that are in this job's folder: ranks, launchers, watchdogs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                folder = (entry / "cwd").readlink()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if folder == tiny.folder and state != "Z":
                found.append(int(entry.name))
    return found


def ranks_among(processes):
    """By rank, those that are no watchdogs."""
    found = {}
    for process in processes:
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
            command = Path(f"/proc/{process}/cmdline").read_bytes().decode()
        except OSError:
            continue
        rank = next((e[5:] for e in environment if e.startswith("RANK=")), None)
        if rank is not None and "watched_rank.py" not in command:
            found[int(rank)] = process
    return found


def wait_until(condition, seconds, *processes):
    deadline = time.monotonic() + seconds
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_training(tiny):
    try:
        return len(tiny.metrics()) >= 5
    except (OSError, ValueError):
        return False


STUCK = """
import ctypes, os, time
import torch
from forge_core.contracts.callback import Callback

class Stuck(Callback):
    def __init__(self, config):
        self.how = config.how

    def step_end(self, run, context):
        if self.how == "collective" and context.step == 5 and run.rank == 0:
            torch.distributed.all_reduce(torch.zeros(3))
        elif context.step == 5 and run.rank == 1:
            if self.how == "fails":
                raise KeyError("a bug")
            if self.how == "leaves":
                os._exit(7)
            if self.how == "dies once":
                if not (run.run_dir / "died").exists():
                    (run.run_dir / "died").touch()
                    os.kill(os.getpid(), 9)
                return
            if self.how == "collective":
                return
            if self.how == "sleeps":
                time.sleep(1000)
            # a PyDLL's functions are called with the interpreter locked: no thread of Python moves any more
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""
PLUGIN = """
from forge_core.api import Component, hookimpl
FORGE_API = "1.0"

@hookimpl
def forge_callbacks():
    yield Component(name="stuck", summary="-", factory="acme_stuck.stuck:Stuck", config="acme_stuck.config:Config")
"""
CONFIG = """
import attrs

@attrs.frozen(kw_only=True)
class Config:
    how: str = "sleeps"
"""


def package(folder, name, source):
    """A folder of packages: the class of a source as the callback of this name."""
    plugin = PLUGIN.replace("stuck", name).replace("Stuck", name.capitalize())
    about = f"acme_{name}-1.0.dist-info"
    files = {
        f"acme_{name}/__init__.py": "",
        f"acme_{name}/plugin.py": plugin,
        f"acme_{name}/{name}.py": source,
        f"acme_{name}/config.py": CONFIG,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: 1.0\n",
        f"{about}/entry_points.txt": f"[forge.v1]\nacme-{name} = acme_{name}.plugin\n",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture(scope="module")
def stuck(tmp_path_factory):
    """A folder of packages: a callback that brings rank 1 down in step 5."""
    return package(tmp_path_factory.mktemp("packages"), "stuck", STUCK)


def callback(how):
    return f'callbacks=[{{name="stuck", how="{how}"}}]'


WAIT_FOR_EACH_OTHER = (
    r"all of them still give signs of life, and wait for each other: rank 0 on \S+ is in step 5, at stuck.py:\d+, in "
    r"callbacks\[\d\] plugin.acme-stuck.callback.stuck, step_end; rank 1 on \S+ is in step 6, at \w+.py:\d+"
)


SLOW_READER = f"""
import time

from forge_core.contracts.callback import Callback
from forge_core.checkpoint import store

class Slow(Callback):
    def __init__(self, config):
        pass

    def run_start(self, run):
        if run.rank == 1:
            verify = store.damage
            store.damage = lambda *arguments: time.sleep({TIMEOUT + 8}) or verify(*arguments)
"""
HELD_UP = {  # by what holds rank 1 up
    "sleeps": "is alive and does not come: it is in step 5, at stuck.py",
    "locks": "has given no sign of life",
    "fails": "has ended: KeyError: 'a bug'",
    "leaves": "has ended without a word",
    "collective": WAIT_FOR_EACH_OTHER,
}


class HeldUp:
    """Runs of which a rank is held up, all at once, since each waits for most of its time."""

    def __init__(self, jobs, start, stuck, slow):
        self.jobs = jobs
        """By what holds them up."""
        self.launchers = {}
        self.stopped, self.killed = (_start_ranks(start, jobs[name], 3) for name in ("stopped", "killed"))
        wait_until(lambda: is_training(jobs["stopped"]), 120, *self.stopped)
        self.stopped[1].send_signal(signal.SIGSTOP)
        wait_until(lambda: is_training(jobs["killed"]), 120, *self.killed)
        self.killed[1].kill()
        both = 'callbacks=[{name="stuck"}, {name="health", interval=5, collective_timeout=3.0}]'
        diverges = ["optimizer.lr=1e30", "train.clip_norm=0"]
        gives_up = ["anomalies.roll_back_after=1", "anomalies.give_up_after=1"]
        settings = {
            **{how: [callback(how)] for how in HELD_UP},
            "health": [both, "run.step_timeout=600"],
            "reader": [*diverges, *gives_up, "checkpoint.interval=1", 'callbacks=["slow"]'],
        }
        for name, overrides in settings.items():
            command = jobs[name].command("--nproc", "2", *SETTINGS, *overrides)
            packages = slow if name == "reader" else stuck
            self.launchers[name] = start(command, job=jobs[name], PYTHONPATH=str(packages))

    def ended(self, name):
        """The launcher's exit code and what it has said."""
        _, said = self.launchers[name].communicate(timeout=240)
        wait_until(lambda: not processes_of(self.jobs[name]), 30)
        return self.launchers[name].returncode, said


@pytest.fixture(scope="module")
def held_up(new_tiny, tmp_path_factory, stuck):
    jobs = {name: new_tiny(name) for name in (*HELD_UP, "stopped", "killed", "health", "reader")}
    slow = package(tmp_path_factory.mktemp("packages"), "slow", SLOW_READER)
    for start in _starting(*jobs.values()):
        yield HeldUp(jobs, start, stuck, slow)


def test_a_rank_that_is_stopped_is_named_by_all_others_and_ended(held_up):
    ranks, tiny = held_up.stopped, held_up.jobs["stopped"]
    said = [ranks[rank].communicate(timeout=60)[1] for rank in (0, 2)]
    ranks[1].wait(timeout=60)
    wait_until(lambda: not processes_of(tiny), 30)

    assert [ranks[rank].returncode for rank in (0, 2)] == [5, 5], said
    for rank, one in zip((0, 2), said, strict=True):
        assert re.search(LOST.format(rank, 1) + "has given no sign of life", one)
    assert "its process is stopped" in ranks[1].communicate()[1]
    stacks = (tiny.path() / "stacks" / "rank_1.txt").read_text()
    assert "in _train_step" in stacks or "in exchange" in stacks or "in run" in stacks


def test_a_rank_that_is_killed_is_named_by_all_others(held_up):
    ranks, tiny = held_up.killed, held_up.jobs["killed"]
    said = [ranks[rank].communicate(timeout=60)[1] for rank in (0, 2)]

    assert [ranks[rank].returncode for rank in (0, 2)] == [5, 5], said
    for rank, one in zip((0, 2), said, strict=True):
        assert re.search(LOST.format(rank, 1) + f"has ended without a word: its process {ranks[1].pid} is gone", one)
    wait_until(lambda: not processes_of(tiny), 30)
    assert "lost another rank" in (tiny.path() / "log.txt").read_text()
    assert [path for path in tiny.path().glob("stacks/*") if path.stat().st_size] == []
    for rank in (0, 2):
        record = json.loads((tiny.path() / "collectives" / f"rank_{rank}.json").read_text())
        assert record["entries"][-1]["profiling_name"].startswith("gloo:")


@pytest.mark.parametrize("how", HELD_UP)
def test_what_holds_a_rank_up_is_found_and_the_launcher_ends_with_its_code(held_up, how):
    code, errors = held_up.ended(how)

    lost = r"rank 0 on \S+ has lost another rank in step \d+: " if how == "collective" else LOST.format(0, 1)
    assert re.search(lost + HELD_UP[how], errors), errors
    assert code == (1 if how == "fails" else 5), errors
    assert ("error: rank 1 has ended by exit code 7" in errors) is (how == "leaves")
    if how in ("sleeps", "locks"):
        stacks = held_up.jobs[how].path() / "stacks"
        assert "stuck.py" in (stacks / "rank_1.txt").read_text()
        assert not (stacks / "rank_0.txt").exists()


def test_the_all_reduce_of_the_health_callback_has_a_deadline_of_its_own(held_up):
    code, errors = held_up.ended("health")

    assert code == 5
    assert re.search(LOST.format(0, 1) + "is alive and does not come: it is in step 5, at stuck.py", errors), errors


def test_going_back_to_a_checkpoint_may_take_a_rank_longer_than_a_step(held_up):
    code, said = held_up.ended("reader")

    assert code == 4, said
    assert "rolled_back" in (held_up.jobs["reader"].path() / "events.jsonl").read_text()


SLOW_REMOVER = f"""
import shutil
import time

from forge_core.contracts.callback import Callback

class Slow(Callback):
    def __init__(self, config):
        pass

    def run_start(self, run):
        remove = shutil.rmtree

        def slow(path, **options):
            if str(path).endswith(".removed"):
                time.sleep({TIMEOUT + 8})
            remove(path, **options)

        shutil.rmtree = slow
"""


@pytest.mark.nightly
def test_deleting_an_old_checkpoint_may_take_longer_than_a_step(tiny, start, tmp_path):
    saves = ["train.steps=60", "checkpoint.interval=20", "checkpoint.keep_last=1", 'callbacks=["slow"]']

    slow = package(tmp_path / "packages", "slow", SLOW_REMOVER)
    run = start(tiny.command("--nproc", "2", *SETTINGS, *saves), PYTHONPATH=str(slow))
    _, said = run.communicate(timeout=240)

    assert run.returncode == 0, said
    names = sorted(path.name for path in (tiny.path() / "checkpoints").iterdir())
    assert names == ["latest", "step_00000060"]


def test_a_crash_is_followed_by_a_restart_that_goes_on_from_the_newest_checkpoint(tiny, start, stuck):
    single = tiny.completed("run.name=single")
    settings = ["train.batch_size=2", "checkpoint.interval=2", "checkpoint.background=false", callback("dies once")]

    run = start(tiny.command("--nproc", "2", "--max-restarts", "1", *settings), PYTHONPATH=str(stuck))
    _, said = run.communicate(timeout=240)

    assert run.returncode == 0, said
    assert "started again from step_00000004" in said
    assert starts(tiny) == [("started", 0), ("resumed", 4)]
    assert [line["loss"] for line in tiny.metrics()] == pytest.approx([line["loss"] for line in single], rel=1e-5)


def test_restarts_that_get_no_further_are_counted_and_given_up(tiny, start, stuck):
    settings = ["train.batch_size=2", "checkpoint.interval=2", "checkpoint.background=false", callback("fails")]

    run = start(tiny.command("--nproc", "2", "--max-restarts", "1", *settings), PYTHONPATH=str(stuck))
    _, said = run.communicate(timeout=240)

    assert run.returncode == 1
    assert starts(tiny) == [("started", 0), ("resumed", 4), ("resumed", 4)]
    assert "given up after 1 restarts in a row without a new checkpoint" in said


def test_a_stop_is_remembered_while_the_ranks_start_again(tiny, start, stuck):
    settings = ["train.batch_size=2", "checkpoint.interval=2", "checkpoint.background=false", callback("dies once")]
    run = start(tiny.command("--nproc", "2", "--max-restarts", "3", *settings), PYTHONPATH=str(stuck))
    said = []
    while not any("started again from step_00000004" in line for line in said):
        said.append(run.stderr.readline())
        assert said[-1], said

    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=120)

    assert run.returncode == 3, (out, said)
    assert "SIGTERM: stopped, and not started again; the newest checkpoint is step_00000004" in out
    assert starts(tiny) == [("started", 0)]


def starts(tiny):
    events = map(json.loads, (tiny.path() / "events.jsonl").read_text().splitlines())
    return [(event["event"], event["step"]) for event in events if event["event"] in ("started", "resumed")]


@pytest.mark.parametrize("launcher", ["--nproc", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_no_rank_outlives_a_launcher_that_is_killed(tiny, start, launcher):
    command = tiny.command(*SETTINGS)
    if launcher == "--nproc":
        command += ["--nproc", "2"]
    else:
        torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command[2:3] = [*torchrun, "--local-addr=localhost", "-m", "forge_core"]
    run = start(command, popen=subprocess.Popen)
    wait_until(lambda: is_training(tiny), 120, run)
    assert set(ranks_among(processes_of(tiny))) == {0, 1}

    run.kill()

    wait_until(lambda: not processes_of(tiny), 60)


def test_a_rank_whose_launcher_has_died_before_it_starts_does_not_start(tiny, start_ranks):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    (rank,) = start_ranks(1, FORGE_LAUNCHER=str(gone.pid), TORCHELASTIC_RUN_ID=str(gone.pid))

    _, said = rank.communicate(timeout=60)
    assert rank.returncode == 5
    assert "rank 0 has lost its launcher before it could start" in said
    assert not tiny.path().exists()


def test_a_second_trainer_of_a_run_is_refused_and_told_who_has_it(tiny, start):
    first = start(tiny.command(*SETTINGS))
    wait_until(lambda: is_training(tiny), 60, first)
    before = (tiny.path() / "job.toml").stat()

    second = start(tiny.command(*SETTINGS, "optimizer.lr=1e-3"))
    _, said = second.communicate(timeout=60)

    assert second.returncode == 2
    assert f"another process is training in {tiny.path()}: process {first.pid} on {socket.gethostname()}" in said
    assert (tiny.path() / "job.toml").stat() == before
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_another_attempt_has_taken_over_ends_at_its_next_save_on_all_ranks(tiny, start_ranks, ranks):
    """It had been stopped for too long, and trains on without knowing."""
    processes = start_ranks(ranks, "checkpoint.interval=20")
    wait_until(lambda: list((tiny.path() / "checkpoints").glob("step_*")), 60, *processes)
    sign = json.loads((tiny.path() / "lease.json").read_text())
    (tiny.path() / "lease.json").write_text(json.dumps({**sign, "attempt": "b" * 32, "host": "node7"}))

    said = [process.communicate(timeout=60)[1] for process in processes]

    assert [process.returncode for process in processes] == [1] * ranks
    assert "on node7) has taken over" in said[0]
    assert json.loads((tiny.path() / "lease.json").read_text())["attempt"] == "b" * 32


def temporary_folder(tiny, host):
    """Of a host alone, as on two machines: ranks that share one are a node."""
    folder = tiny.folder / "temporary" / host
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def start_on_two_hosts(tiny, start, hosts, *overrides):
    torchrun = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=10.207.0.1", "--master-port=29519"]
    return [
        start(
            [
                *["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *torchrun],
                *[f"--node-rank={i}", f"--local-addr={address}", "-m", "forge_core"],
                *["run", str(tiny.config), *SETTINGS, *overrides],
            ],
            GLOO_SOCKET_IFNAME=cable,
            TMPDIR=temporary_folder(tiny, name),
        )
        for i, (name, address, cable) in enumerate(hosts)
    ]


def link(host, state):
    name, _, cable = host
    subprocess.run(["ip", "-n", name, "link", "set", cable, state], check=True)


@pytest.mark.nightly
def test_a_cut_link_is_noticed_on_both_sides_and_no_launcher_is_left(tiny, start, two_hosts):
    hosts = start_on_two_hosts(tiny, start, two_hosts)
    wait_until(lambda: is_training(tiny), 120, *hosts)

    link(two_hosts[1], "down")
    said = [host.communicate(timeout=100)[1] for host in hosts]
    wait_until(lambda: not processes_of(tiny), 30)

    assert all(host.returncode for host in hosts)
    assert re.search(LOST.format(0, 1) + "has given no sign of life", said[0])
    assert re.search(r"rank 1 on \S+ has lost another rank in step \d+: rank 0 does not answer: .* 10.207.0.1", said[1])


@pytest.mark.nightly
def test_a_link_that_is_away_for_five_seconds_costs_nothing_else(tiny, start, two_hosts):
    hosts = start_on_two_hosts(tiny, start, two_hosts, "run.step_timeout=60", "train.steps=2000")
    wait_until(lambda: is_training(tiny), 120, *hosts)

    link(two_hosts[1], "down")
    time.sleep(5)
    link(two_hosts[1], "up")
    said = [host.communicate(timeout=250)[1] for host in hosts]

    assert [host.returncode for host in hosts] == [0, 0], said
    events = [json.loads(line)["event"] for line in (tiny.path() / "events.jsonl").read_text().splitlines()]
    assert events.count("started") == 1
    assert "resumed" not in events


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_host_that_is_replaced_joins_again_and_there_are_never_two_worlds(tiny, start, two_hosts):
    elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=10", "--rdzv-backend=c10d", "--rdzv-id=x"]
    conf = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3,read_timeout=10,is_host="

    def start_host(i):
        name, address, cable = two_hosts[i]
        return start(
            [
                *["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *elastic],
                *["--rdzv-endpoint=10.207.0.1:29521", f"--rdzv-conf={conf}{1 - i}", f"--local-addr={address}"],
                *["-m", "forge_core", "run", str(tiny.config), *SETTINGS, "run.step_timeout=20"],
                *["train.batch_size=2", "train.global_batch_size=4", "checkpoint.interval=20"],
            ],
            GLOO_SOCKET_IFNAME=cable,
            TMPDIR=temporary_folder(tiny, name),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    def worlds():
        events = map(json.loads, (tiny.path() / "events.jsonl").read_text().splitlines())
        return [event["mesh"]["dp_shard"] for event in events if event["event"] in ("started", "resumed")]

    def is_further_than(step):
        return is_training(tiny) and tiny.metrics()[-1]["step"] > step

    first, second = start_host(0), start_host(1)
    wait_until(lambda: is_further_than(30), 120, first, second)
    numbers = subprocess.run(["ip", "netns", "pids", two_hosts[1][0]], capture_output=True, text=True).stdout.split()
    for number in numbers:
        os.kill(int(number), signal.SIGKILL)
    wait_until(lambda: worlds()[-1] == 1, 120, first)
    alone_since = tiny.metrics()[-1]["step"]
    wait_until(lambda: is_further_than(alone_since + 30), 120, first)

    third = start_host(1)
    wait_until(lambda: worlds()[-1] == 2, 120, first, third)
    wait_until(lambda: is_further_than(alone_since + 60), 120, first, third)

    assert worlds() == [2, 1, 2]


HANGS = '''
import time

from forge_core.api import component
from forge_core.contracts.callback import Callback


@component("callback")
class Hangs(Callback):
    """Hangs in step 3."""

    def step_start(self, run, step):
        if step == 3:
            time.sleep(1000)
'''


def test_a_process_alone_that_hangs_is_ended_where_its_job_names_a_supervisor(tiny):
    (tiny.folder / "hangs.py").write_text(HANGS)
    plugin = [f'plugins.files=["{tiny.folder}/hangs.py"]', "callbacks=['hangs']"]

    done = tiny.run(*plugin, "run.supervisor=peers", "run.step_timeout=5")

    assert done.returncode == 5, done.stderr
    assert re.search(r"error: rank 0 on \S+ has got no further for \d+ s in step 3, at hangs.py:14, in ", done.stderr)
    assert "lost another rank" not in done.stderr
    assert "hangs.py" in (tiny.path() / "stacks" / "rank_0.txt").read_text()
