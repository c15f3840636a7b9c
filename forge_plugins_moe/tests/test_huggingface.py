"""Sparse decoders of transformers as oracles: the same logits with the same weights, both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from forge_core.errors import ConfigError
from forge_plugins_moe.huggingface import config_from_hf, hf_config
from forge_plugins_moe.huggingface_weights import from_hf_state, to_hf_state
from trained_alike import assert_trained_alike

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "num_experts_per_tok": 3,
}
QWEN = {**SHAPE, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16}
DEEPSEEK = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"} | {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
QWEN2 = {**SHAPE, "num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
GLM = SHAPE | {"moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2, "head_dim": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
SLIDING = {"architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": True, "sliding_window": 5}
MODELS = {
    "mixtral, windows": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, sliding_window=5)),
    "mixtral tied": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN, norm_topk_prob=True)),
    "qwen3, weights as they are, windows": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**QWEN, use_sliding_window=True, sliding_window=5)
    ),
    "qwen3, every second layer": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN, decoder_sparse_step=2)),
    "qwen3, a dense layer": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN, mlp_only_layers=[1])),
    "qwen3, biases": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN, attention_bias=True)),
    "qwen2, windows": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**QWEN2, decoder_sparse_step=2, use_sliding_window=True, sliding_window=5)
    ),
    "qwen2, no biases": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**QWEN2, qkv_bias=False, norm_topk_prob=True)),
    "glm": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**GLM, attention_bias=True, use_qk_norm=True)),
    "glm, other": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(**GLM, n_group=4, topk_group=2, routed_scaling_factor=1.5, partial_rotary_factor=1.0)
    ),
    "deepseek v2": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=2.5)
    ),
    "deepseek v2, other": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(**DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0}, rope_parameters=YARN)
    ),
    "deepseek": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)),
    "deepseek, other": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            rope_parameters=YARN,
        )
    ),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=8, pad_token_id=None)),
    "olmoe, normalized, biases": lambda: OlmoeForCausalLM(
        OlmoeConfig(**SHAPE, num_experts=8, pad_token_id=None, norm_topk_prob=True, attention_bias=True)
    ),
}


@pytest.fixture(params=MODELS)
def reference(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    with torch.no_grad():  # norms of ones would hide a weight that is not used
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
            if name.endswith("proj.bias"):
                parameter.normal_(0.0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model


@torch.no_grad()
def test_logits_equal_hugging_face_with_its_weights(reference, decoder, tokens):
    model = decoder(config_from_hf(reference.config.to_dict()))

    state = from_hf_state(reference.state_dict(), model.config)
    model.load_state_dict(state, strict=not model.config.tie_embeddings)

    torch.testing.assert_close(model(tokens), reference(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.fixture
def ours(reference, decoder):
    """Our model with the weights of theirs, and without a balance loss, which a script has to ask for there."""
    table = config_from_hf(reference.config.to_dict())
    table["feed_forward"]["router"]["balance"] = 0.0
    table["feed_forward"]["router"].pop("balance_scope", None)
    model = decoder(table)
    state = from_hf_state(reference.state_dict(), model.config)
    model.load_state_dict(state, strict=not model.config.tie_embeddings)
    return model


@torch.no_grad()
def test_generation_with_a_cache_and_padding_gives_their_tokens(reference, ours, tokens):
    prompt = tokens[:, :7]
    greedy = {"max_new_tokens": 24, "do_sample": False, "use_cache": False, "eos_token_id": None, "pad_token_id": 0}
    expected = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)

    cache = ours.make_cache(2, 40)
    padding = torch.zeros(2, 3, dtype=torch.int64)
    positions = torch.cat((padding - 1, torch.arange(7).expand(2, -1)), dim=1)
    found = prompt
    last = ours(torch.cat((padding, prompt), dim=1), positions=positions, cache=cache)[:, -1:].argmax(-1)
    for step in range(24):
        found = torch.cat((found, last), dim=1)
        last = ours(last, positions=torch.full((2, 1), 7 + step), cache=cache).argmax(-1)

    assert torch.equal(found, expected)
    assert torch.equal(ours(found[:, :-1])[:, 6:].argmax(-1), found[:, 7:])  # as without our cache


@torch.no_grad()
def test_logits_in_bf16_are_as_near_to_fp32_as_theirs(reference, ours, tokens):
    expected = reference(tokens).logits

    def error(logits):
        """Of the usual token: where two experts are nearly alike, rounding decides, for them and for us."""
        return ((logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).median()

    of_theirs = error(reference.bfloat16()(tokens).logits)
    assert error(ours.bfloat16()(tokens)) < max(2e-2, 1.5 * of_theirs)


@torch.no_grad()
def test_packed_documents_are_each_as_alone(ours, tokens):
    document = torch.tensor([[0] * 9 + [1] * 15]).expand(2, -1)
    positions = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)

    packed = ours(tokens, document=document, positions=positions)

    torch.testing.assert_close(packed[:, :9], ours(tokens[:, :9]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 9:], ours(tokens[:, 9:]), atol=1e-5, rtol=1e-5)


def test_twenty_steps_of_training_are_theirs(reference, ours):
    assert_trained_alike(reference, ours)


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
def test_logits_of_hugging_face_equal_ours_with_our_weights(reference, packed, decoder, tokens, tmp_path):
    model = decoder(config_from_hf(reference.config.to_dict()), seed=3)
    state = to_hf_state(model.state_dict(), model.config, packed=packed)

    table = hf_config(model.config, vocab_size=50)
    config = type(reference.config).from_dict(table)
    if packed:
        theirs = type(reference)(config)
        missing = theirs.load_state_dict(state, strict=False)
        assert missing.unexpected_keys == []
        assert missing.missing_keys == (["lm_head.weight"] if model.config.tie_embeddings else [])
    else:
        theirs = from_files(config, state, tmp_path)

    assert table["architectures"] == [type(reference).__name__]
    torch.testing.assert_close(theirs.eval()(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)


def from_files(config, state, folder):
    """A model that transformers has read from files."""
    from safetensors.torch import save_file

    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert not info["missing_keys"]
    return model


def test_files_that_transformers_writes_are_read(reference, decoder, tokens, tmp_path):
    from safetensors.torch import load_file

    reference.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert not any("gate_up_proj" in name for name in files)  # each expert by itself

    config = decoder(config_from_hf(reference.config.to_dict()), seed=None).config

    one, other = from_hf_state(files, config), from_hf_state(reference.state_dict(), config)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_weights_survive_the_way_there_and_back(reference, decoder):
    model = decoder(config_from_hf(reference.config.to_dict()))
    state = model.state_dict()
    if model.config.tie_embeddings:
        del state["head.weight"]

    for packed in (False, True):
        back = from_hf_state(to_hf_state(state, model.config, packed=packed), model.config)
        assert back.keys() == state.keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_scales_of_gradients_stay_here_and_begin_anew(decoder):
    """They are of the last step of a run."""
    table = config_from_hf(MODELS["qwen3, a dense layer"]().config.to_dict())
    table["feed_forward"]["scale_gradients"] = True
    model = decoder(table)
    scales = [model.blocks[layer].feed_forward.experts.gradient_scale for layer in ("0", "2")]
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for scale in scales:
        scale.uniform_(0.5, 2)

    theirs = to_hf_state(model.state_dict(), model.config)
    back = from_hf_state(theirs, model.config)

    assert not any("scale" in name for name in theirs)
    assert back.keys() == first.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in first.items())


def test_configuration_survives_the_way_there_and_back(reference, decoder):
    config = decoder(config_from_hf(reference.config.to_dict()), seed=None).config

    again = decoder(config_from_hf(hf_config(config, vocab_size=50)), seed=None).config

    assert again.feed_forward.config.router == config.feed_forward.config.router
    sparse = [[one.feed_forward.config.is_sparse(layer) for layer in range(3)] for one in (config, again)]
    assert sparse[0] == sparse[1]
    for one in (again, config):
        object.__setattr__(one, "feed_forward", None)
        object.__setattr__(one, "head_dim", one.head_size)
    assert again == config


def test_the_released_configurations_are_read(decoder):
    """Those of the first models of each, without what has no meaning here."""
    mixtral = {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    }
    qwen3 = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    olmoe = {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "vocab_size": 50304,
    }
    deepseek = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    deepseek_v2 = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1536,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    }
    router = config_from_hf(deepseek_v2)["feed_forward"]["router"]
    assert (router["balance"], router["balance_scope"]) == (0.001, "sequence")
    sizes = ((mixtral, 46.70), (qwen3, 30.53), (olmoe, 6.92), (deepseek, 671.03), (deepseek_v2, 235.74))
    for hf, billions in sizes:
        model = decoder(config_from_hf(hf), seed=None)
        n_parameters = sum(parameter.numel() for name, parameter in model.named_parameters())
        n_parameters += (hf["vocab_size"] - model.vocab_size) * hf["hidden_size"] * 2
        assert n_parameters / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "LlamaForCausalLM is not supported; DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeForCausalLM",
        ),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ({"hidden_act": "gelu"}, "MixtralForCausalLM with hidden_act = 'gelu'"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ({"attention_bias": True}, "MixtralForCausalLM with attention_bias = true is not supported; only false is"),
        ({"architectures": ["OlmoeForCausalLM"], "use_sliding_window": True}, "use_sliding_window = True"),
        (SLIDING | {"max_window_layers": 2}, "max_window_layers = 2 is not supported beside use_sliding_window"),
        (SLIDING | {"layer_types": ["full_attention"] * 3}, "layer_types of 'full_attention' is not supported"),
        (SLIDING | {"layer_types": ["chunked_attention"] * 3}, "layer_types of 'chunked_attention' is not supported"),
        (
            SLIDING | {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            "layer_types has sliding_attention, and use_sliding_window is false",
        ),
        (  # as Qwen2MoeConfig has it, whose model then sees nothing
            SLIDING | {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False, "sliding_window": 0},
            "layer_types has sliding_attention, and use_sliding_window is false",
        ),
        ({**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": False}, "rope_interleave = False"),
        ({**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True}, "norm_topk_prob = True"),
        ({**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"}, "greedy and group_lim"),
        ({**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "sigmoid"}, "scoring_func = 'sigm"),
        ({**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        (
            {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "rope_scaling": YARN | {"mscale": 1.0}},
            "equal mscale and mscale_all_dim",
        ),
    ],
)
def test_what_we_have_no_equal_of_is_refused(change, words):
    hf = {"architectures": ["MixtralForCausalLM"], **SHAPE, "num_local_experts": 8, "num_experts": 8}
    with pytest.raises(ConfigError, match=words):
        config_from_hf({**hf, "moe_intermediate_size": 24} | change)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("by_sequence", "scope"), [(True, "sequence"), (False, "global_batch")])
def test_the_balance_loss_of_deepseek_goes_both_ways(version, by_sequence, scope, decoder):
    hf = {**DEEPSEEK, "architectures": [f"DeepseekV{version}ForCausalLM"], "rms_norm_eps": 1e-6}
    config = decoder(config_from_hf({**hf, "aux_loss_alpha": 0.01, "seq_aux": by_sequence}), seed=None).config
    router = config.feed_forward.config.router.config

    table = hf_config(config, 50)

    assert (router.balance, router.balance_scope) == (0.01, scope)
    assert (table["aux_loss_alpha"], table["seq_aux"]) == (0.01, by_sequence)
    assert config_from_hf(hf)["feed_forward"]["router"]["balance"] == 0


def test_a_window_as_long_as_the_longest_sequence_is_no_window():
    hf = {"architectures": ["MixtralForCausalLM"], **SHAPE, "num_local_experts": 8}
    assert "window" not in config_from_hf(hf | {"sliding_window": 64})
    assert config_from_hf(hf | {"sliding_window": 63})["window"] == 63


def test_files_of_qwen2_without_layer_types_have_windows_where_transformers_has_them():
    keys = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
    hf = Qwen2MoeConfig(**QWEN2 | {"num_hidden_layers": 5}, **keys).to_dict()
    assert [kind[0] for kind in hf["layer_types"]] == ["s", "f", "s", "f", "f"]
    without = {key: value for key, value in hf.items() if key != "layer_types"}
    assert config_from_hf(without) == config_from_hf(hf)


LATENT: dict[str, Any] = {"n_kv_heads": None, "mixer": {"name": "latent", "kv_rank": 16}, "norm_eps": 1e-6}
GROUPED: dict[str, Any] = {
    "name": "softmax_topk",
    "order": "softmax_topk",
    "n_groups": 2,
    "groups_per_token": 1,
    "group_score": "max",
}
SIGMOID: dict[str, Any] = {"router": "sigmoid_topk", "shared_experts": 1}


@pytest.mark.parametrize(
    ("keys", "layer", "words"),
    [
        ({}, {"router": "noisy_topk"}, "router 'noisy_topk' has no Hugging Face form"),
        ({"qk_norm": True}, {"shared_experts": 1}, "no shared_experts"),
        ({}, {"shared_experts": 1}, "Qwen2MoeForCausalLM: there must be a shared_gate"),
        ({"attention_bias": "qkv"}, {}, "MixtralForCausalLM: attention_bias must be none"),
        ({"rotary_fraction": 0.5}, {}, "rotary_fraction must be 1"),
        ({}, {"first_dense": 1}, "all layers must be sparse"),
        ({}, {"activation": "relu"}, "activation must be silu"),
        ({}, {"gated": False}, "activation must be silu, with a gate"),
        ({}, {"capacity_factor": 1.0}, "no capacity_factor"),
        ({}, {"bias": True}, "MixtralForCausalLM: there must be no bias"),
        ({}, {"dense": {"name": "mlp", "hidden_dim": 48, "bias": True}}, "dense layers must have no bias"),
        ({}, {"router": {"name": "softmax_topk", "gate_bias": True}}, "there must be no gate_bias"),
        ({"layers": [{"at": 0, "window": 5}]}, {}, "MixtralForCausalLM: all layers must have the same window"),
        ({"qk_norm": True, "layers": [{"at": 0, "window": 5}]}, {}, "Qwen3MoeForCausalLM: all layers must have the"),
        ({"qk_norm": True, "qk_norm_over": "all", "window": 5}, {}, "OlmoeForCausalLM: there must be no window"),
        ({"layers": [{"at": 0, "rope_theta": 5.0}]}, {}, "layers = .* has no Hugging Face form"),
        (
            {
                "yarn": {"factor": 4.0, "original_max_seq_len": 16},
                "layers": [{"at": 0, "rope_stretched": False}],
                **LATENT,
            },
            SIGMOID,
            "layers = .* has no Hugging Face form",
        ),
        (
            {"window": 4, "layers": [{"at": 0, "window": 5}], "attention_bias": "qkv"},
            {"shared_experts": 1, "shared_gate": True},
            "layers have windows of 4 and 5 positions",
        ),
        ({"attention_sinks": True}, {}, "attention_sinks = True has no Hugging Face form"),
        ({}, {"router": {"name": "softmax_topk", "order": "softmax_topk"}}, "weights of a token must sum to 1"),
        ({"qk_norm": True}, {"router": {"name": "softmax_topk", "bias_rate": 0.1}}, "no bias_rate"),
        (
            {"qk_norm": True, "qk_norm_over": "all", "head_dim": 16},
            {},
            "OlmoeForCausalLM: all heads together must",
        ),
        ({"norm": "layernorm"}, {}, "rmsnorm"),
        ({}, {"router": "sigmoid_topk"}, "Glm4MoeForCausalLM: there must be shared_experts"),
        (
            {"yarn": {"factor": 4.0, "original_max_seq_len": 16}, "rotary_fraction": 0.5},
            SIGMOID,
            "yarn and partial_rotary_factor = 0.5 has another attention than ours",
        ),
        (LATENT, {}, "DeepseekV2ForCausalLM: the weights of a token must be those of the softmax"),
        (LATENT, {"router": GROUPED | {"group_score": "top2_sum"}, "shared_experts": 1}, "group_score must be max"),
        (LATENT, {"router": GROUPED | {"bias_rate": 0.1}, "shared_experts": 1}, "there must be no bias_rate"),
        (LATENT, {"router": GROUPED}, "there must be shared_experts"),
        (LATENT, SIGMOID | {"layers": [0]}, "dense layers must come first"),
        (LATENT, SIGMOID | {"shared_gate": True}, "no shared_gate"),
        (LATENT | {"norm_eps": 1e-5}, SIGMOID, "norm_eps must be 1e-06"),
        (
            LATENT | {"yarn": {"factor": 1.0, "original_max_seq_len": 16, "logit_scale": 2.0}},
            SIGMOID,
            "logit_scale must be 1 where yarn.factor is",
        ),
    ],
)
def test_models_without_a_hugging_face_form_are_refused(keys, layer, words, decoder):
    model = decoder(**keys, feed_forward={"name": "moe", "n_experts": 4, "hidden_dim": 24} | layer, seed=None)
    with pytest.raises(ConfigError, match=words):
        hf_config(model.config, vocab_size=50)


def test_what_files_of_deepseek_have_more_is_left_out_or_refused(decoder):
    """Its multi-token prediction is a layer after the last; its first files are in float8."""
    layer = {"name": "moe", "n_experts": 4, "hidden_dim": 24} | SIGMOID
    model = decoder(**LATENT, feed_forward=layer, multi_token={"depths": 1})
    state = to_hf_state(model.state_dict(), model.config)
    assert not any(name.startswith("model.layers.2.") for name in state)

    plain = decoder(**LATENT, feed_forward=layer, seed=None).config
    files = state | {"model.layers.2.eh_proj.weight": torch.zeros(1)}
    assert from_hf_state(files, plain).keys() == decoder(**LATENT, feed_forward=layer, seed=None).state_dict().keys()
    with pytest.raises(ConfigError, match="float8"):
        from_hf_state(files | {"model.layers.1.self_attn.o_proj.weight_scale_inv": torch.zeros(1)}, plain)


def test_factors_of_the_part_of_a_head_that_is_rotated_go_there_and_back(decoder):
    factors = {"short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0], "original_max_seq_len": 16}
    layer = {"name": "moe", "n_experts": 4, "hidden_dim": 24, **SIGMOID}
    config = decoder(long_rope=factors, rotary_fraction=0.5, feed_forward=layer, seed=None).config

    again = decoder(config_from_hf(hf_config(config, vocab_size=50)), seed=None).config

    assert again.rotary_fraction == 0.5
    assert again.long_rope == config.frequency_scaling


def test_missing_and_unexpected_weights_are_named(decoder):
    model = decoder(feed_forward={"name": "moe", "n_experts": 4, "hidden_dim": 24})
    state = to_hf_state(model.state_dict(), model.config)
    del state["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    state["model.layers.1.block_sparse_moe.experts.4.w3.weight"] = torch.zeros(1)

    words = r"missing: model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight; unexpected: .*experts\.4\.w3"
    with pytest.raises(ConfigError, match=words):
        from_hf_state(state, model.config)
