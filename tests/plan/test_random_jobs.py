"""Validation and the build agree: on layouts, shapes and passes that are drawn at random.

A job that validates is built on meta tensors and takes a step as one rank of a simulated world. A job that does not
validate is built all the same, with the rules across sections taken out, and must fail there or in the step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import prod

import pytest

from forge_core import job as job_module
from forge_core.config.sections import AXES
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_plan.simulation import simulate

BASE = """
[model]
name = "transformer"
max_seq_len = 64
[data]
name = "text_files"
path = "unused"
[train]
steps = 4
[optimizer]
name = "adamw"
lr = 1e-3
[scheduler]
name = "constant"
"""
VOCABULARY = 257
"""The data's, where the model has none of its own."""
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FLOAT8 = ("parallel.passes.fp8.emulate=true", "parallel.passes.fp8.min_dim=16")
ROUTERS = ("softmax_topk", "sigmoid_topk", "expert_choice", "hash")


BY_MEANING = ("router.scope", "layers sparse")
"""In sentences of rules without which a job would build, and be something else than what was asked for."""


def draw(chance: random.Random) -> tuple[list[str], int]:
    """Settings and a world size, most of them possible and some not."""
    degrees = {axis: chance.choice([1, 1, 2, 2, 3, 4]) if chance.random() < 0.4 else 1 for axis in AXES}
    ep = chance.choice([2, 4]) if chance.random() < 0.25 else 1
    is_sparse = ep > 1 or chance.random() < 0.25
    return [
        *_shape(chance),
        *_feed_forward(chance, is_sparse=is_sparse),
        *(f"parallel.{axis}={degree}" for axis, degree in degrees.items() if degree > 1),
        *([f"parallel.ep={ep}"] if ep > 1 else []),
        *_passes(chance, degrees),
        *([] if is_sparse or chance.random() > 0.2 else FLOAT8),
    ], prod(degrees.values())


def _shape(chance: random.Random) -> Iterator[str]:
    heads = chance.choice([1, 2, 4, 4, 6, 8, 12])
    yield f"model.n_heads={heads}"
    yield f"model.n_layers={chance.choice([1, 2, 3, 4, 6])}"
    yield f"model.dim={heads * chance.choice([4, 8])}"
    if chance.random() < 0.3:
        yield f"model.n_kv_heads={chance.choice([one for one in (1, 2, heads) if heads % one == 0])}"
    if chance.random() < 0.1:
        yield "model.tie_embeddings=true"
    if chance.random() < 0.1:
        yield f"model.multi_token={{depths={chance.choice([1, 2])}}}"
    if chance.random() < 0.2:
        yield from ("model.qk_norm=true", f"model.qk_norm_over={chance.choice(['head', 'head', 'all'])}")
    if chance.random() < 0.4:
        yield f"model.vocab_size={chance.choice([3, 258, 300, 301])}"
    yield f"train.seq_len={chance.choice([8, 20, 24, 32, 48])}"
    yield f"train.batch_size={chance.choice([1, 2])}"
    yield f"train.grad_accumulation={chance.choice([1, 2, 4, 6, 8])}"
    yield f"train.precision={chance.choice(['fp32', 'bf16'])}"
    if chance.random() < 0.3:
        yield "loss.name=chunked_cross_entropy"


def _feed_forward(chance: random.Random, *, is_sparse: bool) -> Iterator[str]:
    if not is_sparse:
        if chance.random() < 0.5:
            yield f"model.feed_forward.hidden_dim={chance.choice([32, 48, 50, 96])}"
        return
    router = chance.choice(ROUTERS)
    yield "model.feed_forward.name=moe"
    yield f"model.feed_forward.n_experts={chance.choice([2, 4, 6, 8])}"
    yield f"model.feed_forward.hidden_dim={chance.choice([32, 64, 96])}"
    yield f"model.feed_forward.router.name={router}"
    if router.endswith("topk"):
        yield f"model.feed_forward.router.top_k={chance.choice([1, 2])}"
    if chance.random() < 0.3:
        yield "model.feed_forward.shared_experts=1"
    if chance.random() < 0.3:
        yield "model.feed_forward.first_dense=1"


def _passes(chance: random.Random, degrees: dict[str, int]) -> Iterator[str]:
    passes = "parallel.passes."
    if chance.random() < 0.3:
        yield f"{passes}fsdp.reshard_after_forward={chance.choice(['auto', 'always', 'never'])}"
    if chance.random() < 0.3:
        yield f"{passes}activation_checkpointing.mode={chance.choice(['full', 'selective'])}"
    if degrees["pp"] > 1 and chance.random() < 0.8:
        yield f"{passes}pipeline.schedule={chance.choice(SCHEDULES)}"
        if chance.random() < 0.3:
            yield f"{passes}pipeline.stages_per_rank={chance.choice([1, 2, 3])}"
    if degrees["tp"] > 1 and chance.random() < 0.4:
        yield f"{passes}tensor_parallel.sequence_parallel={chance.choice(['true', 'false'])}"
    if degrees["cp"] > 1 and chance.random() < 0.5:
        yield f"{passes}context_parallel.method={chance.choice(['ring', 'gather'])}"


@pytest.fixture(scope="module")
def catalog():
    return discover()


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(0, 15, marks=pytest.mark.slow),
        pytest.param(15, 485, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]),
    ],
)
def test_what_validates_builds_and_steps_and_nothing_else_does(catalog, tmp_path, monkeypatch, first, count):
    file = tmp_path / "job.toml"
    file.write_text(BASE)
    wrong = []
    for seed in range(first, first + count):
        chance = random.Random(seed)
        settings, world_size = draw(chance)
        refused = ""
        try:
            job = load_job(file, settings, catalog=catalog, world_size=world_size)
        except ConfigError as error:
            refused = str(error)
            job = unchecked(file, settings, catalog, world_size, monkeypatch)
        failed = "it cannot be made into a job" if job is None else failure(job, catalog, world_size, chance)
        if bool(refused) != bool(failed) and not any(key in refused for key in BY_MEANING):
            wrong += [f"{seed}: {' '.join(settings)}, on {world_size} ranks"]
            wrong += [f"    validation says: {refused or 'valid'}", f"    the build says: {failed or 'it works'}"]

    assert not wrong, "\n".join(wrong)


def unchecked(file, settings, catalog, world_size, monkeypatch):
    """The job without the rules across sections; ``None`` where a section by itself is wrong."""
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "_component_problems", lambda *_: [])
        patch.setattr(job_module, "conflict_problems", lambda *_: [])
        try:
            return load_job(file, settings, catalog=catalog, world_size=world_size)
        except ConfigError:
            return None


def failure(job, catalog, world_size, chance):
    """Why a rank of the job cannot be built or cannot take a step; empty if it can."""
    for stage in {0, job.parallel.pp - 1, chance.randrange(job.parallel.pp)}:
        try:
            reason = simulate(job, catalog, job.model.config.vocab_size or VOCABULARY, world_size, stage).reason
        except Exception as error:  # noqa: BLE001  # whatever it is, the job does not work
            reason = f"{type(error).__name__}: {error}"
        if reason:
            return reason
    return ""
