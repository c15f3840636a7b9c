from __future__ import annotations

from typing import ClassVar

from forge_plugins_dense.testing.activation import ActivationConformance
from forge_plugins_dense.testing.norm import NormConformance
from forge_plugins_dense.testing.predictor import PredictorConformance
from forge_testing.feed_forward import FeedForwardConformance
from forge_testing.model import ModelConformance
from forge_testing.package import PluginConformance

SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "feed_forward": {"name": "mlp", "hidden_dim": 48}}


class TestPlugin(PluginConformance):
    dist = "forge-plugins-dense"


class TestLlama(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"n_kv_heads": 2}


class TestQwen3(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"n_kv_heads": 1, "head_dim": 16, "qk_norm": True, "tie_embeddings": True}


LATENT = {"name": "latent", "kv_rank": 24, "plain_dim": 8, "rotary_dim": 4, "value_dim": 12}


class TestLatentAttention(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"mixer": LATENT, "yarn": {"factor": 4.0, "original_max_seq_len": 16}}


class TestLatentBesideWindows(ModelConformance):
    component = "forge-plugins-dense:transformer"
    layers = ({"at": 1, "mixer": "attention", "window": 4},)
    config = SHAPE | {"n_kv_heads": 2, "mixer": LATENT | {"q_rank": 16}, "layers": layers}


class TestWindowsAndSinks(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"n_kv_heads": 2, "window": 4, "attention_sinks": True, "layers": [{"at": 1, "window": 0}]}


class TestDropout(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}


class TestNormOverAllHeads(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"qk_norm": True, "qk_norm_over": "all"}


class TestLayerNorm(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"norm": "layernorm", "feed_forward": {"name": "mlp", "hidden_dim": 48, "activation": "gelu"}}


class TestSwiGLU(FeedForwardConformance):
    component = "forge-plugins-dense:mlp"


class TestTwoMatrices(FeedForwardConformance):
    component = "forge-plugins-dense:mlp"
    config: ClassVar = {"hidden_dim": 24, "activation": "relu"}


class TestSiLU(ActivationConformance):
    component = "forge-plugins-dense:silu"


class TestGELU(ActivationConformance):
    component = "forge-plugins-dense:gelu"


class TestTanhGELU(ActivationConformance):
    component = "forge-plugins-dense:gelu_tanh"


class TestReLU(ActivationConformance):
    component = "forge-plugins-dense:relu"


class TestSquaredReLU(ActivationConformance):
    component = "forge-plugins-dense:relu2"


class TestRMSNorm(NormConformance):
    component = "forge-plugins-dense:rmsnorm"


class TestLayerNormAlone(NormConformance):
    component = "forge-plugins-dense:layernorm"


class TestZeroCenteredRMSNorm(NormConformance):
    component = "forge-plugins-dense:zero_centered_rmsnorm"


class TestSequential(PredictorConformance):
    component = "forge-plugins-dense:sequential"
