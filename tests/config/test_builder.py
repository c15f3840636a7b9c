"""Building what a job chooses."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest

from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError, PluginError


def plain_factory(config, /, *, dim):
    return SimpleNamespace(config=config, dim=dim)


def nesting_factory(config, /, *, dim, build):
    return SimpleNamespace(build=build)


def older_source(config, /, *, seq_len, split):
    return SimpleNamespace(seed="not given")


class AnyFactory:
    def __init__(self, config, /, **given) -> None:
        self.given = given


@pytest.fixture
def build(catalog) -> ComponentBuilder:
    return ComponentBuilder(catalog)


def failing_factory(config, /):
    raise KeyError("x")


def nothing(config, /, *, dim):
    return None


def talkative(config, /):
    print("built")
    return config


def use(build, factory: str, kind: str = "parallel_pass"):
    """Of a kind whose objects may be of any class, unless another is asked for."""
    return attrs.evolve(build.resolve("optimizer", {"name": "muon", "lr": 1}), factory=factory, kind=kind)


def test_a_factory_gets_its_config_and_what_it_is_given(build):
    made = build(use(build, f"{__name__}:plain_factory"), dim=3)

    assert made.config.lr == 1.0
    assert made.dim == 3


def test_an_optional_keyword_of_a_kind_is_given_to_factories_that_take_it(build):
    given = {"seq_len": 8, "split": "train", "seed": 3, "samples_per_step": 4}

    assert build(use(build, f"{__name__}:AnyFactory", "data_source"), **given).given == {**given, "build": build}
    assert build(use(build, f"{__name__}:older_source", "data_source"), **given).seed == "not given"
    with pytest.raises(PluginError, match="unexpected keyword argument 'pace'"):
        build(use(build, f"{__name__}:older_source", "data_source"), **given, pace=1)


def test_the_builder_is_passed_on_to_those_that_ask_for_it(build):
    assert build(use(build, f"{__name__}:nesting_factory"), dim=3).build is build
    assert build(use(build, f"{__name__}:AnyFactory")).given == {"build": build}


def test_what_is_offered_goes_to_those_that_take_it(build):
    given = {"seq_len": 8, "split": "train", "phases": ()}

    assert build(use(build, f"{__name__}:AnyFactory", "data_source"), **given).given["phases"] == ()
    assert build(use(build, f"{__name__}:older_source", "data_source"), **given).seed == "not given"


def test_an_import_that_fails_names_the_distribution(build):
    with pytest.raises(
        PluginError, match=r"acme-routers: cannot import the factory of parallel pass 'muon' .* bug in acme"
    ):
        build(use(build, "no_such_module:factory"))


@pytest.mark.parametrize(
    ("factory", "kind", "sentence"),
    [
        ("nothing", "parallel_pass", "None, and must return what forge_core.contracts.parallel_pass describes"),
        ("plain_factory", "optimizer", "a SimpleNamespace, and must return a torch.optim.Optimizer"),
    ],
)
def test_a_factory_that_returns_something_else_is_named_with_what_was_expected(build, factory, kind, sentence):
    with pytest.raises(PluginError) as caught:
        build(use(build, f"{__name__}:{factory}", kind), dim=3)
    words = f"{kind.replace('_', ' ')} 'muon' of acme-routers 2.0"
    said = f"{words}: its factory '{__name__}:{factory}' returned {sentence}. This is a bug in acme-routers."
    assert str(caught.value) == said


def test_a_factory_of_another_signature_is_named_with_what_it_is_given(build):
    with pytest.raises(PluginError, match=r"called with a config and width: missing .* 'dim'\. This is a bug"):
        build(use(build, f"{__name__}:plain_factory"), width=3)


def test_what_a_factory_prints_goes_to_the_error_stream_with_its_plugin(build, capsys):
    build(use(build, f"{__name__}:talkative"))
    assert capsys.readouterr() == ("", "acme-routers: built\n")


def test_a_factory_that_fails_is_named(build):
    with pytest.raises(KeyError) as caught:
        build(use(build, f"{__name__}:failing_factory"))
    assert caught.value.__notes__ == ["raised by the factory of parallel pass 'muon' of acme-routers 2.0"]


def test_names_and_tables_from_elsewhere_are_resolved(build):
    assert build.resolve("router", "hash").qualified_name == "forge-moe:hash"
    assert build.resolve("router", {"name": "acme-routers:topk", "k": 3}).config.k == 3


def test_what_cannot_be_resolved_is_told_as_in_a_configuration(build):
    with pytest.raises(ConfigError) as caught:
        build.resolve("router", {"name": "acme-routers:topk", "k": 0, "nois": 1})
    assert str(caught.value) == "router.nois: unknown key; did you mean 'noise'?"

    with pytest.raises(ConfigError, match=r"^router: no installed plugin provides a router named 'hsh'"):
        build.resolve("router", "hsh")
