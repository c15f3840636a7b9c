"""What the tests of this distribution share: components built without a configuration file."""

import importlib

import pytest

from forge_core.contracts.component_ref import ComponentRef
from forge_plugins_data.plugin import forge_data_sources, forge_tokenizers
from forge_plugins_data.tokenizer_config import BytesConfig, TokenizerFileConfig

COMPONENTS = {component.name: component for component in [*forge_data_sources(), *forge_tokenizers()]}
CONFIGS = {"bytes": BytesConfig, "tokenizer_file": TokenizerFileConfig}


class SmallBuilder:
    """The part of the ``Builder`` contract that sources use, for the tokenizers of this distribution."""

    def __call__(self, use, /, **given):
        module, _, name = use.factory.partition(":")
        return getattr(importlib.import_module(module), name)(use.config, **given)

    def resolve(self, kind, table):
        assert kind == "tokenizer"
        keys = {"name": table} if isinstance(table, str) else dict(table)
        name = keys.pop("name").removeprefix("forge-plugins-data:")
        return ComponentRef(
            kind=kind,
            name=name,
            provider="forge-plugins-data",
            factory=COMPONENTS[name].factory,
            config=CONFIGS[name](**keys),
        )


@pytest.fixture
def build():
    return SmallBuilder()


@pytest.fixture
def use_tokenizer(build):
    """``use_tokenizer("bytes")``, ``use_tokenizer("tokenizer_file", path=…)``."""
    return lambda name, **keys: build.resolve("tokenizer", {"name": name, **keys})
