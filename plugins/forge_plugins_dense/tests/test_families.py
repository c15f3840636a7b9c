"""Families of open decoders against transformers: what they compute, generate and learn."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch
import transformers

from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_dense import gemma_layouts, gpt_layouts, layer_norm_layouts, output_norm_layouts, weight_layouts
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_dense.layer_config import LayerConfig
from forge_plugins_dense.rope_config import Llama3Scaling, LongRope, YarnScaling
from forge_plugins_hf.layouts import layout_of_model
from trained_alike import assert_trained_alike

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OLD = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.3, 2.0],
    "long_factor": [1.5, 4.0, 9.0],
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 16}
FAMILIES = {
    "llama": (
        weight_layouts.LlamaLayout,
        transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR),
    ),
    "qwen3": (
        weight_layouts.LlamaLayout,
        transformers.Qwen3Config(
            **SHAPE,
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "mistral": (weight_layouts.MistralLayout, transformers.MistralConfig(**SHAPE, sliding_window=5, head_dim=16)),
    "qwen2": (
        weight_layouts.Qwen2Layout,
        transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "olmo2": (output_norm_layouts.Olmo2Layout, transformers.Olmo2Config(**SHAPE, attention_bias=True)),
    "olmo3": (
        output_norm_layouts.Olmo3Layout,
        transformers.Olmo3Config(
            **SHAPE,
            sliding_window=5,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
    ),
    "exaone4": (
        output_norm_layouts.Exaone4Layout,
        transformers.Exaone4Config(
            **SHAPE, head_dim=16, sliding_window=5, sliding_window_pattern=3, rope_parameters=YARN
        ),
    ),
    "exaone4 without windows": (
        output_norm_layouts.Exaone4Layout,
        transformers.Exaone4Config(**SHAPE, sliding_window=None, layer_types=["full_attention"] * 3),
    ),
    "ministral": (
        weight_layouts.MinistralLayout,
        transformers.MinistralConfig(
            **SHAPE,
            head_dim=16,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
    ),
    "arcee": (weight_layouts.ArceeLayout, transformers.ArceeConfig(**SHAPE, mlp_bias=True, attention_bias=True)),
    "seed_oss": (
        weight_layouts.SeedOssLayout,
        transformers.SeedOssConfig(**SHAPE, head_dim=16, mlp_bias=True, attention_dropout=0.0, residual_dropout=0.0),
    ),
    "smollm3": (
        weight_layouts.SmolLM3Layout,
        transformers.SmolLM3Config(
            **SHAPE,
            no_rope_layers=[0, 1, 0],  # yarn does not sharpen attention without rotary positions
            use_sliding_window=True,
            sliding_window=5,
            mlp_bias=True,
            rope_parameters=YARN,
        ),
    ),
    "granite": (
        weight_layouts.GraniteLayout,
        transformers.GraniteConfig(
            **SHAPE,
            embedding_multiplier=3.0,
            logits_scaling=4.0,
            residual_multiplier=0.5,
            attention_multiplier=0.2,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "phi3": (
        weight_layouts.Phi3Layout,
        transformers.Phi3Config(**SHAPE, sliding_window=5, partial_rotary_factor=0.5),
    ),
    "phi3 longrope, within the original context": (
        weight_layouts.Phi3Layout,
        transformers.Phi3Config(
            **SHAPE | {"max_position_embeddings": 128}, original_max_position_embeddings=64, rope_parameters=LONG_ROPE
        ),
    ),
    "phi3 longrope, beyond it": (
        weight_layouts.Phi3Layout,
        transformers.Phi3Config(
            **SHAPE, original_max_position_embeddings=6, rope_parameters=LONG_ROPE, tie_word_embeddings=True
        ),
    ),
    "gemma1": (gemma_layouts.Gemma1Layout, transformers.GemmaConfig(**SHAPE, head_dim=16, attention_bias=True)),
    "gemma2": (
        gemma_layouts.Gemma2Layout,
        transformers.Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    ),
    "gemma3": (
        gemma_layouts.Gemma3Layout,
        transformers.Gemma3TextConfig(
            **SHAPE,
            **GEMMA,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
    ),
    "starcoder2": (
        layer_norm_layouts.Starcoder2Layout,
        transformers.Starcoder2Config(**SHAPE, sliding_window=5),
    ),
    "stablelm": (layer_norm_layouts.StableLmLayout, transformers.StableLmConfig(**SHAPE, use_qkv_bias=True)),
    "gpt2": (
        gpt_layouts.GPT2Layout,
        transformers.GPT2Config(
            vocab_size=50,
            n_positions=64,
            n_embd=32,
            n_layer=3,
            n_head=4,
            initializer_range=0.2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        ),
    ),
    "gpt_neox": (gpt_layouts.GPTNeoXLayout, transformers.GPTNeoXConfig(**OLD, rotary_pct=0.5)),
    "gpt_neox one after the other": (
        gpt_layouts.GPTNeoXLayout,
        transformers.GPTNeoXConfig(**OLD, use_parallel_residual=False, tie_word_embeddings=True),
    ),
}


@pytest.fixture(params=FAMILIES)
def pair(request, tiny_model, mlp):
    """Their model, ours with its weights, and the layout."""
    layout_class, config = FAMILIES[request.param]
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # zeros and ones would hide a weight that is not used
        for name, parameter in theirs.named_parameters():
            if "norm" in name or "bias" in name or "ln_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    layout = layout_class(None)
    table = layout.model_table(theirs.config.to_dict() | {"architectures": [type(theirs).__name__]})
    ours = tiny_model(**{"init_std": 0.2} | attrs.asdict(configured(table, mlp), recurse=False))
    state = theirs.state_dict()
    recipes = layout.to_forge(ours.config, state)
    made = {name: recipe.make(*(state[one] for one in recipe.reads)) for name, recipe in recipes.items()}
    ours.load_state_dict(made, strict=not ours.config.tie_embeddings)
    return theirs, ours.eval(), layout


def configured(table, mlp):
    """The table of a layout as a config, without the machinery of a job."""
    table = dict(table)
    assert table.pop("name") == "transformer"
    table["feed_forward"] = mlp(**{key: value for key, value in table["feed_forward"].items() if key != "name"})
    table["layers"] = tuple(LayerConfig(**one) for one in table.pop("layers", ()))
    for key, scaling in (("rope_scaling", Llama3Scaling), ("yarn", YarnScaling), ("long_rope", LongRope)):
        if key in table:
            given = {name: tuple(one) if isinstance(one, list) else one for name, one in table[key].items()}
            table[key] = scaling(**given)
    return TransformerConfig(**table)


@torch.no_grad()
def test_logits_are_equal(pair, tokens):
    theirs, ours, _ = pair
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_are_equal_in_bf16(pair, tokens):
    theirs, ours, _ = pair
    expected = theirs(tokens).logits
    error = (ours.bfloat16()(tokens).float() - expected).norm() / expected.norm()
    of_theirs = (theirs.bfloat16()(tokens).logits.float() - expected).norm() / expected.norm()
    assert error < max(2e-2, 1.5 * of_theirs)


@torch.no_grad()
def test_generation_with_a_cache_and_padding_gives_their_tokens(pair, tokens):
    theirs, ours, _ = pair
    prompt = tokens[:, :7]
    expected = theirs.generate(prompt, max_new_tokens=24, do_sample=False, use_cache=False)

    cache = ours.make_cache(2, 40)
    padding = torch.zeros(2, 3, dtype=torch.int64)
    padded = torch.cat((padding, prompt), dim=1)
    positions = torch.cat((padding - 1, torch.arange(7).expand(2, -1)), dim=1)
    found, last = prompt, ours(padded, positions=positions, cache=cache)[:, -1:].argmax(-1)
    for step in range(24):
        found = torch.cat((found, last), dim=1)
        at = torch.full((2, 1), 7 + step)
        last = ours(last, positions=at, cache=cache).argmax(-1)

    assert torch.equal(found, expected)
    whole = ours(found[:, :-1])[:, 6:].argmax(-1)
    assert torch.equal(whole, found[:, 7:])


@torch.no_grad()
def test_packed_documents_are_each_as_alone(pair, tokens):
    _, ours, _ = pair
    document = torch.tensor([[0] * 9 + [1] * 15]).expand(2, -1)
    positions = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)

    packed = ours(tokens, document=document, positions=positions)

    torch.testing.assert_close(packed[:, :9], ours(tokens[:, :9]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 9:], ours(tokens[:, 9:]), atol=1e-5, rtol=1e-5)


def test_twenty_steps_of_training_are_theirs(pair):
    theirs, ours, _ = pair
    assert_trained_alike(theirs, ours)


def test_the_configuration_and_the_weights_go_back_as_they_came(pair, mlp):
    theirs, ours, layout = pair
    table = layout.config_json(ours.config, 50)
    again = type(theirs.config).from_dict(table)
    assert table["architectures"] == [type(theirs).__name__]
    assert configured(layout.model_table(again.to_dict()), mlp) == configured(layout.model_table(table), mlp)

    state, mine = theirs.state_dict(), dict(ours.named_parameters(remove_duplicate=False))
    recipes = layout.to_huggingface(ours.config)
    recipes = {name.replace("embed_out", "lm_head"): recipe for name, recipe in recipes.items()}
    tied = {"lm_head.weight"} if ours.config.tie_embeddings else set()
    assert recipes.keys() == state.keys() - tied
    for name, recipe in recipes.items():
        assert torch.equal(recipe.make(*(mine[one] for one in recipe.reads)), state[name]), name


@pytest.mark.parametrize(
    "keys",
    [
        {"window": 7},
        {"attention_softcap": 9.0, "attention": "math"},
        {"attention_sinks": True},
        {"output_softcap": 9.0},
        {"learned_positions": True},
        {"parallel_residual": True},
        {"norm": "layernorm"},
        {"norm_placement": "output"},
        {"embed_multiplier": 7.0},
        {"attention_multiplier": 7.0},
        {"layers": (LayerConfig(at=1, rotary_fraction=0.5),)},
        {"feed_forward": "two matrices"},
    ],
    ids=str,
)
def test_a_model_that_computes_something_else_is_told_the_key(keys, tiny_config, mlp):
    keys = {
        name: mlp(hidden_dim=48, activation="relu2") if value == "two matrices" else value
        for name, value in keys.items()
    }
    (key,) = set(keys) - {"attention"}
    named = {"layers": "rotary_fraction", "feed_forward": "feed_forward of layer 0"}.get(key, key)
    layout = weight_layouts.Qwen2Layout(None)
    usual = {"attention_bias": "qkv", "vocab_size": 50}
    layout.config_json(tiny_config(**usual), 50)
    if key == "window":  # Qwen2 has windows
        layout, usual = weight_layouts.GraniteLayout(None), {}

    with pytest.raises(ConfigError, match=f"has another .*{named}|gated mlp"):
        layout.config_json(tiny_config(**usual, **keys), 50)


NEOX = {"norm": "layernorm", "attention_bias": "all", "parallel_residual": True}
OUTPUT = {"norm_placement": "output", "qk_norm": True}
GEMMA_3 = {"norm": "zero_centered_rmsnorm", "norm_placement": "both", "qk_norm": True, "embed_multiplier": 32**0.5}
LONG = LongRope(short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, original_max_seq_len=16)


@pytest.mark.parametrize(
    ("layout", "has", "adds", "message"),
    [
        (weight_layouts.MistralLayout, {"window": 5}, {"attention_bias": "all"}, "has another attention_bias"),
        (weight_layouts.MinistralLayout, {"window": 5}, {"attention_bias": "all"}, "has another attention_bias"),
        (weight_layouts.Phi3Layout, {}, {"attention_bias": "all"}, "has another attention_bias"),
        (output_norm_layouts.Exaone4Layout, OUTPUT, {"attention_bias": "all"}, "has another attention_bias"),
        (layer_norm_layouts.StableLmLayout, {"norm": "layernorm"}, {"attention_bias": "all"}, "another attention_bias"),
        (layer_norm_layouts.StableLmLayout, {"norm": "layernorm"}, {"head_dim": 16}, "has another head_dim"),
        (weight_layouts.LlamaLayout, {"qk_norm": True}, {"feed_forward": {"bias": True}}, "no biases in its mlp"),
        (gemma_layouts.Gemma3Layout, GEMMA_3, {"attention_softcap": 2.0}, "transformers caps nothing"),
        (gemma_layouts.Gemma3Layout, GEMMA_3, {"attention_multiplier": 0.3}, "is a whole number, and attention_mul"),
        (weight_layouts.Phi3Layout, {}, {"rope_factor": 2.0}, "as long_rope does, if at all"),
        (weight_layouts.Phi3Layout, {}, {"rope_scaling": Llama3Scaling()}, "as long_rope does, if at all"),
        (weight_layouts.Phi3Layout, {}, {"head_dim": 16, "long_rope": LONG}, "pairs of dim / n_heads features a head"),
        (weight_layouts.Phi3Layout, {}, {"rotary_fraction": 0.0, "long_rope": LONG}, "pairs of dim / n_heads features"),
        (
            layer_norm_layouts.StableLmLayout,
            {"norm": "layernorm", "rotary_fraction": 0.0},
            {"yarn": YarnScaling(factor=4.0, original_max_seq_len=16)},
            "yarn and partial_rotary_factor = 0.0 has another attention than ours",
        ),
        (gpt_layouts.GPTNeoXLayout, NEOX, {"head_dim": 16, "long_rope": LONG}, "what is left has 8 factors"),
        (
            output_norm_layouts.Olmo3Layout,
            OUTPUT | {"qk_norm_over": "all"},
            {"yarn": YarnScaling(factor=4.0, original_max_seq_len=16, truncate=False)},
            "transformers truncates there in any case",
        ),
    ],
)
def test_what_transformers_would_leave_out_is_not_written(layout, has, adds, message, tiny_config, mlp):
    adds = {key: mlp(hidden_dim=48, **value) if key == "feed_forward" else value for key, value in adds.items()}
    if layout is gpt_layouts.GPTNeoXLayout:
        has = {**has, "n_kv_heads": 4, "feed_forward": mlp(hidden_dim=48, gated=False, bias=True, activation="gelu")}
    layout(None).config_json(tiny_config(vocab_size=50, **has), 50)
    with pytest.raises(ConfigError, match=message):
        layout(None).config_json(tiny_config(vocab_size=50, **has | adds), 50)


@pytest.mark.parametrize(
    "config",
    [
        transformers.Exaone4Config(**SHAPE, sliding_window=5, layer_types=["full_attention"] * 3),
        transformers.Olmo3Config(
            **SHAPE | {"num_hidden_layers": 4},
            sliding_window=5,
            rope_parameters={"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}},
        ),
    ],
    ids=["no rotary positions", "stretched in the fewer layers"],
)
def test_rotary_positions_of_few_layers_go_there_and_back(config, mlp):
    name = type(config).__name__.replace("Config", "")
    layout = getattr(output_norm_layouts, f"{name}Layout")(None)
    table = layout.model_table(config.to_dict() | {"architectures": [f"{name}ForCausalLM"]})
    written = layout.config_json(configured(table, mlp), 50)
    assert layout.model_table(written).items() >= table.items()


def test_old_files_of_gpt2_are_read_without_the_prefix_and_with_masks(tiny_model):
    layout = gpt_layouts.GPT2Layout(None)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=4)
    names = {name.removeprefix("transformer.") for name in transformers.GPT2LMHeadModel(config).state_dict()}
    ours = TransformerConfig(
        dim=32,
        n_layers=1,
        n_heads=4,
        norm="layernorm",
        attention_bias="all",
        max_seq_len=16,
        feed_forward=attrs.evolve(
            tiny_model().config.feed_forward, config=MLPConfig(hidden_dim=128, activation="gelu_tanh", bias=True)
        ),
        learned_positions=True,
        rotary_fraction=0.0,
        tie_embeddings=True,
    )
    recipes = layout.to_forge(ours, names | {"h.0.attn.bias", "h.0.attn.masked_bias"})
    assert recipes["blocks.0.attention.k.weight"].reads == ("h.0.attn.c_attn.weight",)


@pytest.mark.parametrize(
    "text",
    [
        {},
        {
            "hidden_size": 2560,  # all that the file of 4B says
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        {"rope_parameters": {"full_attention": LINEAR}, "num_hidden_layers": 7, "sliding_window_pattern": 3},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}, "rope_local_base_freq": 5000.0},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "tie_word_embeddings": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [{}, {"tie_word_embeddings": False}], ids=str)
def test_what_a_file_of_gemma3_does_not_say_is_what_transformers_fills_in(text, tied):
    layout, name = gemma_layouts.Gemma3Layout(None), {"architectures": ["Gemma3ForConditionalGeneration"]}
    filled = transformers.Gemma3Config(text_config=copy.deepcopy(text), **tied).to_dict()

    table = layout.model_table({"text_config": text, "vision_config": {}, **tied, **name})

    assert table == layout.model_table(filled | name)
    assert table["tie_embeddings"] is not bool(tied)
    alone = transformers.Gemma3TextConfig(**copy.deepcopy(text)).to_dict()
    assert layout.model_table(text) == layout.model_table(alone)


NOT_DROPPING = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}


@pytest.mark.parametrize(
    ("layout", "config", "rates"),
    [
        (
            gpt_layouts.GPT2Layout,
            transformers.GPT2Config(attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3),
            {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.3},
        ),
        (
            gpt_layouts.GPTNeoXLayout,
            transformers.GPTNeoXConfig(attention_dropout=0.1, hidden_dropout=0.2),
            {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.2},
        ),
        (
            weight_layouts.Phi3Layout,
            transformers.Phi3Config(attention_dropout=0.1, resid_pdrop=0.2, embd_pdrop=0.3),
            {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.3},
        ),
        (weight_layouts.Qwen2Layout, transformers.Qwen2Config(attention_dropout=0.1), {"attention_dropout": 0.1}),
        (weight_layouts.Qwen2Layout, transformers.Qwen2Config(), {}),
    ],
)
def test_dropout_goes_there_and_back(layout, config, rates, mlp):
    layout = layout(None)
    table = layout.model_table(config.to_dict() | {"architectures": list(layout.architectures)})
    ours = configured(table, mlp)

    assert {key: getattr(ours, key) for key in NOT_DROPPING} == NOT_DROPPING | rates
    again = configured(layout.model_table(type(config).from_dict(layout.config_json(ours, 50)).to_dict()), mlp)
    assert {key: getattr(again, key) for key in NOT_DROPPING} == NOT_DROPPING | rates


def test_a_file_of_gpt2_that_does_not_say_drops_a_tenth():
    hf = {key: one for key, one in transformers.GPT2Config().to_dict().items() if not key.endswith("_pdrop")}
    table = gpt_layouts.GPT2Layout(None).model_table(hf)
    assert {key: table[key] for key in NOT_DROPPING} == dict.fromkeys(NOT_DROPPING, 0.1)


STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.2}


def test_a_file_of_olmo3_that_transformers_4_wrote_is_read_as_transformers_reads_it(mlp):
    layout, name = output_norm_layouts.Olmo3Layout(None), {"architectures": ["Olmo3ForCausalLM"]}
    old = {**SHAPE, "rope_scaling": STRETCHED, "rope_theta": 5e5, "sliding_window": 5, "num_hidden_layers": 4}

    table = layout.model_table(old | name)

    assert table == layout.model_table(transformers.Olmo3Config.from_dict(copy.deepcopy(old)).to_dict() | name)
    config = configured(table, mlp)
    assert [config.layer(number).rope_stretched for number in range(4)] == [False, False, False, True]
    assert [config.logit_scale(config.layer(number)) for number in range(4)] == [1, 1, 1, pytest.approx(1.44)]


def test_a_file_of_olmo3_that_stretches_nothing_is_read(mlp):
    layout, name = output_norm_layouts.Olmo3Layout(None), {"architectures": ["Olmo3ForCausalLM"]}
    config = configured(layout.model_table({**SHAPE, "sliding_window": 5, "num_hidden_layers": 4} | name), mlp)
    assert [config.layer(number).window for number in range(4)] == [5, 5, 5, 0]
    assert not any(config.layer(number).rope_stretched for number in range(4))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"sliding_attention": STRETCHED}, 'rope_type = "yarn" of sliding_attention is not supported; only "default"'),
        (STRETCHED, "rope_parameters of 'rope_type' is not supported; full_attention and sliding_attention are"),
    ],
)
def test_rotary_positions_that_olmo3_does_not_have_are_refused(rope, message):
    with pytest.raises(ConfigError, match=message):
        output_norm_layouts.Olmo3Layout(None).model_table(
            {**SHAPE, "architectures": ["Olmo3ForCausalLM"], "rope_parameters": rope}
        )


def test_a_model_that_stretches_some_layers_has_no_form_of_a_family_that_stretches_all(tiny_config):
    stretched = YarnScaling(factor=4.0, original_max_seq_len=16)
    tables = {"attention_bias": "qkv", "vocab_size": 50, "yarn": stretched}
    layout = weight_layouts.Qwen2Layout(None)
    layout.config_json(tiny_config(**tables), 50)
    with pytest.raises(ConfigError, match="has another attention_multiplier, rope_stretched"):
        layout.config_json(tiny_config(**tables, layers=(LayerConfig(at=1, rope_stretched=False),)), 50)


@pytest.mark.parametrize(
    ("layout", "keys", "message"),
    [
        (output_norm_layouts.Exaone4Layout, {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern = 'LLLG'"),
        (layer_norm_layouts.StableLmLayout, {"qk_layernorm": True}, "qk_layernorm = True is not supported; False is"),
        (layer_norm_layouts.StableLmLayout, {"use_parallel_residual": True}, "use_parallel_residual = True"),
        (layer_norm_layouts.StableLmLayout, {"hidden_dropout": 0.1}, "hidden_dropout = 0.1 is not supported; 0.0 is"),
        (
            weight_layouts.SeedOssLayout,
            {"attention_bias": False, "attention_out_bias": True},
            "attention_out_bias alone is not supported",
        ),
    ],
)
def test_what_a_family_may_have_and_ours_has_not_is_refused(layout, keys, message):
    layout(None).model_table(SHAPE)
    with pytest.raises(ConfigError, match=message):
        layout(None).model_table(SHAPE | keys)


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({}, "gelu_tanh"),
        ({"hidden_act": "gelu"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": "gelu"}, "gelu"),
        ({"hidden_act": "silu"}, None),
    ],
)
def test_gelu_of_early_files_of_gemma1_is_the_approximation(keys, activation):
    table = gemma_layouts.Gemma1Layout(None).model_table(SHAPE | keys)
    assert table["feed_forward"].get("activation") == activation


@pytest.mark.parametrize(
    "scaling",
    [
        {"yarn": YarnScaling(factor=4.0, original_max_seq_len=16)},
        {"rope_scaling": Llama3Scaling(original_max_seq_len=16)},
        {"long_rope": LongRope(short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, original_max_seq_len=16)},
        {"rope_factor": 2.0},
    ],
    ids=lambda scaling: next(iter(scaling)),
)
@pytest.mark.parametrize("sinks", [False, True])
def test_every_layout_has_a_form_of_stretched_frequencies_or_says_why_not(scaling, sinks, tiny_config):
    config, catalog = tiny_config(attention_bias="qkv", attention_sinks=sinks, **scaling), discover()
    if not sinks:
        assert layout_of_model(config, 50, catalog)[1]["architectures"] == ["Qwen2ForCausalLM"]
        return
    with pytest.raises(ConfigError, match="no form in Hugging Face's format") as raised:
        layout_of_model(config, 50, catalog)
    assert raised.value.args[0].count("\n") == len([*catalog.components("weight_layout")])


def test_a_model_with_one_window_is_a_mistral_and_a_ministral_if_asked_for(tiny_config):
    catalog, config = discover(), tiny_config(window=5)
    assert layout_of_model(config, 50, catalog)[1]["architectures"] == ["MistralForCausalLM"]
    assert layout_of_model(config, 50, catalog, "MinistralForCausalLM")[1]["layer_types"] == ["sliding_attention"] * 2
