"""The choice of an activation: ours by name, and one of another package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.activations
from torch import nn

from forge_core.config.builder import ComponentBuilder
from forge_core.config.problems import ConfigProblems
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError, PluginError
from forge_core.job import plain
from forge_core.registry.discovery import discover
from forge_core.registry.plugin_files import trust, with_files
from forge_plugins_dense.activation import FUNCTIONS
from forge_plugins_dense.activation_config import OWN, ActivationConfig, as_activation
from forge_plugins_dense.config import MLPConfig
from forge_plugins_dense.feed_forward import MLP
from forge_plugins_dense.huggingface import activation_to_hf

PAGE = Path(__file__).parents[3] / "docs" / "hooks" / "forge_activations.md"
THEIRS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}


class GateConfig(ActivationConfig):
    gated_by_default = True


def gate(_: object) -> nn.Module:
    """A module without parameters, and a class of keys that has a gate."""
    return nn.Sigmoid()


def learned(_: object) -> nn.Module:
    return nn.PReLU()


def of_acme(name: str, config: Any = None) -> ComponentRef:
    return ComponentRef(
        kind="activation", name=name, provider="acme", factory=f"{__name__}:{name}", config=config or ActivationConfig()
    )


@pytest.fixture(scope="module")
def resolve():
    (text,) = re.findall(r":caption: src/swish/activation.py\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    decorated = text.replace("def swish", '@component("activation", summary="of the page")\ndef swish')
    trust(plugin := "from forge_core.api import component\n" + decorated)
    builder = ComponentBuilder(with_files(discover(), {"swish.py": plugin}))

    def resolved(**keys: Any) -> Any:
        use = builder.resolve("feed_forward", {"name": "mlp", "hidden_dim": 24, **keys})
        return use.config, builder

    return resolved


@pytest.mark.parametrize("name", OWN)
def test_a_name_is_short_for_the_component(resolve, name):
    config, _ = resolve(activation=name)

    assert config.activation == as_activation(name) == MLPConfig(activation=name).activation
    assert plain(config)["activation"] == {"name": f"forge-plugins-dense:{name}"}
    assert resolve(**plain(config))[0] == config
    assert config.is_gated is (name in ("silu", "clamped_swiglu"))


def test_without_an_activation_it_is_silu(resolve):
    assert resolve()[0] == resolve(activation="silu")[0] == MLPConfig(hidden_dim=24)


def test_a_wrong_activation_is_told(resolve):
    with pytest.raises(ConfigProblems, match=r"named 'relu3'\. Did you mean 'relu'\?"):
        resolve(activation="relu3")
    with pytest.raises(ConfigProblems, match="unknown key"):
        resolve(activation={"name": "silu", "beta": 2.0})
    with pytest.raises(ValueError, match="'relu3' is none of silu, gelu, gelu_tanh, relu, relu2, clamped_swiglu"):
        MLPConfig(activation="relu3")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ours_are_those_of_transformers_by_their_names(name):
    features = torch.linspace(-5, 5, 101, dtype=torch.float64)

    assert activation_to_hf(MLPConfig(activation=name)) == THEIRS[name]
    torch.testing.assert_close(FUNCTIONS[name](features), transformers.activations.ACT2FN[THEIRS[name]](features))


def test_an_activation_of_another_package_has_no_form_elsewhere():
    """Also if it has the name of one of ours."""
    with pytest.raises(ConfigError, match='activation = "silu" has no Hugging Face form in a dense layer'):
        activation_to_hf(MLPConfig(activation=of_acme("silu")))


@pytest.mark.parametrize("gated", [True, False])
def test_a_layer_with_the_activation_of_the_page_is_its_formula(resolve, gated):
    config, builder = resolve(activation={"name": "swish", "beta": 0.5}, gated=gated)
    torch.manual_seed(0)
    layer, x = MLP(config, dim=8, build=builder).double(), torch.randn(2, 3, 8, dtype=torch.float64)

    inner = (layer.gate if gated else layer.up)(x)
    swish = inner / (1 + torch.exp(-0.5 * inner))
    torch.testing.assert_close(layer(x), layer.down(swish * layer.up(x) if gated else swish))


def test_a_class_of_keys_says_whether_there_is_a_gate(build):
    plainly = MLPConfig(hidden_dim=8, activation=of_acme("gate"))
    gated = MLPConfig(hidden_dim=8, activation=of_acme("gate", GateConfig()))

    assert (plainly.is_gated, gated.is_gated) == (False, True)
    layer, x = MLP(gated, dim=4, build=build), torch.randn(2, 3, 4)
    torch.testing.assert_close(layer(x), layer.down(layer.gate(x).sigmoid() * layer.up(x)))
    assert {name for name, _ in layer.named_parameters()} == {"gate.weight", "up.weight", "down.weight"}


def test_parameters_of_an_activation_are_refused(build):
    with pytest.raises(PluginError, match="the activation acme:learned has 'weight'; activations have no parameters"):
        MLP(MLPConfig(hidden_dim=8, activation=of_acme("learned")), dim=4, build=build)
