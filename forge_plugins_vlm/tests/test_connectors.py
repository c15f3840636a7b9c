"""Connectors against formulas in float64, and against loops over single cells."""

from __future__ import annotations

import math

import pytest
import torch

from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_vlm.testing.connector import ConnectorConformance

BUILD = ComponentBuilder(discover())
GRIDS = [(4, 4), (3, 5), (2, 6), (1, 7)]


class TestLinear(ConnectorConformance):
    component = "forge-plugins-vlm:linear"


class TestMLP(ConnectorConformance):
    component = "forge-plugins-vlm:mlp"


class TestDeepMLP(ConnectorConformance):
    component = "forge-plugins-vlm:mlp"
    config = {"n_layers": 4}


class TestNarrowMLP(ConnectorConformance):
    component = "forge-plugins-vlm:mlp"
    config = {"hidden_dim": 10, "activation": "relu"}


class TestFusedMLP(ConnectorConformance):
    component = "forge-plugins-vlm:fused_mlp"


class TestAveragePool(ConnectorConformance):
    component = "forge-plugins-vlm:average_pool"


class TestWideAveragePool(ConnectorConformance):
    component = "forge-plugins-vlm:average_pool"
    config = {"window": 3, "n_layers": 1}


class TestAttentionPool(ConnectorConformance):
    component = "forge-plugins-vlm:attention_pool"


class TestPixelShuffle(ConnectorConformance):
    component = "forge-plugins-vlm:pixel_shuffle"


class TestResampler(ConnectorConformance):
    component = "forge-plugins-vlm:resampler"
    config = {"n_tokens": 5, "depth": 3}


def connector(name, in_dim=8, out_dim=6, **keys):
    """In float64, with biases that are not 0."""
    module = BUILD(BUILD.resolve("connector", {"name": name, **keys}), in_dim=in_dim, out_dim=out_dim)
    module.init_weights(SeededInitializer(0), "connector.")
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return module.double().eval()


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gelu(hidden):
    """The exact one."""
    return hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))


FORMULAS = {
    "gelu": gelu,
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def layers(module, hidden, activation=gelu):
    """A chain of linear layers with an activation between them."""
    for number, layer in enumerate(module.layers):
        if number:
            hidden = activation(hidden)
        hidden = hidden @ layer.weight.T + layer.bias
    return hidden


def windows(cells, side):
    """The cells of each window, ``(n, D)``, row by row."""
    rows, columns = cells.shape[:2]
    return [
        cells[row : row + side, column : column + side].flatten(0, 1)
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    ]


def attend(attention, queries, media):
    """Attention of several heads, one at a time."""
    q, k, v = (
        hidden @ layer.weight.T + layer.bias
        for layer, hidden in ((attention.q, queries), (attention.k, media), (attention.v, media))
    )
    heads = zip(*(one.chunk(attention.n_heads, dim=-1) for one in (q, k, v)), strict=True)
    mixed = torch.cat([(a @ b.T / math.sqrt(a.shape[-1])).softmax(-1) @ c for a, b, c in heads], dim=-1)
    return mixed @ attention.o.weight.T + attention.o.bias


@pytest.mark.parametrize(
    ("name", "keys", "widths"),
    [
        ("linear", {}, [8, 6]),
        ("mlp", {}, [8, 6, 6]),
        ("mlp", {"n_layers": 3}, [8, 6, 6, 6]),
        ("mlp", {"hidden_dim": 10}, [8, 10, 6]),
        ("mlp", {"n_layers": 3, "hidden_dim": 10}, [8, 10, 10, 6]),
        ("fused_mlp", {}, [8, 32, 6, 6]),
    ],
)
def test_a_connector_of_single_features_is_a_chain_of_layers(name, keys, widths):
    module, features = connector(name, **keys), random(2, 15, 8)

    assert [module.layers[0].in_features, *(layer.out_features for layer in module.layers)] == widths
    torch.testing.assert_close(module(features, (3, 5)), layers(module, features))


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("mlp", {}),
        ("fused_mlp", {}),
        ("average_pool", {"hidden_dim": 10}),
        ("attention_pool", {"hidden_dim": 10}),
        ("pixel_shuffle", {"n_layers": 2, "hidden_dim": 10}),
    ],
)
def test_the_activation_between_matrices_is_its_formula(name, keys, activation):
    module, given = connector(name, activation=activation, **keys), []
    projection = module if hasattr(module, "layers") else module.projection
    projection.layers[0].register_forward_pre_hook(lambda _, args: given.append(args[0]))

    tokens = module(random(2, 16, 8), (4, 4))

    assert projection.layers[0].out_features == {"mlp": 6, "fused_mlp": 32}.get(name, 10)
    torch.testing.assert_close(tokens, layers(projection, given[0], FORMULAS[activation]))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("window", [2, 3])
def test_a_window_is_averaged_over_the_features_that_it_has(grid, window):
    module, features = connector("average_pool", window=window), random(2, grid[0] * grid[1], 8)

    tiles = [windows(tile.view(*grid, 8), window) for tile in features]
    expected = torch.stack([torch.stack([cells.mean(0) for cells in tile]) for tile in tiles])

    torch.testing.assert_close(module(features, grid), layers(module.projection, expected))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("window", [2, 3])
def test_the_mean_of_a_window_attends_to_the_features_that_it_has(grid, window):
    module, features = connector("attention_pool", window=window, n_heads=2), random(2, grid[0] * grid[1], 8)

    tiles = [windows(tile.view(*grid, 8), window) for tile in features]
    expected = torch.stack(
        [torch.cat([attend(module.attention, cells.mean(0, keepdim=True), cells) for cells in tile]) for tile in tiles]
    )

    torch.testing.assert_close(module(features, grid), layers(module.projection, expected))


@pytest.mark.parametrize(("grid", "scale"), [((4, 4), 2), ((2, 6), 2), ((3, 6), 3), ((4, 8), 4)])
def test_a_square_of_features_stands_side_by_side(grid, scale):
    module, features = connector("pixel_shuffle", scale=scale), random(2, grid[0] * grid[1], 8)

    tiles = [windows(tile.view(*grid, 8), scale) for tile in features]
    expected = torch.stack([torch.stack([cells.flatten() for cells in tile]) for tile in tiles])

    torch.testing.assert_close(module(features, grid), layers(module.projection, expected))


@pytest.mark.parametrize("activation", FORMULAS)
def test_learned_queries_attend_to_features_and_to_one_another(activation):
    keys = {"n_tokens": 5, "depth": 2, "n_heads": 2, "activation": activation}
    module, features = connector("resampler", **keys), random(2, 15, 8)

    def norm(layer, hidden):
        centred = hidden - hidden.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias

    def resampled(tile):
        hidden = module.queries
        for layer in module.layers:
            queries = norm(layer.query_norm, hidden)
            hidden = hidden + attend(layer.attention, queries, torch.cat((norm(layer.media_norm, tile), queries)))
            up = FORMULAS[activation](norm(layer.mlp_norm, hidden) @ layer.up.weight.T + layer.up.bias)
            hidden = hidden + up @ layer.down.weight.T + layer.down.bias
        return layers(module.projection, norm(module.norm, hidden))

    expected = torch.stack([resampled(tile) for tile in features])

    torch.testing.assert_close(module(features, (3, 5)), expected)
    assert BUILD.resolve("connector", {"name": "resampler", "n_tokens": 5}).config.num_tokens((30, 7)) == 5


@pytest.mark.parametrize("name", ["linear", "mlp", "average_pool", "attention_pool", "pixel_shuffle", "resampler"])
def test_tokens_are_of_about_unit_scale_at_any_width(name):
    for width in (32, 512):
        tokens = connector(name, in_dim=width, out_dim=width)(random(4, 16, width), (4, 4))
        assert 0.2 < tokens.std() < 3, (name, width)


def test_a_grid_that_cannot_be_shuffled_is_refused_with_both_numbers():
    config = BUILD.resolve("connector", {"name": "pixel_shuffle", "scale": 2}).config

    with pytest.raises(ValueError, match="multiples of scale = 2, and not of 3 × 4 features"):
        config.num_tokens((3, 4))


def test_features_that_are_not_of_the_grid_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="16 features are no grid of 3 × 5 = 15"):
        connector("average_pool")(random(1, 16, 8), (3, 5))


def test_heads_that_do_not_divide_the_width_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="n_heads = 3 does not divide the width 8 of the encoder's features"):
        connector("resampler", n_heads=3)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"name": "mlp", "n_layers": 1}, "n_layers: must be at least 2"),
        ({"name": "average_pool", "window": 1}, "window: must be at least 2"),
        ({"name": "mlp", "hidden_dim": 0}, "hidden_dim: must be greater than 0"),
        ({"name": "mlp", "activation": "glu"}, "activation: .* did you mean 'gelu'"),
        ({"name": "pixel_shuffle", "hidden_dim": 8}, "hidden_dim: has no effect with n_layers = 1, got 8; remove it"),
        ({"name": "average_pool", "n_layers": 1, "activation": "relu"}, "activation: has no effect with n_layers = 1"),
        ({"name": "pixel_shufle"}, "Did you mean 'pixel_shuffle'"),
    ],
)
def test_keys_out_of_range_and_unknown_names_are_refused(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        BUILD.resolve("connector", keys)
