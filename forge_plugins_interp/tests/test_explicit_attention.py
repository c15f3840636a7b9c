"""Scores and patterns, computed where they are looked at, give what the kernels of the model give."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import forge_plugins_interp as interp
from forge_core.distributed.mesh import join_process_group
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_dense import attention
from forge_plugins_dense.attention_sites import mixed_by_pattern, pattern
from forge_plugins_dense.mask import document_block_mask
from forge_plugins_interp.session import initial_session

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 64
vocab_size = 40
init_std = 0.2
[data]
name = "text_files"
path = "unused"
[train]
steps = 4
seq_len = 16
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[scheduler]
name = "constant"
"""
MODELS = {
    "grouped": ["model.n_kv_heads=2", "model.qk_norm=true"],
    "normed together": ["model.qk_norm=true", "model.qk_norm_over=all"],
    "scaled": ["model.attention_multiplier=0.3"],
    "capped": ["model.attention_softcap=2.0", "model.n_kv_heads=2"],
    "windows": ["model.window=3", "model.layers=[{at=1, window=5}]"],
    "sinks": ["model.attention_sinks=true", "model.attention_bias=all"],
    "latent": ['model.mixer={name="latent", kv_rank=24, plain_dim=6, rotary_dim=2, value_dim=6}'],
}
DOCUMENT = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
INPUTS = {
    "plain": {},
    "documents": {"document": DOCUMENT},
    "padding": {"positions": torch.stack((torch.arange(12), torch.arange(12).where(torch.arange(12) < 8, -1)))},
}
TOKENS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def session(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("explicit") / "job.toml"
    path.write_text(JOB)
    job = load_job(path, request.param, catalog=discover(), world_size=1)
    join_process_group(torch.device("cpu"))
    session = initial_session(job, discover(), 40, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in session.parameters.items():
            if "sinks" in name:  # which begin at zero
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    yield session
    dist.destroy_process_group()


@torch.no_grad()
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_explicit_attention_gives_what_the_kernel_gives(session, inputs):
    """With scores or patterns put in their own place, the output of each layer stays as it was."""
    computed = ("blocks.*.attn_scores", "blocks.*.attn_pattern")
    with session.observe(*computed, "blocks.*.attn_out") as kernel:
        session.model(TOKENS, **inputs)

    for name in computed:
        with session.intervene(interp.Patch(name, source=kernel)), session.observe("blocks.*.attn_out") as explicit:
            session.model(TOKENS, **inputs)
        for layer, value in explicit.items():
            assert torch.allclose(value, kernel[layer], atol=1e-5), (name, layer)
    with (
        session.intervene(interp.Scale("blocks.0.attn_pattern", factor=0.5)),
        session.observe("blocks.0.attn_out") as half,
    ):
        session.model(TOKENS, **inputs)
    assert not torch.allclose(half["blocks.0.attn_out"], kernel["blocks.0.attn_out"], atol=1e-3)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_explicit_attention_gives_what_flex_attention_gives(monkeypatch, window, has_sinks):
    """Over several blocks of a mask, of which some are seen whole and some are not there."""
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: attention.flex_attention)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 400, 16, generator=generator) for heads in (4, 2, 2))
    document = torch.stack((torch.arange(400) // 300, torch.arange(400) // 70))
    mask, sinks = document_block_mask(document, window), torch.randn(4, generator=generator) if has_sinks else None
    core = attention.AttentionCore("flex", 3.0)

    weights = pattern(core, q, k, v, mask, False, sinks)

    assert torch.allclose(mixed_by_pattern(core, weights, q, k, v), core(q, k, v, mask, False, sinks), atol=1e-5)
