"""Components train on a GPU as on the CPU, and make the host wait for it in no step that logs nothing: by the stand-in.

What it cannot show: the kernels that ``compile`` makes, races between streams, and speed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

import fork_server

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@attrs.frozen
class Job:
    name: str
    settings: tuple[str, ...] = ()
    sparse: bool = attrs.field(default=False, kw_only=True)
    like: str = attrs.field(default="", kw_only=True)
    """The job whose losses it has on the CPU, where it cannot run itself; empty for itself."""
    waits: bool = attrs.field(default=False, kw_only=True)
    """By its nature."""


def optimizer(table: str) -> str:
    return "optimizer={" + table + ", lr = 3e-4}"


COMPILED = "parallel.passes.compile=true"
DOCUMENTS = ("data.document_mask=true", "data.end_of_document=0")
CHECKPOINTING = "parallel.passes.activation_checkpointing"
EXPERTS = "model.feed_forward"
MUON = 'optimizer={name = "grouped", groups = [{roles = ["matrix"], optimizer = {name = "muon", lr = 1e-3}}, '
MUON += '{roles = ["embedding", "head", "norm", "bias"], optimizer = {name = "adamw", lr = 1e-3}}]}'
VISION = (
    (
        'data={name="image_text", path="{folder}/shapes/train.json", format="llava", token_grid=[4, 4], max_images=1, '
        'processor={name="square", size=32}, tokenizer={name="tokenizer_file", path="{folder}/shapes/tokenizer.json"}}'
    ),
    "train.seq_len=24",
)


def vision(fusion: str, more: str = "") -> tuple[str, ...]:
    model = 'name="vision_language", dim=32, n_layers=2, n_heads=4, max_seq_len=64, encoder={name="conv_vit"}, '
    return (f'model={{{model} connector={{name="mlp"}}, fusion={{{fusion}}}{more}}}', *VISION)


BY_MODALITY = vision('name="mixture_of_transformers"')
EXPERTS_BY_MODALITY = (
    'name="moe", n_experts=4, hidden_dim=32, router={name="expert_choice", experts_per_token=1, '
    'score_function="sigmoid", predictor=true}'
)
PAIRS = 'data={name="preference_pairs", path="{folder}/pairs.jsonl", reference="{folder}/reference.npz"}'
MIXTURE = (
    (
        'data={name="mixture", sources=[{name="a", weight=0.5, source={name="synthetic", vocab_size=64}}, '
        '{name="b", weight=0.5, source={name="synthetic", vocab_size=64, chain=1}}]}'
    ),
    'phases=[{at=1, train=["blocks.*"]}, {at=3, data={weights={a=0.9, b=0.1}}, lr_scale={"embed.*"=0.5}}]',
)


def autoencoder(table: str, data: str = 'name="activation_store", path="{folder}/activations"') -> tuple[str, ...]:
    model = f"model={{{table}, width=64, latents=128, dead_after=200}}"
    return (model, f'data={{{data}, site="blocks.1.resid_post"}}', "loss.name=own", "eval.interval=0")


BY_DAY = (
    Job("plain"),
    Job("bf16", ("train.precision=bf16",)),
    Job("fp16", ("train.precision=fp16",)),
    Job("sharded", ("parallel.passes.fsdp=true", "train.grad_accumulation=2")),
    Job("documents", DOCUMENTS),
    Job("compiled", (COMPILED,), like="plain"),
    Job("offloaded-activations", (f"{CHECKPOINTING}.mode=offload",), like="plain"),
    Job("muon", (MUON,)),
    Job("split", ("train.precision=bf16_pure", "optimizer.rounding=split")),
    Job("chunks", ("loss.name=chunked_cross_entropy",)),
    Job("norms", ('callbacks=[{name = "layer_norms"}, {name = "activation_norms"}, {name = "ema"}]',)),
    Job("memory", ('callbacks=[{name = "gpu_memory"}, {name = "gpu_metrics"}, {name = "health"}]',), like="plain"),
    Job("experts", sparse=True),
    Job("images", vision('name="joint_decoder"')),
    Job("mixture", MIXTURE),
    Job("pairs", (PAIRS, "loss.name=dpo", 'callbacks=[{name="reference_check"}]')),
    Job("autoencoder", autoencoder('name="topk_sae", k=4')),
    Job("balanced", (f'{EXPERTS}.router={{name = "sigmoid_topk", top_k = 2}}',), sparse=True),
)
BY_NIGHT = (
    *(Job(name, (optimizer(f'name = "{name}"'),)) for name in ("adafactor", "lion", "schedule_free_adamw", "sgd")),
    Job("adamw_8bit", (optimizer('name = "adamw_8bit"'),)),
    Job("stochastic", ("train.precision=bf16_pure", "optimizer.rounding=stochastic")),
    *(Job(name, (f"loss.name={name}",)) for name in ("label_smoothing", "z_loss")),
    *(Job(f"recomputed-{mode}", (f"{CHECKPOINTING}.mode={mode}",)) for mode in ("full", "selective")),
    Job("adapters", ("parallel.passes.lora.rank=4",)),
    Job("dropout", ("model.residual_dropout=0.1",)),
    Job("offloaded-weights", ("parallel.passes.fsdp.cpu_offload=true",), like="plain", waits=True),
    Job(
        "fp16-offloaded-weights",
        ("train.precision=fp16", "parallel.passes.fsdp.cpu_offload=true"),
        like="fp16",
        waits=True,
    ),
    *(
        Job(name, (f'{EXPERTS}.router={{name = "{name}"}}',), sparse=True)
        for name in ("expert_choice", "hash", "noisy_topk", "sinkhorn", "uniform")
    ),
    Job("shared", (f"{EXPERTS}.shared_experts=1",), sparse=True),
    Job("capacity", (f"{EXPERTS}.capacity_factor=1.25",), sparse=True),
    Job("images-across", vision('name="cross_attention", layers=[0]')),
    Job("images-weights", BY_MODALITY),
    Job("images-weights-bf16", (*BY_MODALITY, "train.precision=bf16", "optimizer.lr=1e-4")),
    Job(
        "images-experts",
        vision(f'name="moma", image={{{EXPERTS_BY_MODALITY}}}', f", feed_forward={{{EXPERTS_BY_MODALITY}}}"),
    ),
    Job("batch_topk_sae", autoencoder('name="batch_topk_sae", k=4')),
    Job("matryoshka_sae", autoencoder('name="matryoshka_sae", k=4, prefixes=[16]')),
    Job("jumprelu_sae", autoencoder('name="jumprelu_sae", l0_coefficient=0.01')),
    Job(
        "activations_of",
        autoencoder('name="topk_sae", k=4', 'name="activations_of", run="{folder}/cpu/plain"'),
        waits=True,
    ),
    Job("tuned_lens", ('checkpoint.load.path="{folder}/cpu/plain"', "parallel.passes.tuned_lens={}", "loss.name=own")),
    Job("completions", ('data={name="prompt_completion", path="{folder}/completions.jsonl", tokenizer="bytes"}',)),
    Job("observed", ('callbacks=[{name="coordinates"}, {name="garbage_collection"}]',), like="plain"),
    Job("experts-bf16", ("train.precision=bf16",), sparse=True),
    Job("windows", ("model.window=16",)),
    Job("documents-compiled", (*DOCUMENTS, COMPILED), like="documents"),
    Job("experts-compiled", (COMPILED,), sparse=True, like="experts"),
    Job("recomputed-budget", (COMPILED, f"{CHECKPOINTING}.mode=budget", f"{CHECKPOINTING}.budget=0.5"), like="plain"),
    Job("recomputed-auto", ("model.window=16", f"{CHECKPOINTING}.mode=auto"), like="windows"),
)
JOBS = {job.name: job for job in (*BY_DAY, *BY_NIGHT)}
every_job = pytest.mark.parametrize(
    "job", [*(job.name for job in BY_DAY), *(pytest.param(job.name, marks=pytest.mark.nightly) for job in BY_NIGHT)]
)


@pytest.fixture(scope="module")
def answers(request, stand_in, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What the selected tests ask, by job."""
    asked = {item.callspec.params["job"] for item in request.session.items if item.path == request.path}
    asked |= {"plain", *(JOBS[name].like for name in asked)}
    chosen = [job for job in JOBS.values() if job.name in asked]
    folder = tmp_path_factory.mktemp("trainings")
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps([{**attrs.asdict(job), "like": job.like or job.name} for job in chosen]))
    benchmarks = HERE.parents[1] / "benchmarks"
    environment = {**stand_in, "PYTHONPATH": f"{stand_in['PYTHONPATH']}:{benchmarks}"}
    ended = fork_server.run(
        [sys.executable, str(HERE / "trainings.py"), str(jobs), str(folder)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert ended.returncode == 0, f"after {len(lines)} of {len(chosen)}: {ended.stderr[-4000:]}"
    return {answer["name"]: answer for answer in lines}


@every_job
def test_losses_are_those_on_the_cpu(answers, job):
    assert answers[job]["gpu"] == pytest.approx(answers[job]["cpu"], rel=1e-4)


@every_job
def test_a_step_that_logs_nothing_never_makes_the_host_wait(answers, job):
    assert bool(answers[job]["waits"]) == JOBS[job].waits, answers[job]["waits"]
