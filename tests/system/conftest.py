"""A job that takes a second, and ways to run it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

import fork_server
from forge_core.checkpoint.manifest import describe_file, read_manifest, write_manifest
from forge_core.errors import ExitCode
from forge_core.job import catalog_of, load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job

TOML = """
[run]
name = "tiny"
dir = "{folder}/runs"

[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
max_seq_len = 64
qk_norm = true

[data]
name = "text_files"
path = "{folder}/text"
pattern = "**/*.txt"
validation = 0.3

[train]
steps = 10
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
"""


class TinyJob:
    """A job in a folder of its own; ``run`` starts real processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "tiny.toml"
        text = folder / "text"
        text.mkdir()
        for i in range(12):
            lines = "\n".join(f"line {j} of file {i}: {(i * 7919 + j * 104729) % 9973}" for j in range(60))
            (text / f"{i}.txt").write_text(lines)
        self.config.write_text(TOML.format(folder=folder))

    def run(self, *overrides: str, command: str = "run", timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return fork_server.run(
            self.command(*overrides, command=command),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def command(self, *overrides: str, command: str = "run") -> list[str]:
        return [sys.executable, "-m", "forge_core", command, str(self.config), *overrides]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    def completed(self, *overrides: str) -> list[dict]:
        """Run to the end, in this process if one is enough (starting one costs more); returns the metrics."""
        if "--nproc" in overrides:
            done = self.run(*overrides)
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            job = load_job(self.config, overrides, catalog=discover, world_size=1)
            assert run_job(job, catalog_of(job, discover)) is ExitCode.COMPLETED
        name = next((o.partition("=")[2] for o in overrides if o.startswith("run.name=")), "tiny")
        return self.metrics(name)

    def kill_after(self, n_lines: int, name: str, *overrides: str, pause: float = 0.0) -> None:
        """Start the run ``name``, and kill it ``pause`` seconds after its metrics have so many lines."""
        started = fork_server.Popen(
            self.command(*overrides, f"run.name={name}"),
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        file, deadline = self.path(name) / "metrics.jsonl", time.monotonic() + 200
        while not file.exists() or len(file.read_text().splitlines()) < n_lines:
            assert started.poll() is None, started.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(pause)
        started.kill()
        started.communicate()

    def metrics(self, name: str = "tiny") -> list[dict]:
        lines = (self.path(name) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def path(self, name: str = "tiny") -> Path:
        return self.folder / "runs" / name


@pytest.fixture
def tiny(tmp_path: Path) -> TinyJob:
    return TinyJob(tmp_path)


@pytest.fixture(scope="module")
def shared_tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    """For tests that only add runs under names of their own."""
    return TinyJob(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def new_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyJob]:
    """A function that makes another one, in a folder of this name."""
    return lambda name: TinyJob(tmp_path_factory.mktemp(name))


TRAINING = ("step", "loss", "grad_norm", "lr", "tokens")


@pytest.fixture
def training_values() -> Callable[[list[dict]], list[tuple[float, ...]]]:
    """What must be equal for equal training; times are not."""
    return lambda lines: [tuple(line[key] for key in TRAINING) for line in lines if "loss" in line]


@pytest.fixture
def rewrite_job() -> Callable[..., Path]:
    """A function that makes a checkpoint's job say something else, and its manifest name other versions of plugins."""

    def rewrite(checkpoint: Path, old: str, new: str, **versions: str) -> Path:
        job = checkpoint / "job.toml"
        assert old in job.read_text()
        job.write_text(job.read_text().replace(old, new))
        manifest = read_manifest(checkpoint)
        files = {**manifest.files, "job.toml": describe_file(job)}
        write_manifest(checkpoint, attrs.evolve(manifest, files=files, versions={**manifest.versions, **versions}))
        return checkpoint

    return rewrite


@pytest.fixture
def two_hosts():
    """Two network namespaces with nothing between them but a cable: their names, addresses and interfaces."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("no network namespaces: there is no `ip` command")
    names = [f"forge-{os.getpid()}-{i}" for i in range(2)]
    cables = [f"fg{os.getpid() % 100_000}{'ab'[i]}" for i in range(2)]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add {cables[0]} type veth peer name {cables[1]}",
        *(f"ip link set {cable} netns {name}" for name, cable in zip(names, cables, strict=True)),
        *(f"ip -n {name} addr add 10.207.0.{i + 1}/24 dev {cables[i]}" for i, name in enumerate(names)),
        *(f"ip -n {name} link set {link} up" for i, name in enumerate(names) for link in (cables[i], "lo")),
    ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"this machine does not allow network namespaces: {command}: {done.stderr.strip()}")
        yield [(name, f"10.207.0.{i + 1}", cables[i]) for i, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
