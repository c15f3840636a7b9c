"""What a decoder's configuration says of its sparse layers."""

from __future__ import annotations

from forge_core.errors import ConfigError
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_moe.config import MoEConfig


def moe_of(config: TransformerConfig) -> MoEConfig:
    """
    Raises:
        ConfigError: the model has no sparse layers.
    """
    layer = config.feed_forward.config
    if not isinstance(layer, MoEConfig):
        raise ConfigError(f"the feed_forward of this model is {config.feed_forward.name!r}, and not 'moe'")
    return layer


def mlp_of(config: TransformerConfig) -> MLPConfig:
    """
    Raises:
        ConfigError: the layers that are not sparse are no ``mlp``.
    """
    dense = moe_of(config).dense
    if not isinstance(dense.config, MLPConfig):
        raise ConfigError(f"the dense layers of this model are {dense.name!r}, and not 'mlp'")
    return dense.config


def sparse_layers(config: TransformerConfig) -> list[int]:
    """The blocks that have experts."""
    moe = moe_of(config)
    return [layer for layer in range(config.n_layers) if moe.is_sparse(layer)]


def expert_width(config: TransformerConfig) -> int:
    """Hidden features of one expert."""
    mlp_of(config)  # which is refused if it is another layer
    width = moe_of(config).expert_width(config.dim)
    assert width is not None, "that of an mlp is known"
    return width
