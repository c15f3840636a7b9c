"""The conformance kits catch components that lie."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

from forge_core.contracts.component_ref import ComponentRef
from forge_plugins_vlm.connectors.linear import LinearConnector
from forge_plugins_vlm.connectors.linear_config import LinearConfig
from forge_plugins_vlm.encoders.conv_vit import ConvViT, EncoderLayer
from forge_plugins_vlm.encoders.conv_vit_config import ConvViTConfig
from forge_plugins_vlm.testing.connector import ConnectorConformance
from forge_plugins_vlm.testing.vision_encoder import VisionEncoderConformance


class HonestConnector(LinearConnector):
    """Keeps the contract; those below break one promise each."""


class DropsTheLast(HonestConnector):
    def forward(self, features, grid=None):
        return super().forward(features)[:, :-1]


class MixesTiles(HonestConnector):
    def forward(self, features, grid=None):
        return super().forward(features) + features.mean()


class LooksAtOneFeature(HonestConnector):
    def forward(self, features, grid=None):
        return super().forward(features[:, :1].expand_as(features))


class ForgetsItsBias(HonestConnector):
    def init_weights(self, rng, prefix):
        rng.fill(f"{prefix}layers.0.weight", self.layers[0].weight, lambda full, _: full.fill_(0.1))


class UsesAGeneratorOfItsOwn(HonestConnector):
    def init_weights(self, rng, prefix):
        for name, parameter in self.named_parameters():
            rng.fill(prefix + name, parameter, lambda full, _: full.normal_())


class HasAnIdleParameter(HonestConnector):
    def __init__(self, config, **keywords):
        super().__init__(config, **keywords)
        self.idle = nn.Parameter(torch.empty(1))

    def init_weights(self, rng, prefix):
        super().init_weights(rng, prefix)
        rng.fill(f"{prefix}idle", self.idle, lambda full, _: full.zero_())


class NamesNoBias(HonestConnector):
    def parameter_roles(self):
        return {"layers.0.weight": "matrix"}


class CountsItsCalls(HonestConnector):
    def forward(self, features, grid=None):
        with torch.no_grad():
            self.layers[0].bias += 1
        return super().forward(features)


class IsNotOnMeta(HonestConnector):
    def __init__(self, config, **keywords):
        super().__init__(config, **keywords)
        self.scale = nn.Parameter(torch.ones(1, device="cpu"))


@attrs.frozen(kw_only=True)
class TakesNothing(LinearConfig):
    def grid(self, features):
        raise ValueError("takes nothing at all")


@attrs.frozen(kw_only=True)
class CountsWrongly(LinearConfig):
    def num_tokens(self, features):
        return features[0] * features[1] - 1


def caught(kit, made, config, check, **given):
    """Run one check on a component that is not installed."""

    class Case(kit):
        def make(self, **keywords):
            return made(config, **keywords)

        def use(self):
            return ComponentRef(kind=self.kind, name="liar", provider="tests", factory="", config=config)

    getattr(Case(), check)(**given)


@pytest.mark.parametrize(
    ("made", "config", "check", "sentence"),
    [
        (DropsTheLast, LinearConfig(), "test_gives_as_many_tokens_as_it_says", "becomes 16 tokens of width 16, and"),
        (HonestConnector, CountsWrongly(), "test_gives_as_many_tokens_as_it_says", "num_tokens is 15"),
        (HonestConnector, TakesNothing(), "test_takes_one_of_the_grids", "refuses each of 4 × 4"),
        (MixesTiles, LinearConfig(), "test_tiles_do_not_matter_to_each_other", "depend on the tiles beside it"),
        (LooksAtOneFeature, LinearConfig(), "test_gradients_reach_every_parameter", "no gradient reaches the features"),
        (HasAnIdleParameter, LinearConfig(), "test_gradients_reach_every_parameter", "no gradient reaches idle"),
        (ForgetsItsBias, LinearConfig(), "test_init_weights_fills_everything", "leaves connector.layers.0.bias"),
        (UsesAGeneratorOfItsOwn, LinearConfig(), "test_same_seed_same_weights", "must use the generator"),
        (NamesNoBias, LinearConfig(), "test_parameter_roles_cover_every_parameter", "leaves out layers.0.bias"),
        (CountsItsCalls, LinearConfig(), "test_forward_changes_nothing", "forward changed layers.0.bias"),
        (IsNotOnMeta, LinearConfig(), "test_init_weights_fills_everything", "scale: made on another device"),
        (HonestConnector, object(), "test_its_configuration_has_the_base", "does not extend ConnectorConfig"),
    ],
)
def test_a_connector_that_breaks_a_promise_is_caught(made, config, check, sentence):
    with pytest.raises(AssertionError, match=sentence):
        caught(ConnectorConformance, made, config, check)


class LeaksPadding(ConvViT):
    def forward(self, pixels, sizes=None):
        return super().forward(pixels)


class GivesTuples(ConvViT):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([TupleLayer(config)])

    def forward(self, pixels, sizes=None):
        return self.layers[0](torch.zeros(2, 16, 64))[0]


class TupleLayer(EncoderLayer):
    def forward(self, hidden, visible=None):
        return (hidden,)


class HasItsOwnGrid(ConvViT):
    def __init__(self, config):
        super().__init__(ConvViTConfig())


class NamesNoSuchUnit(ConvViT):
    def units(self):
        return ["blocks.0"]


class NamesAnIdleUnit(ConvViT):
    def units(self):
        return ["layers"]


class GivesFp32(ConvViT):
    def forward(self, pixels, sizes=None):
        return super().forward(pixels, sizes).float()


@attrs.frozen(kw_only=True)
class ClaimsAFinerGrid(ConvViTConfig):
    def grid(self, height, width):
        return height // 4, width // 4


@attrs.frozen(kw_only=True)
class TakesAll(ConvViTConfig):
    def grid(self, height, width):
        return height // self.patch, width // self.patch


@attrs.frozen(kw_only=True)
class SaysThatItTakesNoPadding(ConvViTConfig):
    @property
    def takes_padding(self):
        return False


@pytest.mark.parametrize(
    ("made", "config", "check", "given", "sentence"),
    [
        (HasItsOwnGrid, ClaimsAFinerGrid(), "test_gives_the_grid_that_it_says", {}, "says 8 × 8 features of width 64"),
        (ConvViT, TakesAll(), "test_refuses_tiles_that_it_cannot_take", {}, "DID NOT RAISE"),
        (LeaksPadding, ConvViTConfig(), "test_padding_does_not_leak", {}, "changes the features of its picture"),
        (ConvViT, SaysThatItTakesNoPadding(), "test_padding_does_not_leak", {}, "DID NOT RAISE"),
        (GivesFp32, ConvViTConfig(), "test_gives_the_dtype_of_its_weights", {"dtype": torch.bfloat16}, "the weights"),
        (
            GivesTuples,
            ConvViTConfig(n_layers=1),
            "test_units_are_layers_from_hidden_states_to_hidden_states",
            {},
            "must give hidden states, got tuple",
        ),
        (
            NamesNoSuchUnit,
            ConvViTConfig(),
            "test_units_are_layers_from_hidden_states_to_hidden_states",
            {},
            "'blocks.0', which is not a module",
        ),
        (
            NamesAnIdleUnit,
            ConvViTConfig(),
            "test_units_are_layers_from_hidden_states_to_hidden_states",
            {},
            "forward does not call the unit layers",
        ),
    ],
)
def test_an_encoder_that_breaks_a_promise_is_caught(made, config, check, given, sentence):
    with pytest.raises((AssertionError, pytest.fail.Exception), match=sentence):
        caught(VisionEncoderConformance, lambda config: made(config), config, check, **given)
