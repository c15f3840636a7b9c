"""Short trainings by ``forge run``'s own entry, in this process, of which steps read the logged values."""

from __future__ import annotations

import contextlib
import gc
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch

from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job
from gpu_steps.step import Setting

VOCAB = 512
DENSE = """
[model]
name = "transformer"
dim = {dim}
n_layers = {layers}
n_heads = {heads}
n_kv_heads = {kv_heads}
max_seq_len = {seq_len}
vocab_size = {vocab}
"""
SPARSE = """
[model.feed_forward]
name = "moe"
n_experts = 8
[model.feed_forward.router]
name = "softmax_topk"
top_k = 2
"""
JOB = """
[run]
name = "{name}"
dir = "{folder}"
device = "{device}"
[data]
name = "token_files"
path = "{folder}/tokens.npy"
vocab_size = {vocab}
[train]
steps = {steps}
seq_len = {seq_len}
batch_size = 4
precision = "fp32"
[optimizer]
name = "adamw"
lr = 3e-4
[checkpoint]
interval = 0
[metrics]
interval = 1
"""


@attrs.frozen
class SmallRun:
    """A training that is over."""

    folder: Path
    logged: Sequence[Mapping[str, float]]

    @property
    def losses(self) -> Sequence[float]:
        return [step["loss"] for step in self.logged]

    @property
    def memory_gib(self) -> float:
        """The most that was allocated; 0 without a GPU."""
        return max((step.get("memory_gib", 0.0) for step in self.logged), default=0.0)

    def distance(self, other: SmallRun) -> float:
        """The largest difference of losses at one step, relative."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(one - two) / abs(two) for one, two in pairs)


def train(setting: Setting, name: str, *overrides: str, sparse: bool = False, device: str | None = None) -> SmallRun:
    """Train on tokens with a pattern, in documents of changing lengths, and log every step."""
    config = write_job(setting, name, sparse=sparse, device=device)
    catalog = discover()
    job = load_job(config, list(overrides), catalog=catalog, world_size=1)
    gc.collect()  # the run before this is a cycle of objects
    if setting.is_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    with contextlib.redirect_stdout(io.StringIO()):
        run_job(job, catalog)
    return read_run(setting.folder / name)


def write_job(setting: Setting, name: str, *, sparse: bool = False, device: str | None = None) -> Path:
    """The file of a job that ``train`` runs."""
    seq_len = 64 if setting.tiny else 512
    tokens = setting.folder / "tokens.npy"
    if not tokens.exists():
        np.save(tokens, documents(60 * 4 * seq_len * 4))
    sizes = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    if not setting.tiny:
        sizes = {"dim": 512, "layers": 4, "heads": 8, "kv_heads": 2}
    text = (JOB + DENSE + (SPARSE if sparse else "")).format(
        name=name,
        folder=setting.folder,
        device=device or setting.device.type,
        seq_len=seq_len,
        vocab=VOCAB,
        steps=5 if setting.tiny else 20,
        **sizes,
    )
    config = setting.folder / f"{name}.toml"
    config.write_text(text)
    return config


def documents(count: int) -> np.ndarray:
    """Tokens ``(count,)``: documents of 1 to 400 tokens, each an arithmetic series with some noise."""
    rng = np.random.default_rng(0)
    parts = []
    while sum(map(len, parts)) < count:
        length, stride = rng.integers(1, 400), rng.integers(1, 8)
        tokens = (rng.integers(VOCAB) + stride * np.arange(length)) % (VOCAB - 1) + 1
        noise = rng.random(length) < 0.1
        tokens[noise] = rng.integers(1, VOCAB, noise.sum())
        parts += [tokens, np.zeros(1, dtype=tokens.dtype)]
    return np.concatenate(parts)[:count].astype(np.uint16)


def read_run(folder: Path) -> SmallRun:
    """Read what has been logged there."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return SmallRun(folder, [one for one in map(json.loads, lines) if "loss" in one])
