from __future__ import annotations

from typing import ClassVar

from forge_core.testing.feed_forward import FeedForwardConformance
from forge_core.testing.model import ModelConformance
from forge_core.testing.plugin import PluginConformance

SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "feed_forward": {"name": "mlp", "hidden_dim": 48}}


class TestPlugin(PluginConformance):
    dist = "forge-plugins-dense"


class TestLlama(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"n_kv_heads": 2}


class TestQwen3(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"n_kv_heads": 1, "head_dim": 16, "qk_norm": True, "tie_embeddings": True}


class TestLayerNorm(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"norm": "layernorm", "feed_forward": {"name": "mlp", "hidden_dim": 48, "activation": "gelu"}}


class TestSwiGLU(FeedForwardConformance):
    component = "forge-plugins-dense:mlp"


class TestTwoMatrices(FeedForwardConformance):
    component = "forge-plugins-dense:mlp"
    config: ClassVar = {"hidden_dim": 24, "activation": "relu"}
