from __future__ import annotations

import attrs
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from forge_core.errors import ConfigError
from forge_plugins_dense.config import Llama3Scaling, TransformerConfig, YarnScaling
from forge_plugins_dense.huggingface import config_from_hf, from_hf_state, hf_config, to_hf_state
from forge_plugins_dense.rope_config import LongRope

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.3, 2.0, 2.1],
    "long_factor": [1.5, 4.0, 9.0, 9.5],
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama 3.1 rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "llama yarn, other attention": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters=YARN | {"beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.3})
    ),
    "llama yarn, not truncated": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters=YARN | {"beta_fast": 3.0, "truncate": False})
    ),
    "llama longrope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LONG_ROPE)),
    "llama longrope, other attention": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters=LONG_ROPE | {"original_max_position_embeddings": 32, "factor": 9.0})
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "qwen3 tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
}


@pytest.fixture(params=MODELS)
def reference(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    with torch.no_grad():  # norms of ones would hide a weight that is not used
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    return model


@torch.no_grad()
def test_logits_equal_hugging_face_with_its_weights(reference, tiny_model, mlp, tokens):
    config = structure(config_from_hf(reference.config.to_dict()), mlp)
    model = tiny_model(**attrs.asdict(config, recurse=False))

    model.load_state_dict(from_hf_state(reference.state_dict(), config), strict=not config.tie_embeddings)

    torch.testing.assert_close(model(tokens), reference(tokens).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_of_hugging_face_equal_ours_with_our_weights(reference, tiny_model, mlp, tokens):
    config = structure(config_from_hf(reference.config.to_dict()), mlp)
    model = tiny_model(**attrs.asdict(config, recurse=False), seed=3)

    table = hf_config(config, vocab_size=50)
    theirs = type(reference)(type(reference.config).from_dict(table)).eval()
    missing = theirs.load_state_dict(to_hf_state(dict(model.named_parameters()), config), strict=False)

    assert table["architectures"] == [type(reference).__name__]
    assert missing.unexpected_keys == []
    assert missing.missing_keys == (["lm_head.weight"] if config.tie_embeddings else [])
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)


def test_configuration_survives_the_way_there_and_back(tiny_config, mlp):
    for keys in (
        {},
        {"rope_scaling": Llama3Scaling(factor=4.0)},
        {"yarn": YarnScaling(factor=4.0, original_max_seq_len=16, logit_scale=2.25)},
        {"attention_dropout": 0.1},
        {"qk_norm": True, "head_dim": 16, "tie_embeddings": True, "norm_eps": 1e-6},
    ):
        config = tiny_config(**({"head_dim": 8, "vocab_size": 50} | keys))
        assert structure(config_from_hf(hf_config(config, vocab_size=50)), mlp) == config


def test_configurations_of_transformers_4_are_read(mlp):
    hf = {"architectures": ["LlamaForCausalLM"], **SHAPE, "rope_theta": 500.0, "rope_scaling": None}
    assert structure(config_from_hf(hf), mlp).rope_theta == 500.0

    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    config = structure(config_from_hf(hf | {"rope_scaling": scaling}), mlp)
    assert (config.rope_theta, config.rope_scaling) == (500.0, Llama3Scaling(factor=4.0, original_max_seq_len=16))


def test_files_of_qwen3_without_layer_types_have_windows_where_transformers_has_them():
    hf = Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1).to_dict()
    assert hf["layer_types"] == ["full_attention", "sliding_attention"]
    without = {key: value for key, value in hf.items() if key != "layer_types"}
    assert config_from_hf(without) == config_from_hf(hf)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
    ],
)
def test_what_the_transformer_has_not_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        config_from_hf({"architectures": ["LlamaForCausalLM"], **SHAPE} | change)


def test_models_without_a_hugging_face_form_are_refused(tiny_config, mlp, latent):
    with pytest.raises(ConfigError, match="rmsnorm"):
        hf_config(tiny_config(norm="layernorm"), vocab_size=50)
    with pytest.raises(ConfigError, match="gated mlp"):
        hf_config(tiny_config(feed_forward=mlp(activation="gelu")), vocab_size=50)
    with pytest.raises(ConfigError, match='activation = "clamped_swiglu" has no Hugging Face form'):
        hf_config(tiny_config(feed_forward=mlp(activation="clamped_swiglu")), vocab_size=50)
    with pytest.raises(ConfigError, match="window = 8 has no Hugging Face form like Llama's"):
        hf_config(tiny_config(window=8), vocab_size=50)
    with pytest.raises(ConfigError, match="qk_norm_over"):
        hf_config(tiny_config(qk_norm=True, qk_norm_over="all"), vocab_size=50)
    with pytest.raises(ConfigError, match='mixer = "latent" has no'):
        hf_config(tiny_config(n_kv_heads=None, mixer=latent()), vocab_size=50)


@pytest.mark.parametrize("key", ["output_multiplier", "residual_multiplier", "attention_multiplier"])
def test_a_model_with_multipliers_is_refused(tiny_config, key):
    with pytest.raises(ConfigError, match=rf"{key} = 0\.5 has no Hugging Face form"):
        hf_config(tiny_config(**{key: 0.5}), vocab_size=50)


def test_missing_and_unexpected_weights_are_named(tiny_model):
    model = tiny_model()
    state = to_hf_state(dict(model.named_parameters()), model.config)
    del state["model.norm.weight"]
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(1)

    with pytest.raises(ConfigError, match=r"missing: model\.norm\.weight; unexpected: .*q_proj\.bias"):
        from_hf_state(state, model.config)


def structure(table: dict, mlp) -> TransformerConfig:
    """What the configuration system makes of the table."""
    keys = {key: value for key, value in table.items() if key != "name"}
    keys["feed_forward"] = mlp(**{key: value for key, value in keys["feed_forward"].items() if key != "name"})
    if "rope_scaling" in keys:
        keys["rope_scaling"] = Llama3Scaling(**keys["rope_scaling"])
    if "yarn" in keys:
        keys["yarn"] = YarnScaling(**keys["yarn"])
    if "long_rope" in keys:
        factors = {name: tuple(keys["long_rope"][name]) for name in ("short_factor", "long_factor")}
        keys["long_rope"] = LongRope(**keys["long_rope"] | factors)
    return TransformerConfig(**keys)
