"""Layers with different mixers in one model, and what the decoder asks of them before it is built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core.api import ComponentRef
from forge_core.config.builder import ComponentBuilder
from forge_core.config.problems import ConfigProblems
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_dense.layer_config import LayerConfig
from forge_plugins_dense.mixer_config import AttentionMixerConfig, Heads

LATENT = {"kv_rank": 24, "q_rank": 16, "plain_dim": 8, "rotary_dim": 4, "value_dim": 6}
TABLE = {"name": "transformer", "dim": 32, "n_layers": 4, "n_heads": 4}


@pytest.fixture(scope="module")
def resolve():
    build = ComponentBuilder(discover())

    def resolved(**keys: Any) -> ComponentRef:
        return build.resolve("model", TABLE | keys)

    return resolved


@pytest.fixture
def attention():
    return ComponentRef(
        kind="sequence_mixer",
        name="attention",
        provider="forge-plugins-dense",
        factory="forge_plugins_dense.mixer:attention",
        config=AttentionMixerConfig(),
    )


def latent_in(**keys: Any) -> dict[str, Any]:
    return {"name": "latent", **LATENT, **keys}


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ({"latent_attention": LATENT}, {"mixer": latent_in()}),
        ({"latent_attention": {}}, {"mixer": "latent"}),
        ({"latent_attention": LATENT, "mixer": "attention"}, {"mixer": latent_in()}),
        (
            {"latent_attention": LATENT, "layers": [{"at": 1, "mixer": "forge-plugins-dense:attention"}]},
            {"mixer": latent_in(), "layers": [{"at": 1, "mixer": latent_in()}]},
        ),
        ({"latent_attention": {"pad_values": True}, "mixer": latent_in()}, {"mixer": latent_in(pad_values=True)}),
    ],
    ids=["all layers", "defaults", "named attention", "named in layers", "over the mixer's own"],
)
def test_the_former_spelling_is_the_same_model(resolve, former, now):
    assert resolve(**former).config == resolve(**now).config


@torch.no_grad()
def test_each_layer_is_that_of_a_model_with_its_mixer_alone(tiny_model, latent, attention, tokens):
    """Bit for bit, with initial values of the same seed: the second layer of one model goes on from the first of the
    other."""
    mixed = tiny_model(mixer=latent(**LATENT), layers=(LayerConfig(at=1, mixer=attention, window=5),))
    first, second = tiny_model(mixer=latent(**LATENT)), tiny_model(window=5)
    passed = []
    first.blocks["0"].register_forward_hook(lambda _, __, hidden: passed.append(hidden))
    second.blocks["0"].register_forward_hook(lambda _, __, ___: passed[0])

    first(tokens)

    assert torch.equal(mixed(tokens), second(tokens))
    assert not torch.equal(second(tokens), first(tokens))


@torch.no_grad()
def test_text_is_generated_by_caches_of_each_mixer(tiny_model, latent, attention, tokens):
    model = tiny_model(mixer=latent(**LATENT), layers=(LayerConfig(at=1, mixer=attention, window=5),)).eval()
    cache = model.make_cache(2, 24)

    chunks = [model(chunk, cache=cache) for chunk in tokens.split((7, 1, 1, 15), dim=1)]

    torch.testing.assert_close(torch.cat(chunks, 1), model(tokens), atol=1e-5, rtol=1e-5)
    assert [cache.layers[layer].k.shape[1:] for layer in "01"] == [(1, 24, 24), (2, 24, 8)]


def test_matrices_that_are_known_before_the_build_are_those_that_are_built(tiny_model, latent, attention):
    layers = (LayerConfig(at=1, mixer=attention),)
    model = tiny_model(mixer=latent(**LATENT), layers=layers, n_heads=8, dim=48, vocab_size=50)
    plan = model.parallel_plan()
    built = {
        (*parameter.shape, plan[name.removesuffix(".weight")])
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.") and parameter.ndim == 2
    }

    assert set(model.config.matrices().values()) == built
    assert {"mixer.kv_rank", "n_kv_heads", "feed_forward"} <= model.config.matrices().keys()


def test_heads_are_asked_of_each_mixer(tiny_config, latent, attention):
    mixed = tiny_config(mixer=latent(**LATENT), layers=(LayerConfig(at=1, mixer=attention, rotary_fraction=0.25),))

    assert mixed.heads == [Heads(keys=12, values=6, rotary=4), Heads(keys=8, values=8, rotary=8)]
    assert [mixed.rotary_size(mixed.layer(number)) for number in range(2)] == [4, 2]
    assert (mixed.narrowest_head, mixed.head_size) == (6, 8)


def test_the_hybrid_of_the_repository_has_both_kinds_of_attention():
    path = Path(__file__).parents[3] / "configs" / "hybrid_demo.toml"
    model = load_job(path, catalog=discover()).model.config

    each = [model.layer(number) for number in range(model.n_layers)]

    assert [(layer.mixer.name, layer.window) for layer in each] == [*[("latent", 0)] * 3, ("attention", 64)]


def complaints(config: Any, *, tp: int = 1, **base: Any) -> dict[str, str]:
    job = SimpleNamespace(
        train=SimpleNamespace(seq_len=16),
        parallel=SimpleNamespace(tp=tp, cp=1),
        run=SimpleNamespace(device="cpu"),
        parametrization=SimpleNamespace(config=SimpleNamespace(base=base or None)),
    )
    return dict(config.check(job))


def test_keys_that_no_mixer_reads_are_told(resolve):
    idle = {"n_kv_heads": 2, "head_dim": 16, "qk_norm": True, "attention_bias": "all", "rotary_fraction": 0.5}
    config = resolve(mixer="latent", window=8, layers=[{"at": 1, "attention_sinks": True}], **idle).config

    found = complaints(config)

    assert found.keys() == {*idle, "layers[0].attention_sinks"}
    assert found["qk_norm"] == "has no effect on the mixer latent, which every layer has; remove it"
    assert complaints(resolve(mixer="latent", layers=[{"at": 1, "mixer": "attention"}], **idle).config) == {}
    assert complaints(resolve(mixer="latent", n_kv_heads=4).config) == {}
    assert complaints(resolve(mixer="latent", layers=[{"at": ":", "mixer": "attention"}]).config).keys() == {"mixer"}


def test_heads_that_are_not_shared_out_evenly_count_where_a_mixer_has_them(resolve):
    assert complaints(resolve(mixer="latent", n_heads=8, n_kv_heads=8).config, tp=8) == {}
    mixed = resolve(mixer="latent", n_heads=8, n_kv_heads=2, layers=[{"at": 0, "mixer": "attention"}]).config
    assert complaints(mixed, tp=4).keys() == {"n_kv_heads"}


@pytest.mark.parametrize(
    ("base", "is_right"),
    [
        ({"dim": 16, "n_heads": 2}, True),
        ({"dim": 16}, False),
        ({"head_dim": 16}, False),
        ({"mixer": {"plain_dim": 4}}, False),
    ],
)
def test_a_parametrization_whose_base_changes_the_heads_of_some_mixers_is_refused(resolve, base, is_right):
    mixed = resolve(mixer=latent_in(), layers=[{"at": 1, "mixer": "attention"}]).config

    assert complaints(mixed, **base).keys() == (set() if is_right else {"mixer"})
    assert complaints(resolve(mixer=latent_in()).config, **base) == {}
    assert complaints(resolve().config, **base) == {}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mixer": latent_in(rotary_dim=3)}, "mixer.rotary_dim: must be even, because rotary embeddings turn pairs"),
        ({"mixer": {"name": "attention", "kv_rank": 8}}, "mixer.kv_rank: unknown key; it takes no keys"),
        ({"mixer": {"name": "latent", "kv_rnk": 8}}, "mixer.kv_rnk: unknown key; did you mean 'kv_rank'?"),
        ({"mixer": "latnt"}, "named 'latnt'. Did you mean 'latent'? Available: attention, latent"),
        ({"layers": [{"at": 0, "mixer": latent_in(value_dim=0)}]}, "layers[0].mixer.value_dim: must be greater than 0"),
        ({"latent_attention": {"kv_rnk": 8}}, "latent_attention.kv_rnk: unknown key; did you mean 'kv_rank'?"),
        ({"latent_attention": {"kv_rank": 0}, "mixer": latent_in()}, "latent_attention.kv_rank: must be greater"),
        ({"latent_attention": 8}, "latent_attention: expected a table"),
        ({"mixer": latent_in(), "attention": "flash"}, 'attention: "flash" takes values as wide as keys'),
    ],
)
def test_wrong_keys_are_told_where_they_were_written(resolve, keys, words):
    with pytest.raises(ConfigProblems) as caught:
        resolve(**keys)
    assert words in str(caught.value)
