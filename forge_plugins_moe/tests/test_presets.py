"""The sparse shapes of ``configs``, against published counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_core.config.builder import ComponentBuilder
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_moe.feed_forward import MoE

CONFIGS = Path(__file__).parents[2] / "configs"
JOB = """
[data]
name = "text_files"
path = "."
[train]
steps = 1
seq_len = 512
batch_size = 1
[optimizer]
name = "adamw"
lr = 1e-3
"""


def built(config: Path, *overrides: str) -> torch.nn.Module:
    """On meta."""
    catalog = discover()
    job = load_job(config, overrides, catalog=catalog, world_size=1)
    vocab_size = getattr(job.model.config, "vocab_size", None) or 257
    with torch.device("meta"):
        return ComponentBuilder(catalog)(job.model, vocab_size=vocab_size)


def total(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def active(model: torch.nn.Module) -> int:
    """Without the experts that a token does not visit."""
    sparse = [module for module in model.modules() if isinstance(module, MoE)]
    return total(model) - sum(total(layer) - layer.active_parameters() for layer in sparse)


@pytest.fixture
def preset(tmp_path):
    def build(name: str) -> torch.nn.Module:
        config = tmp_path / "job.toml"
        config.write_text(f'extends = "{CONFIGS}/model/{name}.toml"\n{JOB}')
        return built(config)

    return build


@pytest.mark.parametrize(
    ("name", "parameters", "for_a_token", "seq_len", "flops"),
    [
        ("debug_moe", 23_073_024, 20_713_728, 512, 81_395_712),
        ("moe_4b", 4_099_377_152, 1_607_960_576, 4096, None),
        ("moe_small", 9_233_205_248, 2_891_417_600, 4096, 18_185_453_568),
    ],
)
def test_presets_have_the_published_sizes(preset, name, parameters, for_a_token, seq_len, flops):
    model = preset(name)

    assert total(model) == parameters
    assert active(model) == for_a_token
    if flops is not None:
        routers = sum(total(layer.router) for layer in model.modules() if isinstance(layer, MoE))
        assert model.flops_per_token(seq_len) - 6 * routers == flops, "published without the routers' products"


def test_moonlight_is_as_large_as_its_paper_says(preset):
    """15.29 and 2.24 billion without embeddings (arXiv 2502.16982)."""
    model = preset("moonlight_16b")
    embeddings = model.embed.weight.numel() + model.head.weight.numel()

    assert f"{(total(model) - embeddings) / 1e9:.2f}" == "15.29"
    assert f"{(active(model) - embeddings) / 1e9:.2f}" == "2.24"


def test_the_demo_has_the_active_parameters_of_the_dense_one():
    sparse, dense = built(CONFIGS / "moe_demo.toml"), built(CONFIGS / "demo.toml")

    routers = sum(total(layer.router) for layer in sparse.modules() if isinstance(layer, MoE))
    assert active(sparse) - routers == total(dense)
    assert total(built(CONFIGS / "moe_demo.toml", "model.num_experts=0")) == total(dense)
