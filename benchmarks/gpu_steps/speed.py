"""Whole models: tokens a second, memory beside what a plan says, kernels by time."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import train_gpu
from torch.profiler import ProfilerActivity, profile

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.optimizer import NamedParameter
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_plan.gpus import gpu_named
from forge_plugins_plan.simulation import simulate
from gpu_steps.machine import seconds_of
from gpu_steps.small_run import VOCAB, train, write_job
from gpu_steps.step import FailedError, Figures, Setting, must

CUBLAS_GIB = 0.1
"""GiB of cuBLAS's workspaces on an H200: beside what a plan counts, and in what torch says was allocated."""
MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"


def small_model(setting: Setting) -> Figures:
    """124M (GPT-2's shape), bf16."""
    return _whole(setting, "gpt2_124m", "bf16", "train.batch_size=16", "train.seq_len=1024")


def one_billion(setting: Setting) -> Figures:
    """1B, bf16, nothing recomputed."""
    return _whole(setting, "llama_1b", "bf16", "train.batch_size=4", "train.grad_accumulation=2")


def one_billion_resharded(setting: Setting) -> Figures:
    """The same with blocks that free their bf16 copies: beside ``one_billion`` it shows what keeping them is worth."""
    own = ("train.batch_size=4", "train.grad_accumulation=2", "parallel.passes.fsdp.reshard_after_forward=always")
    return _whole(setting, "llama_1b", "bf16", *own)


def one_billion_pure(setting: Setting) -> Figures:
    """1B, ``bf16_pure``: beside ``one_billion`` it shows the price of fp32 states on one GPU."""
    return _whole(setting, "llama_1b", "bf16_pure", "train.batch_size=4", "train.grad_accumulation=2")


def eight_billion(setting: Setting) -> Figures:
    """8B, ``bf16_pure``, 2 × 4 sequences a step, nothing recomputed. For GPUs with more than 100 GiB."""
    return _whole(setting, "llama_7b", "bf16_pure", "train.batch_size=2", "train.grad_accumulation=4")


def eight_billion_in_segments(setting: Setting) -> Figures:
    """The same where memory is taken in segments that grow: beside ``eight_billion`` it shows what that is worth."""
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # of the run, which is a process of its own
    return eight_billion(setting)


def eight_billion_recomputed(setting: Setting) -> Figures:
    """The same, all blocks recomputed."""
    batch = ("train.batch_size=4", "train.grad_accumulation=2")
    return _whole(setting, "llama_7b", "bf16_pure", *batch, recompute="full")


def eight_billion_float8(setting: Setting) -> Figures:
    """The same as ``eight_billion`` in float8."""
    own = ("train.batch_size=2", "train.grad_accumulation=4", "parallel.passes.fp8=true")
    return _whole(setting, "llama_7b", "bf16_pure", *own)


def sparse(setting: Setting) -> Figures:
    """9.2B of which 2.9B work for a token, ``bf16_pure``."""
    return _whole(setting, "moe_small", "bf16_pure", "train.batch_size=2", "train.grad_accumulation=4")


def _whole(setting: Setting, model: str, precision: str, *overrides: str, recompute: str = "none") -> Figures:
    """As ``train_gpu.py`` measures it, with a plan's peak beside that of the run."""
    config = MODELS / ("debug_20m.toml" if setting.tiny else f"{model}.toml")
    own = list(overrides)
    if setting.tiny:
        own = ["train.batch_size=1", "train.grad_accumulation=1", "train.seq_len=32", "parallel.passes.compile=false"]
        own += ["model.n_layers=1"]
    steps = 2 if setting.tiny else 10
    options = argparse.Namespace(
        device=setting.device.type, warmup=1 if setting.tiny else 4, steps=steps, overrides=own
    )
    cells = train_gpu.measure_case(config, precision, recompute, options)
    if not cells[-1]:
        raise FailedError(cells[0], {})
    names = ("tokens_per_s", "mfu_embedding_counted", "mfu", "mfu_causal", "peak_gib", "step_s")
    return dict(zip(names, cells, strict=True))


def planned_memory(setting: Setting) -> Figures:
    """The peak that ``forge plan`` names, and cuBLAS's workspaces, against that of a run: within 5 %."""
    keys = ("train.precision=bf16_pure", "loss.name=chunked_cross_entropy", "train.steps=5")
    sizes = () if setting.tiny else ("model.dim=1024", "model.n_layers=12", "train.batch_size=16")
    figures: dict[str, float | int | str] = {}
    problems = {}
    for name, own in {"kept": (), "full": ("parallel.passes.activation_checkpointing.mode=full",)}.items():
        run = train(setting, name, *keys, *sizes, *own)
        catalog = discover()
        job = load_job(write_job(setting, name), [*keys, *sizes, *own], catalog=catalog, world_size=1)
        memory = simulate(job, catalog, VOCAB, 1, stage=0, gpu=gpu_named("h200")).memory
        if memory is None:
            raise FailedError(f"{name} cannot be planned", {})
        planned = memory.peak / 2**30 + CUBLAS_GIB
        figures |= {f"{name}_planned_gib": round(planned, 3), f"{name}_gib": round(run.memory_gib, 3)}
        if setting.measures:
            off = planned / run.memory_gib - 1
            figures[f"{name}_off"] = round(off, 3)
            problems[f"{name} is off by {off:+.1%}"] = abs(off) > 0.05
    return must(problems, figures)


def optimizers(setting: Setting) -> Figures:
    """Seconds of an optimizer step for the matrices of an 8B model in bf16; in fp32, of a quarter of them."""
    build = ComponentBuilder(discover())
    layers, dim, hidden, kv = (1, 64, 224, 16) if setting.tiny else (32, 4096, 14336, 1024)
    shapes = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (hidden, dim), (hidden, dim), (dim, hidden)] * layers
    figures: dict[str, float | int | str] = {}
    asked = {name: (name, torch.bfloat16, shapes) for name in ("adamw", "muon", "lion", "schedule_free_adamw")}
    asked["adamw_fp32_quarter"] = ("adamw", torch.float32, shapes[: len(shapes) // 4])
    for key, (name, dtype, own) in asked.items():
        optimizer = build(
            build.resolve("optimizer", {"name": name, "lr": 1e-3}), parameters=_named(own, dtype, setting)
        )
        figures[f"{key}_s"] = round(seconds_of(optimizer.step, setting, rounds=3), 4)
        del optimizer
        if setting.is_gpu:
            torch.cuda.empty_cache()
    return figures


def _named(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, setting: Setting) -> list[NamedParameter]:
    """Random matrices with random gradients."""
    named = []
    for number, shape in enumerate(shapes):
        weight, gradient = (torch.randn(shape, device=setting.device, dtype=dtype) for _ in range(2))
        parameter = torch.nn.Parameter(weight)
        parameter.grad = gradient
        named.append(NamedParameter(f"blocks.{number}.weight", parameter, "matrix"))
    return named


def kernels_by_time(setting: Setting) -> Figures:
    """The kernels that take most of a step of the 1B model, in percent of the time in all kernels."""
    table = tomllib.loads((MODELS / ("debug_20m.toml" if setting.tiny else "llama_1b.toml")).read_text())
    model = [f"model.{key}={json.dumps(value)}" for key, value in _flat(table["model"])]
    keys = [*model, "train.precision=bf16", "loss.name=chunked_cross_entropy"]
    if setting.tiny:
        keys += ["train.steps=3", "train.batch_size=1"]
    else:
        keys += ["train.steps=8", "train.seq_len=4096", "train.batch_size=4", "parallel.passes.compile=true"]
    kind = ProfilerActivity.CUDA if setting.is_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        train(setting, "profiled", *keys)
    events = profiled.key_averages()
    times = {one.key: one.self_device_time_total if setting.is_gpu else one.self_cpu_time_total for one in events}
    whole = sum(times.values())
    largest = sorted(times, key=lambda key: -times[key])[: 3 if setting.tiny else 14]
    return {key[:70]: round(100 * times[key] / whole, 1) for key in largest}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
