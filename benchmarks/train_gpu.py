"""Tokens a second, model FLOPs utilisation and peak memory of whole training steps on one GPU, run by ``forge run``.

By default a 1B and an 8B model (Llama's shapes), 32,768 random tokens a step, compiled block by block, AdamW, chunked
loss; with no block recomputed, as few as the memory asks for, and all of them. The 8B model is trained in pure bf16, as
its states in fp32 take 120 GiB. Each job has a process of its own, whose ``metrics.jsonl`` is read. It is killed after
the last measured step, since a run ends with a checkpoint, which nobody needs here.

Usage: ``python benchmarks/train_gpu.py [OVERRIDES]``. Without a GPU, to see that it works: ``python
benchmarks/train_gpu.py --config configs/model/debug_20m.toml --device cpu --steps 3 train.seq_len=128``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import attrs
import numpy as np
import torch

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.train.metrics import peak_flops
from forge_plugins_plan.report import flops_by_convention

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "configs" / "model"

JOB = """
extends = "{model}"
[run]
name = "measured"
[data]
name = "token_files"
path = "tokens.npy"
[train]
steps = {steps}
seq_len = 4096
batch_size = 4
grad_accumulation = 2
precision = "{precision}"
[optimizer]
name = "adamw"
lr = 3e-4
weight_decay = 0.1
betas = [0.9, 0.95]
[loss]
name = "chunked_cross_entropy"
[checkpoint]
interval = 0
[metrics]
interval = 1
[parallel.passes]
compile = true
[parallel.passes.activation_checkpointing]
mode = "{recompute}"
"""

RECOMPUTE = ("none", "auto", "full")
CONVENTIONS = {"with_embedding": "MFU, embedding counted", "standard": "MFU", "causal": "MFU, attention halved"}
"""Of ``flops_by_convention``, and their columns."""
FURTHER = 1000
"""Steps beyond the measured ones: the run still trains, and does not save, when the last of those has been logged."""
COLUMNS = ("model", "precision", "recomputed", "tokens/s", *CONVENTIONS.values(), "peak GiB", "step s (all)")


@attrs.frozen
class Measured:
    """Of the steps after the warm-up."""

    tokens_per_step: int
    seconds: Sequence[float]
    memory_gib: float | None
    """The most that was allocated; ``None`` without a GPU."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / float(np.median(self.seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, action="append", help="A [model], as in configs/model; may be repeated.")
    parser.add_argument("--precision", help="Of all models: bf16 or bf16_pure.")
    parser.add_argument("--recompute", action="append", choices=RECOMPUTE, help="May be repeated; by default all.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--warmup", type=int, default=5, help="Steps that are not measured.")
    parser.add_argument("--steps", type=int, default=20, help="Steps that are.")
    parser.add_argument("overrides", nargs="*", help="Of the jobs: train.batch_size=2, parallel.passes.compile=false.")
    options = parser.parse_args()
    if options.warmup < 1 or options.steps < 1:
        parser.error("--warmup and --steps must be at least 1: the first step compiles")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "train_gpu.py measures a CUDA GPU, and torch sees none here; run it on a machine with one, or try it out "
            "with --device cpu and a small --config, such as configs/model/debug_20m.toml"
        )
    models = options.config or [MODELS / "llama_1b.toml", MODELS / "llama_7b.toml"]
    steps = f"median of {options.steps} steps after {options.warmup}"
    print(f"{name_of(options.device)}, torch {torch.__version__}; {steps}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for model in models:
        precision = options.precision or ("bf16_pure" if model.resolve() == MODELS / "llama_7b.toml" else "bf16")
        for recompute in options.recompute or RECOMPUTE:
            cells = measure_case(model, precision, recompute, options)
            print(f"| {' | '.join([model.stem, precision, recompute, *cells])} |", flush=True)


def measure_case(model: Path, precision: str, recompute: str, options: argparse.Namespace) -> list[str]:
    """The measured cells of a row, or why there are none."""
    overrides = [f"run.device={options.device}", *options.overrides]
    if options.device == "cpu" and recompute == "auto":
        overrides.append(f"parallel.passes.activation_checkpointing.memory_gib={host_gib()}")
    total = options.warmup + options.steps
    with TemporaryDirectory() as folder:
        config = Path(folder) / "job.toml"
        steps = total + FURTHER
        config.write_text(JOB.format(model=model.resolve(), steps=steps, precision=precision, recompute=recompute))
        overrides += [f"data.path={folder}/tokens.npy", f"run.dir={folder}"]
        catalog = discover()
        try:
            job = load_job(config, overrides, catalog=catalog, world_size=1)
            vocab_size = vocabulary(job)
            tokens = tokens_per_step(job)
            rng = np.random.default_rng(0)
            np.save(Path(folder) / "tokens.npy", rng.integers(0, vocab_size, (total + 2) * tokens + 1, dtype=np.uint32))
            overrides.append(f"data.vocab_size={vocab_size}")
            measured = run(config, overrides, Path(folder) / "measured" / "metrics.jsonl", tokens, options)
        except (ConfigError, RuntimeError) as error:
            return [reason(str(error)), *[""] * (len(COLUMNS) - 4)]
    flops = flops_by_convention(job, vocab_size, ComponentBuilder(catalog))
    peak = peak_flops(torch.device(options.device))
    speed = measured.tokens_per_second
    return [
        f"{speed:,.0f}",
        *("–" if peak is None else f"{speed * flops[convention] / peak:.1%}" for convention in CONVENTIONS),
        "–" if measured.memory_gib is None else f"{measured.memory_gib:.1f}",
        f"{np.median(measured.seconds):.3f} ({min(measured.seconds):.3f} to {max(measured.seconds):.3f})",
    ]


def run(config: Path, overrides: list[str], metrics: Path, tokens: int, options: argparse.Namespace) -> Measured:
    """One ``forge run``, until it has logged the last measured step.

    Raises:
        RuntimeError: it ended before that; with what it said.
    """
    total = options.warmup + options.steps
    steps = logged_by(["run", str(config), *overrides], metrics, total)[options.warmup :]
    memory = [step["memory_gib"] for step in steps if "memory_gib" in step]
    return Measured(tokens, [step["step_seconds"] for step in steps], max(memory, default=None))


def logged_by(command: Sequence[str], metrics: Path, steps: int) -> list[dict[str, float]]:
    """The first ``steps`` lines of ``metrics``, which ``forge COMMAND`` writes. It is killed after them.

    Raises:
        RuntimeError: it ended before that; with what it said.
    """
    with TemporaryFile("w+") as said:
        forge = [sys.executable, "-m", "forge_core", *command]
        process = subprocess.Popen(forge, stdout=said, stderr=subprocess.STDOUT)
        try:
            while len(logged(metrics)) < steps:
                if process.poll() is not None:
                    said.seek(0)
                    raise RuntimeError(said.read())
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
    return logged(metrics)[:steps]


def reason(said: str) -> str:
    """The line that says it, for a cell of a table."""
    lines = said.strip().splitlines() or ["no message"]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1].removeprefix("error: ").replace("|", "\\|")


def logged(metrics: Path) -> list[dict[str, float]]:
    """The whole lines so far."""
    if not metrics.exists():
        return []
    text = metrics.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def vocabulary(job: Job) -> int:
    size = getattr(job.model.config, "vocab_size", None)
    if size is None:
        raise ConfigError("the model's file must say model.vocab_size")
    return int(size)


def tokens_per_step(job: Job) -> int:
    return job.train.batch_size * (job.train.grad_accumulation or 1) * job.train.seq_len


def host_gib() -> float:
    """Of memory that is not in use."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo["MemAvailable"].split()[0]) / 2**20


def name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


if __name__ == "__main__":
    main()
