"""gpt-oss against transformers: what it computes, generates and learns, and its files."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_moe.gpt_oss_layout import GptOssLayout
from forge_plugins_moe.mxfp4 import unpack
from forge_plugins_weights.loading import load_model
from trained_alike import assert_trained_alike

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "initializer_range": 0.2,
    "swiglu_limit": 0.5,  # which small weights reach
    "swiglu_alpha": 1.3,
    "router_aux_loss_coef": 0.0,  # a training script has to ask for it there
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}


def theirs(**keys):
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SHAPE | keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # zeros and ones would hide a weight that is not used
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model


@pytest.fixture
def pair(decoder):
    """Their model, and ours with its weights."""
    model = theirs()
    layout, state = GptOssLayout(None), model.state_dict()
    ours = decoder(layout.model_table(model.config.to_dict()))
    recipes = layout.to_forge(ours.config, state)
    ours.load_state_dict({name: one.make(*(state[read] for read in one.reads)) for name, one in recipes.items()})
    return model, ours


@torch.no_grad()
def test_logits_are_equal(pair, tokens):
    theirs, ours = pair
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("change", [{"swiglu_limit": 7.0}, {"swiglu_alpha": 1.0}, {"sliding_window": 64}])
def test_the_small_configuration_reaches_every_option(change, tokens):
    assert not torch.allclose(theirs()(tokens).logits, theirs(**change)(tokens).logits, atol=1e-3)


@torch.no_grad()
def test_logits_are_equal_in_bf16(pair, tokens):
    theirs, ours = pair
    expected = theirs(tokens).logits
    error = (ours.bfloat16()(tokens).float() - expected).norm() / expected.norm()
    of_theirs = (theirs.bfloat16()(tokens).logits.float() - expected).norm() / expected.norm()
    assert error < max(2e-2, 1.5 * of_theirs)


@torch.no_grad()
def test_generation_with_a_cache_and_padding_gives_their_tokens(pair, tokens):
    theirs, ours = pair
    prompt = tokens[:, :7]
    greedy = {"max_new_tokens": 24, "do_sample": False, "use_cache": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(prompt, **greedy)

    cache = ours.make_cache(2, 40)
    padding = torch.zeros(2, 3, dtype=torch.int64)
    positions = torch.cat((padding - 1, torch.arange(7).expand(2, -1)), dim=1)
    found = prompt
    last = ours(torch.cat((padding, prompt), dim=1), positions=positions, cache=cache)[:, -1:].argmax(-1)
    for step in range(24):
        found = torch.cat((found, last), dim=1)
        last = ours(last, positions=torch.full((2, 1), 7 + step), cache=cache).argmax(-1)

    assert torch.equal(found, expected)
    assert torch.equal(ours(found[:, :-1])[:, 6:].argmax(-1), found[:, 7:])


@torch.no_grad()
def test_packed_documents_are_each_as_alone(pair, tokens):
    _, ours = pair
    document = torch.tensor([[0] * 9 + [1] * 15]).expand(2, -1)
    positions = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)

    packed = ours(tokens, document=document, positions=positions)

    torch.testing.assert_close(packed[:, :9], ours(tokens[:, :9]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 9:], ours(tokens[:, 9:]), atol=1e-5, rtol=1e-5)


def test_twenty_steps_of_training_are_theirs(pair):
    assert_trained_alike(*pair)


def test_the_configuration_and_the_weights_go_back_as_they_came(pair):
    theirs, ours = pair
    layout = GptOssLayout(None)
    table = layout.config_json(ours.config, 50)
    again = type(theirs.config).from_dict(table)
    assert layout.model_table(again.to_dict()) == layout.model_table(theirs.config.to_dict())

    state, mine = theirs.state_dict(), ours.state_dict()
    recipes = layout.to_huggingface(ours.config)
    assert recipes.keys() == state.keys()
    for name, recipe in recipes.items():
        assert torch.equal(recipe.make(*(mine[one] for one in recipe.reads)), state[name]), name


def packed(shape):
    """Blocks and scales of random numbers, all codes and exponents of a usual size among them."""
    rng = torch.Generator().manual_seed(len(shape) + shape[1])
    blocks = torch.randint(256, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8, generator=rng)
    scales = torch.randint(118, 125, blocks.shape[:-1], dtype=torch.uint8, generator=rng)
    return blocks, scales


def test_unpacked_numbers_are_those_of_transformers_to_the_bit():
    blocks, scales = packed((3, 10, 64))
    scales.view(-1)[:4] = torch.tensor([0, 1, 253, 255], dtype=torch.uint8)  # as small and large as they get

    found = unpack(blocks, scales)

    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))
    assert unpack(blocks.to("meta"), scales.to("meta")).shape == found.shape


@torch.no_grad()
def test_a_folder_with_experts_in_mxfp4_is_converted_and_computes_what_transformers_computes(tmp_path, tokens):
    model = theirs()
    model.save_pretrained(tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    for layer in range(3):
        for name, shape in (("gate_up_proj", (4, 128, 32)), ("down_proj", (4, 32, 64))):
            own = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = packed(shape)
            model.get_parameter(own).copy_(convert_moe_packed_tensors(blocks, scales))
            del state[own]
            state |= {f"{own}_blocks": blocks, f"{own}_scales": scales}
    save_file(state, tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "experts_per_token": 2, "initial_context_length": 16}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    ours = load_model(open_checkpoint(tmp_path / "ours" / "checkpoint"), discover, torch.device("cpu"), None)
    torch.testing.assert_close(ours.model.eval()(tokens), model(tokens).logits, atol=1e-5, rtol=1e-5)

    source, back = str(tmp_path / "ours" / "checkpoint"), tmp_path / "back"
    assert main(["convert", source, "--to", "huggingface", "--out", str(back), "--dtype", "bf16"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter.bfloat16()), name


def test_the_released_configuration_is_read_with_its_number_of_parameters(decoder):
    released = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    model = decoder(GptOssLayout(None).model_table(released), seed=None)

    count = sum(one.numel() for one in model.parameters()) + 2 * (released["vocab_size"] - model.vocab_size) * 2880
    assert count / 1e9 == pytest.approx(20.91, abs=0.01)
    assert model.config.windows == (0, 128)
    assert [model.config.layer(number).window for number in (0, 1)] == [128, 0]
    without = {key: value for key, value in released.items() if "rope" not in key and key != "layer_types"}
    assert GptOssLayout(None).model_table(without) == GptOssLayout(None).model_table(released)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types of 'chunked_attention'"),
    ],
)
def test_what_we_have_no_equal_of_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        GptOssLayout(None).model_table(transformers.GptOssConfig(**SHAPE).to_dict() | change)


@pytest.mark.parametrize(
    ("keys", "of_layer", "words"),
    [
        ({"attention_sinks": False}, {}, "has another attention_sinks"),
        ({"qk_norm": True}, {}, "has another qk_norm"),
        ({}, {"bias": False}, "experts must have a bias"),
        ({}, {"activation": "silu"}, "activation must be clamped_swiglu"),
        ({}, {"first_dense": 1}, "all layers must be sparse"),
        ({}, {"router": {"name": "softmax_topk"}}, "the router must have a gate_bias"),
        ({}, {"router": "sigmoid_topk"}, "sparse layers with the router softmax_topk"),
    ],
)
def test_a_model_that_computes_something_else_is_told_the_key(keys, of_layer, words, decoder):
    layout = GptOssLayout(None)
    table = layout.model_table(transformers.GptOssConfig(**SHAPE).to_dict())
    clamp = ("activation_limit", "activation_slope") if "activation" in of_layer else ()
    table["feed_forward"] = {key: one for key, one in table["feed_forward"].items() if key not in clamp} | of_layer

    with pytest.raises(ConfigError, match=words):
        layout.config_json(decoder(table | keys, seed=None).config, 50)


def test_weights_that_are_missing_are_named(pair):
    theirs, ours = pair
    names = set(theirs.state_dict()) - {"model.layers.1.self_attn.sinks"} | {"model.layers.0.mlp.experts.extra"}

    with pytest.raises(ConfigError, match=r"missing: model\.layers\.1\.self_attn\.sinks; unexpected: .*extra"):
        GptOssLayout(None).to_forge(ours.config, names)
