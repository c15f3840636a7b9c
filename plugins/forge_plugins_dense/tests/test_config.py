from __future__ import annotations

from types import SimpleNamespace

import pytest

from forge_core.contracts.component_ref import ComponentRef
from forge_plugins_dense.config import Llama3Scaling, MLPConfig, YarnScaling
from forge_plugins_dense.layer_config import LayerConfig
from forge_plugins_dense.multi_token_config import MultiTokenConfig

OTHER = ComponentRef(kind="sequence_mixer", name="other", provider="acme", factory="", config=None)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"n_heads": 5}, "must divide dim = 32, got 5"),
        ({"dim": 12, "n_heads": 4}, "even"),
        ({"n_kv_heads": 3}, "must divide n_heads = 4, got 3"),
        ({"head_dim": 7}, "even"),
        ({"n_layers": 0}, "n_layers"),
        ({"dim": -8}, "dim"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"qk_norm_over": "all"}, "no effect without qk_norm"),
        (
            {"rope_scaling": Llama3Scaling(), "yarn": YarnScaling(factor=2, original_max_seq_len=8)},
            "same purpose as rope_scaling",
        ),
        ({"attention": "efficient"}, "no grouped heads, and n_kv_heads = 2 is not n_heads = 4"),
    ],
)
def test_impossible_shapes_are_refused(tiny_config, keys, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**keys)


def test_head_dim_frees_the_heads_from_dim(tiny_config):
    config = tiny_config(n_heads=6, n_kv_heads=3, head_dim=10)

    assert (config.head_size, config.kv_heads) == (10, 3)


def test_key_value_heads_default_to_the_heads_that_were_asked_for(tiny_config):
    assert tiny_config(n_heads=8, n_kv_heads=None).kv_heads == 8


def test_heads_that_flex_attention_has_no_kernel_for_are_refused(tiny_config):
    with pytest.raises(
        ValueError, match='"flex" needs heads of at least 16 features, and these have 8; raise head_dim'
    ):
        tiny_config(attention="flex", head_dim=8)
    assert tiny_config(attention="flex", head_dim=16).narrowest_head == 16


def test_settings_of_the_mlp_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="has no effect beside hidden_dim"):
        MLPConfig(hidden_dim=64, multiplier=1.3)
    with pytest.raises(ValueError, match='has no effect without activation = "clamped_swiglu"'):
        MLPConfig(activation_limit=3.0)
    with pytest.raises(ValueError, match="clamped_swiglu has a gate; remove gated"):
        MLPConfig(activation="clamped_swiglu", gated=False)


def test_llama3_scaling_needs_a_range_of_frequencies():
    with pytest.raises(ValueError, match="must be greater than low_freq_factor"):
        Llama3Scaling(low_freq_factor=4.0, high_freq_factor=4.0)


def test_yarn_needs_a_range_of_frequencies():
    with pytest.raises(ValueError, match="must be greater than beta_slow"):
        YarnScaling(factor=4.0, original_max_seq_len=64, beta_slow=2.0, beta_fast=2.0)


@pytest.mark.parametrize("key", ["beta_fast", "logit_scale"])
def test_yarn_takes_no_number_that_fp32_cannot_have_then(key):
    """One was the logarithm of 0, the other NaN in the first step."""
    with pytest.raises(ValueError, match=f"'{key}' must be <= 1000000: 1e.308"):
        YarnScaling(factor=4.0, original_max_seq_len=64, **{key: 1e308})


def job(*, seq_len: int = 64, tp: int = 1, pp: int = 1, device: str = "auto") -> SimpleNamespace:
    return SimpleNamespace(
        train=SimpleNamespace(seq_len=seq_len),
        parallel=SimpleNamespace(tp=tp, pp=pp),
        parametrization=None,
        run=SimpleNamespace(device=device),
    )


@pytest.mark.parametrize(
    ("keys", "given", "key"),
    [
        ({}, {"seq_len": 65}, "max_seq_len"),
        ({}, {"tp": 3}, "n_heads"),
        ({}, {"tp": 4}, "n_kv_heads"),
        ({"attention": "flex", "head_dim": 16}, {"device": "cpu"}, "attention"),
    ],
)
def test_a_job_that_this_model_cannot_run_is_told_by_key(tiny_config, keys, given, key):
    config = tiny_config(**keys)

    assert [found for found, _ in config.check(job(**given))] == [key]
    assert list(config.check(job(tp=2))) == []


@pytest.mark.parametrize(
    ("keys", "tp", "said"),
    [
        ({"hidden_dim": 50}, 4, "50 features cannot"),
        ({"hidden_dim": 48}, 4, ""),
        ({}, 3, "256 features (the default) cannot"),
        ({}, 4, ""),
    ],
)
def test_a_hidden_width_that_tensor_parallelism_cannot_cut_is_told(tiny_config, keys, tp, said):
    layer = MLPConfig(**keys)
    here = job(tp=tp)
    own = ComponentRef(kind="feed_forward", name="mlp", provider="forge-plugins-dense", factory="", config=layer)
    here.model = SimpleNamespace(config=tiny_config(feed_forward=own))

    found = [sentence for key, sentence in layer.check(here) if key == "hidden_dim"]

    assert [sentence.startswith(said) for sentence in found] == ([True] if said else [])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layers": (LayerConfig(at=2, window=8),)}, r"\[0\].at = 2 selects none of the n_layers = 2 layers"),
        ({"layers": (LayerConfig(at="5:", window=8),)}, "selects none"),
        ({"layers": (LayerConfig(at=0),)}, "changes nothing; give at least one of window"),
        (
            {"layers": (LayerConfig(at=0, rope_stretched=False),)},
            r"\[0\].rope_stretched is given, and the model has none of rope_scaling, yarn, long_rope",
        ),
        ({"layers": (LayerConfig(at=0, rotary_fraction=0.4),)}, "rotates 0.4 of 8 features a head, 3"),
        ({"rotary_fraction": 0.4}, "turn pairs of features"),
        ({"attention_softcap": 5.0, "attention": "flash"}, '"flash" does not cap logits'),
        ({"rope_factor": 2.0, "rope_scaling": Llama3Scaling()}, "same purpose as rope_scaling"),
        ({"learned_positions": True, "multi_token": MultiTokenConfig(predictor=OTHER)}, "without their positions"),
        ({"latent_attention": {}}, "is for files; set mixer"),
        ({"latent_attention": {}, "mixer": OTHER}, "all layers have other mixers; remove it"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tiny_config, keys, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**keys)


@pytest.mark.parametrize("at", ["1", "1:2:0", "1:2:3:4", "one:", "::-1", ""])
def test_what_selects_no_layers_is_refused(at):
    with pytest.raises(ValueError, match="must"):
        LayerConfig(at=at, window=8)


def test_the_last_table_with_a_key_counts(tiny_config):
    config = tiny_config(
        n_layers=6,
        window=4,
        layers=(LayerConfig(at="1::2", window=0, rope_theta=500.0), LayerConfig(at=-1, window=8)),
    )
    assert [config.layer(number).window for number in range(6)] == [4, 0, 4, 0, 4, 8]
    assert [config.layer(number).rope_theta for number in range(4, 6)] == [10_000.0, 500.0]
    assert config.windows == (0, 4, 8)
    assert config.layer(6).window == 4


def test_flops_of_attention_end_at_the_window(tiny_model):
    full, windowed = tiny_model(), tiny_model(window=8, layers=(LayerConfig(at=1, window=0),))
    assert full.flops_per_token(64) - windowed.flops_per_token(64) == 12 * 32 * (64 - 8)


def test_what_asks_for_more_than_causal_order_is_named(tiny_config):
    assert tiny_config().beyond_causal == ""
    assert tiny_config(layers=(LayerConfig(at=1, attention_sinks=True),)).beyond_causal == "attention_sinks"
    assert tiny_config(window=8, attention_sinks=True).beyond_causal == "window"


def test_a_number_of_layers_that_initial_values_do_not_depend_on_is_told(tiny_config):
    found = [key for key, _ in tiny_config(init_depth="layer", init_layers=4).check(job())]
    assert found == ["init_layers"]
    assert [*tiny_config(init_layers=4).check(job()), *tiny_config(init_depth="layer").check(job())] == []


def test_keys_of_attention_have_no_effect_without_attention(tiny_config):
    mixer = OTHER
    config = tiny_config(mixer=mixer, window=8)
    found = dict(config.check(job()))
    assert sorted(found) == ["n_kv_heads", "window"]
    assert list(tiny_config(layers=(LayerConfig(at=0, mixer=mixer),), window=8).check(job())) == []
