from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forge_core.contracts.component_ref import ComponentRef
from forge_core.train.initialisation import initialise
from forge_plugins_dense.config import MLPConfig, TransformerConfig
from forge_plugins_dense.latent_config import LatentAttentionConfig
from forge_plugins_dense.transformer import Transformer


def build(use: ComponentRef, /, **given: Any) -> Any:
    """As the engine does: ``build`` and what is optional for factories that ask for it."""
    module, name = use.factory.split(":")
    factory = getattr(importlib.import_module(module), name)
    given["build"] = build
    optional = {"build", "activation_limit", "activation_slope"} - inspect.signature(factory).parameters.keys()
    return factory(use.config, **{key: value for key, value in given.items() if key not in optional})


def mlp(**keys: Any) -> ComponentRef:
    return ComponentRef(
        kind="feed_forward",
        name="mlp",
        provider="forge-plugins-dense",
        factory="forge_plugins_dense.feed_forward:MLP",
        config=MLPConfig(**keys),
    )


def latent(**keys: Any) -> ComponentRef:
    return ComponentRef(
        kind="sequence_mixer",
        name="latent",
        provider="forge-plugins-dense",
        factory="forge_plugins_dense.mixer:latent",
        config=LatentAttentionConfig(**keys),
    )


def tiny_config(*, feed_forward: ComponentRef | None = None, **keys: Any) -> TransformerConfig:
    """Two layers, four query heads, two key-value heads."""
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 64}
    return TransformerConfig(**(shape | keys), feed_forward=feed_forward or mlp(hidden_dim=48))


def tiny_model(*, vocab_size: int = 50, seed: int = 0, device: str = "cpu", **keys: Any) -> Transformer:
    """Built on meta as the engine does; weights are larger than usual, so that mistakes show."""
    with torch.device("meta"):
        model = Transformer(tiny_config(**({"init_std": 0.2} | keys)), vocab_size=vocab_size, build=build)
    model.to_empty(device=device)
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight
    initialise(model, seed)
    return model


@pytest.fixture(name="build")
def build_fixture() -> Callable[..., Any]:
    return build


@pytest.fixture(name="mlp")
def mlp_fixture() -> Callable[..., ComponentRef]:
    return mlp


@pytest.fixture(name="latent")
def latent_fixture() -> Callable[..., ComponentRef]:
    return latent


@pytest.fixture(name="tiny_config")
def tiny_config_fixture() -> Callable[..., TransformerConfig]:
    return tiny_config


@pytest.fixture(name="tiny_model")
def tiny_model_fixture() -> Callable[..., Transformer]:
    return tiny_model


@pytest.fixture
def tokens() -> torch.Tensor:
    """``(2, 24)`` ids below 50."""
    return torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))
