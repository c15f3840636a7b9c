from __future__ import annotations

from types import SimpleNamespace

import pytest

from forge_core.contracts.component_ref import ComponentRef
from forge_plugins_dense.config import Llama3Scaling, MLPConfig, YarnScaling


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


def test_settings_of_the_mlp_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="has no effect beside hidden_dim"):
        MLPConfig(hidden_dim=64, multiplier=1.3)


def test_llama3_scaling_needs_a_range_of_frequencies():
    with pytest.raises(ValueError, match="must be greater than low_freq_factor"):
        Llama3Scaling(low_freq_factor=4.0, high_freq_factor=4.0)


def test_yarn_needs_a_range_of_frequencies():
    with pytest.raises(ValueError, match="must be greater than beta_slow"):
        YarnScaling(factor=4.0, original_max_seq_len=64, beta_slow=2.0, beta_fast=2.0)


def test_a_norm_over_all_heads_cannot_be_cut(tiny_config):
    config = tiny_config(qk_norm=True, qk_norm_over="all")

    assert [key for key, _ in config.check(job(tp=2))] == ["qk_norm_over"]
    assert list(config.check(job())) == []


def job(*, seq_len: int = 64, tp: int = 1, pp: int = 1, device: str = "auto") -> SimpleNamespace:
    return SimpleNamespace(
        train=SimpleNamespace(seq_len=seq_len),
        parallel=SimpleNamespace(tp=tp, pp=pp),
        run=SimpleNamespace(device=device),
    )


@pytest.mark.parametrize(
    ("keys", "given", "key"),
    [
        ({}, {"seq_len": 65}, "max_seq_len"),
        ({}, {"tp": 3}, "n_heads"),
        ({}, {"tp": 4}, "n_kv_heads"),
        ({"tie_embeddings": True}, {"pp": 2}, "tie_embeddings"),
        ({"attention": "flex"}, {"device": "cpu"}, "attention"),
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
