"""FSDP with parameters in the host's memory, and with blocks gathered ahead: same training, other places and times.

Only CUDA has a memory besides the host's. On the CPU the same code runs with both in one place; ``cpu_offload`` is
refused there, and so its conflicts are taken out first.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

import fork_server
from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError, ExitCode
from forge_core.job import ConfigProblems, load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job
from forge_core.train.build import allocate, build_model
from forge_testing.component_case import builder
from forge_testing.small_model import SmallModel, small_job
from parity_matrix.launch import JOB
from rank_ports import free_ports

pytestmark = pytest.mark.timeout(900)  # the first test starts all processes

TOML = """
[run]
name = "unnamed"
dir = "{folder}/runs"
device = "{device}"

[model]
name = "transformer"
dim = 32
n_layers = 3
n_heads = 4
max_seq_len = 64

[data]
name = "text_files"
path = "{folder}/text"
pattern = "**/*.txt"

[train]
steps = 6
seq_len = 32
batch_size = 2
grad_accumulation = 2
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[metrics]
interval = 1

[checkpoint]
interval = 3
"""

OFFLOAD = "parallel.passes.fsdp.cpu_offload=true"

# One after the other in one launch of two ranks. The same name goes on where it stopped.
WORKS: list[tuple[str, list[str]]] = [
    ("plain", []),
    ("offloaded", [OFFLOAD]),
    ("gathered-ahead", ["parallel.passes.fsdp.prefetch=2"]),
    ("taken-back", [OFFLOAD, "train.steps=3"]),
    ("taken-back", []),
    ("taken-away", ["train.steps=3"]),
    ("taken-away", [OFFLOAD]),
]

WORKER = """
import json, os, sys
from pathlib import Path

import torch

from forge_core.job import load_job
from forge_core.contracts.parallel_pass import PassContext
from forge_core.registry.discovery import discover
from forge_core.train.build import materialise
from forge_core.train.executor import PlainExecutor
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.run.run import run_job
from forge_core.errors import ExitCode
from forge_core.launch import hard_exit
from forge_testing.component_case import builder
from forge_testing.small_model import SmallModel, cross_entropy, small_job

catalog = discover()
fsdp = catalog.lookup("parallel_pass", "forge-plugins-parallel:fsdp").component
object.__setattr__(fsdp, "conflicts", ())
works = json.loads(Path(sys.argv[2]).read_text())
for port, settings in works["runs"]:
    os.environ["MASTER_PORT"] = str(port)
    job = load_job(Path(sys.argv[1]), settings, catalog=catalog, world_size=2)
    assert run_job(job, catalog) is ExitCode.COMPLETED

cpu = torch.device("cpu")
os.environ["MASTER_PORT"] = str(works["port"])
join_process_group(cpu)


def asked_for(prefetch):
    \"\"\"How many blocks have been asked for when each begins to compute, in forward and in backward.\"\"\"
    job = small_job()
    with torch.device("meta"):
        model = SmallModel(n_layers=5)
    use = builder().resolve("parallel_pass", {"name": "fsdp", "prefetch": prefetch})
    model, _ = builder()(use).apply(model, PassContext(build_mesh(job, cpu), job, cpu))
    materialise(model, cpu, seed=0)
    asked, seen = set(), {"forward": [], "backward": []}

    def note(way):
        seen[way].append(len(asked))

    def start_over(gradient):
        asked.clear()
        return gradient

    for name, block in model.blocks.items():
        group = block._get_fsdp_state()._fsdp_param_group

        def unshard(*args, name=name, unshard=group.unshard, **kwargs):
            asked.add(name)
            return unshard(*args, **kwargs)

        group.unshard = unshard
        block.attention_norm.register_forward_pre_hook(lambda *_: note("forward"))
        block.down.register_full_backward_pre_hook(lambda *_: note("backward"))

    def loss(hidden, head, targets):
        summed = cross_entropy(hidden, head, targets)
        summed.total.register_hook(start_over)
        return summed

    tokens = torch.zeros(2, 8, dtype=torch.int64)
    PlainExecutor(model, loss).run([{"tokens": tokens, "targets": tokens}], torch.tensor(1.0))
    return seen


print(json.dumps({str(prefetch): asked_for(prefetch) for prefetch in (0, 1, 2)}))
hard_exit()
"""


def write_job(folder: Path, device: str = "cpu") -> Path:
    config = folder / "tiny.toml"
    config.write_text(TOML.format(folder=folder, device=device))
    (folder / "text").mkdir()
    for i in range(12):
        lines = "\n".join(f"line {j} of file {i}: {(i * 7919 + j * 104729) % 9973}" for j in range(60))
        (folder / "text" / f"{i}.txt").write_text(lines)
    return config


def metrics(config: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (config.parent / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def curve(config: Path, name: str) -> list[float]:
    return [line[key] for line in metrics(config, name) for key in ("loss", "grad_norm")]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The configuration, and what rank 0 printed at the end."""
    config = write_job(tmp_path_factory.mktemp("offload"))
    (config.parent / "worker.py").write_text(WORKER)
    runs = [(free_ports(), [*settings, f"run.name={name}"]) for name, settings in WORKS]
    (config.parent / "works.json").write_text(json.dumps({"runs": runs, "port": free_ports()}))
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
    ranks = [
        fork_server.Popen(
            [sys.executable, config.parent / "worker.py", config, config.parent / "works.json"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=800) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, err) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, err[-4000:]
    return config, json.loads(said[0][0].splitlines()[-1])


@pytest.mark.parametrize("name", ["offloaded", "gathered-ahead"])
def test_training_is_the_same(launched, name):
    config, _ = launched

    assert curve(config, name) == pytest.approx(curve(config, "plain"), rel=1e-6)


@pytest.mark.parametrize("name", ["taken-back", "taken-away"])
def test_a_checkpoint_goes_on_with_and_without(launched, name):
    config, _ = launched

    assert len(metrics(config, name)) == 6
    assert curve(config, name) == pytest.approx(curve(config, "plain"), rel=1e-6)


def test_blocks_are_gathered_as_far_ahead_as_asked_for(launched):
    _, asked_for = launched

    # by itself, torch is one block ahead in backward
    assert asked_for["0"] == {"forward": [1, 2, 3, 4, 5], "backward": [2, 3, 4, 5, 5]}
    assert asked_for["1"] == {"forward": [2, 3, 4, 5, 5], "backward": [2, 3, 4, 5, 5]}
    assert asked_for["2"] == {"forward": [3, 4, 5, 5, 5], "backward": [3, 4, 5, 5, 5]}


@pytest.fixture
def context():
    join_process_group(torch.device("cpu"))
    job = small_job()
    yield PassContext(build_mesh(job, torch.device("cpu")), job, torch.device("cpu"))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("layout", [["parallel.dp_replicate=2"], ["parallel.tp=2"]])
def test_nothing_to_gather_ahead_is_found_at_validation(layout):
    ahead = ["callbacks=[]", *layout, "parallel.passes.fsdp.prefetch=1"]

    with pytest.raises(ConfigError, match=r"fsdp\.prefetch: no rank shares its parameters"):
        load_job(JOB, ahead, catalog=discover(), world_size=2)
    for shared in ([], ["parallel.cp=2"]):
        load_job(JOB, [*ahead, *shared], catalog=discover(), world_size=4)


def fsdp_with(**keys) -> ComponentRef:
    return builder().resolve("parallel_pass", {"name": "fsdp", **keys})


def test_parameters_are_in_the_hosts_memory_and_buffers_on_the_device(context):
    """``meta`` stands for a device here: nothing is computed."""
    with torch.device("meta"):
        model = SmallModel()
        model.register_buffer("table", torch.zeros(3))
    offloading = builder()(fsdp_with(cpu_offload=True))
    model, _ = offloading.apply(model, context)

    allocate(model, torch.device("meta"), on_host=offloading.parameters_on_host)

    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model.table.device.type == "meta"


def test_the_engine_gives_memory_where_the_pass_says(context, tmp_path, monkeypatch):
    catalog, asked = discover(), []

    def allocate_and_note(part, device, *, on_host):
        asked.append(on_host)
        allocate(part, device, on_host=on_host)

    monkeypatch.setattr("forge_core.train.build.allocate", allocate_and_note)
    job = load_job(write_job(tmp_path), [], catalog=catalog, world_size=1)
    for offloads in (True, False):
        passes = [fsdp_with(cpu_offload=offloads)]
        build_model(attrs.evolve(context, job=job), 257, passes, ComponentBuilder(catalog))

    assert asked == [True, False]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [],
            'fsdp.cpu_offload: true cannot be combined with run.device = "cpu": it takes parameters off a CUDA device',
        ),
        (["run.device=mps"], 'cannot be combined with run.device = "mps"'),
        (
            ["run.device=cuda", "parallel.passes.activation_checkpointing.mode=auto"],
            "cannot be combined with mode = \"auto\" of 'activation_checkpointing'",
        ),
    ],
)
def test_what_does_not_go_with_offloading_is_refused_at_validation(tmp_path, overrides, sentence):
    config = write_job(tmp_path)

    with pytest.raises(ConfigProblems) as refused:
        load_job(config, [OFFLOAD, *overrides], catalog=discover(), world_size=1)

    assert sentence in str(refused.value)


def test_a_device_that_is_found_only_at_the_start_is_refused_then(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("auto takes CUDA here")
    config, catalog = write_job(tmp_path, device="auto"), discover()
    job = load_job(config, [OFFLOAD], catalog=catalog, world_size=1)

    with pytest.raises(ConfigError, match="cpu_offload"):
        run_job(job, catalog)


@pytest.mark.gpu
def test_on_cuda_training_is_the_same_in_less_memory(tmp_path):
    config, catalog = write_job(tmp_path, device="cuda"), discover()
    wide = ["model.dim=512", "parallel.passes.fsdp=true"]
    works = [
        ("plain", []),
        ("offloaded", [OFFLOAD]),
        ("taken-back", [OFFLOAD, "train.steps=3"]),
        ("taken-back", []),
    ]
    for name, settings in works:
        torch.cuda.reset_peak_memory_stats()
        job = load_job(config, [*wide, *settings, f"run.name={name}"], catalog=catalog, world_size=1)
        assert run_job(job, catalog) is ExitCode.COMPLETED

    plain = curve(config, "plain")
    # the first values show that the model begins the same; the two optimizers round differently afterwards
    assert curve(config, "offloaded")[:2] == pytest.approx(plain[:2], rel=1e-5)
    assert curve(config, "offloaded") == pytest.approx(plain, rel=1e-3)
    assert curve(config, "taken-back") == pytest.approx(plain, rel=1e-3)
    memory = {name: metrics(config, name)[-1]["memory_gib"] for name in ("plain", "offloaded")}
    assert memory["offloaded"] < 0.8 * memory["plain"]
