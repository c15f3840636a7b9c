"""Asynchronous tensor parallelism: the compiler finds what to overlap, and the result is the same.

The fused operations have kernels for CUDA only, and torch's own plain form of them, which is what its test mode runs.
On the CPU they are run in that form: the same graphs, without the overlap.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import fork_server
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError, ExitCode
from forge_core.job import ConfigProblems, load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job
from forge_testing.component_case import builder
from forge_testing.small_model import SmallModel, small_job
from rank_ports import free_ports

TOML = """
[run]
name = "unnamed"
dir = "{folder}/runs"
device = "{device}"

[model]
name = "transformer"
dim = 32
n_layers = 1
n_heads = 4
max_seq_len = 64

[data]
name = "text_files"
path = "{folder}/text"
pattern = "**/*.txt"

[train]
steps = 2
seq_len = 32
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[metrics]
interval = 1

[checkpoint]
interval = 0
"""

TP2 = "parallel.tp=2"
ASYNC = "parallel.passes.tensor_parallel.async_tp=true"
COMPILE = "parallel.passes.compile=true"

WORKER = """
import json, sys
from pathlib import Path

import torch

from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job
from forge_core.errors import ExitCode
from forge_core.launch import hard_exit

catalog, called = discover(), []
config, settings, on_cpu = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "cpu"
if on_cpu:
    import torch.distributed._symmetric_memory as symmetric_memory

    tensor_parallel = catalog.lookup("parallel_pass", "forge-plugins-parallel:tensor_parallel").component
    object.__setattr__(tensor_parallel, "conflicts", ())
    torch.distributed.is_nccl_available = lambda: True  # which the compiler asks for, whatever the device

    @torch.library.impl(symmetric_memory.lib, "fused_all_gather_matmul", "CPU")
    def gather(shard, factors, dim, group, *, return_A=True):
        called.append(f"gather for {len(factors)}")
        return symmetric_memory._fused_all_gather_matmul_fallback(shard, factors, dim, group, return_A=return_A)

    @torch.library.impl(symmetric_memory.lib, "fused_matmul_reduce_scatter", "CPU")
    def scatter(left, right, how, dim, group):
        called.append("scatter")
        return symmetric_memory._fused_matmul_reduce_scatter_fallback(left, right, how, dim, group)

job = load_job(config, settings, catalog=catalog, world_size=2)
assert run_job(job, catalog) is ExitCode.COMPLETED
print(json.dumps(called))
hard_exit()
"""


def write_job(folder: Path, device: str = "cpu") -> Path:
    config = folder / "tiny.toml"
    config.write_text(TOML.format(folder=folder, device=device))
    (folder / "worker.py").write_text(WORKER)
    (folder / "text").mkdir()
    for i in range(12):
        lines = "\n".join(f"line {j} of file {i}: {(i * 7919 + j * 104729) % 9973}" for j in range(60))
        (folder / "text" / f"{i}.txt").write_text(lines)
    return config


def train_on_two_ranks(config: Path, device: str, *settings: str) -> str:
    """What rank 0 printed last."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports())}
    ranks = [
        fork_server.Popen(
            [sys.executable, config.parent / "worker.py", config, json.dumps(settings), device],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
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
    return said[0][0].splitlines()[-1]


def curve(config: Path, name: str) -> list[float]:
    lines = (config.parent / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line[key] for line in map(json.loads, lines) for key in ("loss", "grad_norm")]


@pytest.mark.nightly  # the compiler takes most of a minute, and only a GPU has what it is for
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rows", "gathers_of_forward"), [(4, {"gather for 3": 1, "gather for 2": 1}), (1, {})])
def test_gathers_and_scatters_of_blocks_become_one_with_their_products(tmp_path, rows, gathers_of_forward):
    config, catalog, rows = write_job(tmp_path), discover(), f"train.batch_size={rows}"
    alone = load_job(config, ["run.name=one", rows], catalog=catalog, world_size=1)
    assert run_job(alone, catalog) is ExitCode.COMPLETED

    called = train_on_two_ranks(config, "cpu", TP2, ASYNC, COMPILE, "run.name=async", rows)

    # Of the layer, in each of two steps. Forward: one gather for query, key and value, one for gate and up, and
    # a scatter of what attention and what the feed-forward layer give. Backward: gathers where forward scattered.
    # What is scattered in backward is a sum of several products, which the compiler does not cut up.
    # Where ranks share a sequence, the compiler does not see that a gather of forward is what products read.
    expected = {**gathers_of_forward, "gather for 1": 2, "scatter": 2}
    assert Counter(json.loads(called)) == {name: 2 * count for name, count in expected.items()}
    assert curve(config, "async") == pytest.approx(curve(config, "one"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that read each other's memory")
def test_on_cuda_training_is_the_same(tmp_path):
    config = write_job(tmp_path, "cuda")
    wide = ["model.dim=1024", "train.precision=bf16", TP2, COMPILE]

    for name, settings in {"plain": [], "async": [ASYNC]}.items():
        train_on_two_ranks(config, "cuda", *wide, *settings, f"run.name={name}")

    assert curve(config, "async") == pytest.approx(curve(config, "plain"), rel=2e-2)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([COMPILE], 'async_tp: true cannot be combined with run.device = "cpu"'),
        (["run.device=cuda"], "async_tp: true needs the pass 'compile'"),
        (
            ["run.device=cuda", COMPILE, "parallel.passes.tensor_parallel.sequence_parallel=false"],
            "async_tp: overlaps gathering tokens, and sequence_parallel = false",
        ),
        (
            ["run.device=cuda", COMPILE, "train.precision=bf16", "parallel.passes.fp8.min_dim=16"],
            "async_tp: true cannot be combined with 'fp8'",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused_at_validation(tmp_path, overrides, sentence):
    config = write_job(tmp_path)

    with pytest.raises(ConfigProblems) as refused:
        load_job(config, [TP2, ASYNC, *overrides], catalog=discover(), world_size=2)

    assert sentence in str(refused.value)


def test_a_model_that_does_not_share_out_positions_is_refused():
    cpu, job = torch.device("cpu"), small_job()
    join_process_group(cpu)
    with torch.device("meta"):
        model = SmallModel()
    use = builder().resolve("parallel_pass", {"name": "tensor_parallel", "async_tp": True})

    try:
        with pytest.raises(ConfigError, match="SmallModel has no role 'sequence'"):
            builder()(use).apply(model, PassContext(build_mesh(job, cpu), job, cpu))
    finally:
        torch.distributed.destroy_process_group()
