"""Downloaded models as what a run begins with: ``[checkpoint.load] path``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.weight_source import WeightSource
from forge_core.errors import ConfigError, and_more
from forge_core.registry.catalog import Catalog
from forge_plugins_hf.config_json import INCLUDE, ReadKeys, read_config
from forge_plugins_hf.model_folder import layout_in, recipes_in, table_of, weights_in
from forge_plugins_hf.shards import Shards, on_meta
from forge_plugins_hf.weight_layout import Recipe, WeightLayout


class HuggingFaceFolder(WeightSource):
    """A folder as downloaded: ``config.json`` and safetensors."""

    def __init__(self, config: object, /) -> None: ...

    def recognises(self, path: Path) -> bool:
        return (path / "config.json").is_file() and not (path / "manifest.json").exists()

    def open(self, path: Path, model: ComponentRef, catalog: Catalog, say: Callable[[str], None]) -> FolderWeights:
        config = ReadKeys(read_config(path))
        layout = layout_in(config, path, catalog, say)
        table = table_of(layout, config, path, say)
        theirs = ComponentBuilder(catalog).resolve("model", table)
        if theirs.qualified_name != model.qualified_name:
            raise ConfigError(f"{path} holds a model {theirs.name!r}, and model.name is {model.name!r}")
        for line in _differences(layout, theirs.config, model.config, table["vocab_size"]):
            command = f"forge convert {path} --to forge --out OUT --config-only"
            say(f"note: {path} differs from [model]: {line}. {command} writes the [model] of the folder")
        shards = weights_in(path, config, layout, torch.float32, say)
        if INCLUDE not in config:
            return FolderWeights(shards, recipes_in(path, layout, theirs.config, shards))
        whole = layout.to_forge(theirs.config, layout.to_huggingface(theirs.config).keys())
        there = set(shards.names)
        return FolderWeights(shards, {name: one for name, one in whole.items() if there.issuperset(one.reads)})


@attrs.frozen
class FolderWeights:
    """The tensors of a folder, by the names of our model."""

    shards: Shards
    recipes: Mapping[str, Recipe]

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Same as ``SourceWeights.shapes``."""
        there = {name: self.shards.shape(name) for recipe in self.recipes.values() for name in recipe.reads}
        return {name: recipe.make(*on_meta(there, recipe.reads)).shape for name, recipe in self.recipes.items()}

    def read(self, name: str, part: Sequence[slice]) -> torch.Tensor:
        """Same as ``SourceWeights.read``. What is only renamed is read in part, and so is what a recipe
        says how to; anything else is read whole, and cut."""
        recipe = self.recipes[name]
        if any(one.start == one.stop for one in part):  # a rank without a part of it
            return torch.empty([one.stop - one.start for one in part])
        if recipe.is_renaming:
            return self.shards.read(recipe.reads[0], part)
        if recipe.read_part is not None:
            return recipe.read_part(self.shards.read, part)
        return recipe.make(*(self.shards.read(one) for one in recipe.reads))[tuple(part)]


def _differences(layout: WeightLayout, theirs: Any, ours: Any, vocab_size: int) -> list[str]:
    """Keys of ``config.json`` that would be written otherwise for our model."""
    try:
        here, there = (layout.config_json(one, vocab_size) for one in (ours, theirs))
    except ConfigError as error:
        return [str(error)]
    keys = sorted(key for key in {*here, *there} - _OF_TRAINING if here.get(key) != there.get(key))
    lines = [f"{key} = {there.get(key)!r} there, {here.get(key)!r} here" for key in keys]
    return [", ".join(lines[:5]) + and_more(len(lines), 5)] if lines else []


_OF_TRAINING = {"initializer_range"}
