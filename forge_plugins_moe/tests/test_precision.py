"""What stays fp32 in a run whose parameters are bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_core.checkpoint.store import Checkpoint, open_checkpoint
from forge_core.cli import main
from forge_core.registry.discovery import discover
from forge_plugins_moe.load_history import read_loads
from forge_plugins_weights.loading import load_model

BATCH, SEQ_LEN, TOP_K = 32, 64, 2
TOML = f"""
[run]
name = "pure"
dir = "{{folder}}/runs"

[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = {SEQ_LEN}
num_experts = 4

[model.moe]
hidden_dim = 16

[model.moe.router]
name = "sigmoid_topk"
top_k = {TOP_K}
bias_rate = 0.001

[data]
name = "text_files"
path = "{{folder}}/text"
pattern = "*.txt"

[train]
steps = 3
seq_len = {SEQ_LEN}
batch_size = {BATCH}
precision = "bf16_pure"

[optimizer]
name = "adamw"
lr = 1e-3

[metrics]
interval = 1

[[callbacks]]
name = "experts"
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Of a run that has ended."""
    folder: Path = tmp_path_factory.mktemp("precision")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n".join(f"line {i}: {i * 7919 % 997}" for i in range(4000)))
    (folder / "job.toml").write_text(TOML.format(folder=folder))
    assert main(["run", str(folder / "job.toml")]) == 0
    return folder / "runs" / "pure"


def checkpoint_of(run_dir: Path) -> Checkpoint:
    return open_checkpoint(max((run_dir / "checkpoints").glob("step_*")))


def test_every_assignment_is_counted(run_dir):
    """In bf16, counts beyond 256 are rounded."""
    for one in read_loads(run_dir):
        for name, load in one.load.items():
            assert sum(load) == BATCH * SEQ_LEN * TOP_K, f"step {one.step}, {name}"


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_loaded_model_has_the_bias_that_was_trained(run_dir, dtype):
    """In bf16, a move of 0.001 is lost from 0.25 on (Megatron-LM keeps it apart)."""
    model = load_model(checkpoint_of(run_dir), lambda _: discover(), torch.device("cpu"), dtype).model

    router = model.blocks["0"].feed_forward.router
    assert router.gate.weight.dtype == (dtype or torch.bfloat16)
    assert router.bias.dtype == torch.float32
    moves = router.bias / 0.001
    torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-4)
    assert moves.any(), "the bias was trained"
