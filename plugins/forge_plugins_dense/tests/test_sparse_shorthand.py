"""``num_experts`` and ``[model.moe]`` become the ``feed_forward`` that they stand for."""

from __future__ import annotations

import pytest

from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.sparse_shorthand import with_feed_forward

WIDE = {"name": "mlp", "hidden_dim": 96}
SPARSE = {"name": "forge-plugins-moe:moe", "n_experts": 4, "router": "hash", "dense": WIDE}


@pytest.mark.parametrize(
    ("table", "feed_forward"),
    [
        ({"num_experts": 8}, {"name": "moe", "n_experts": 8}),
        ({"moe": {"n_experts": 8}}, {"name": "moe", "n_experts": 8}),
        ({"num_experts": 8, "moe": {"router": "hash"}}, {"name": "moe", "router": "hash", "n_experts": 8}),
        ({"num_experts": 8, "moe": {"n_experts": 4}}, {"name": "moe", "n_experts": 8}),
        ({"num_experts": 8, "moe": {"name": "acme:moe"}}, {"name": "acme:moe", "n_experts": 8}),
        ({"num_experts": 8, "feed_forward": WIDE}, {"name": "moe", "dense": WIDE, "n_experts": 8}),
        ({"num_experts": 8, "feed_forward": "mlp"}, {"name": "moe", "dense": {"name": "mlp"}, "n_experts": 8}),
        ({"num_experts": 8, "moe": {"dense": WIDE}}, {"name": "moe", "dense": WIDE, "n_experts": 8}),
        ({"num_experts": 8, "feed_forward": SPARSE}, {**SPARSE, "n_experts": 8}),
    ],
)
def test_a_sparse_model_has_a_layer_of_experts(table, feed_forward):
    expanded, _ = with_feed_forward({"dim": 64, **table})

    assert expanded == {"dim": 64, "feed_forward": feed_forward}


@pytest.mark.parametrize(
    ("table", "dense"),
    [
        ({}, {}),
        ({"moe": {"n_experts": 4, "router": "hash"}}, {}),
        ({"feed_forward": WIDE}, {"feed_forward": WIDE}),
        ({"feed_forward": SPARSE}, {"feed_forward": WIDE}),
        ({"feed_forward": SPARSE, "moe": {"router": "hash"}}, {"feed_forward": WIDE}),
        ({"feed_forward": {"name": "moe", "n_experts": 4}}, {}),
    ],
)
def test_no_experts_are_a_dense_model_whatever_else_is_said(table, dense):
    expanded, _ = with_feed_forward({"dim": 64, **table, "num_experts": 0})

    assert expanded == {"dim": 64, **dense}


@pytest.mark.parametrize("table", [{}, {"feed_forward": WIDE}, {"feed_forward": SPARSE}])
def test_without_a_shorthand_nothing_changes(table):
    assert TransformerConfig.expand(table) == (table, {})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"num_experts": 8}, "feed_forward is 'mlp' already"),
        ({"moe": {"router": "hash"}}, "feed_forward is 'mlp' already"),
        ({"num_experts": -1}, "'num_experts' must be >= 0"),
    ],
)
def test_in_python_there_is_no_shorthand(tiny_config, keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_config(**keys)
