"""The weight layouts of sparse decoders, for forge-plugins-hf."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from forge_plugins_dense.config import TransformerConfig
from forge_plugins_hf.weight_layout import Recipe, WeightLayout
from forge_plugins_moe import huggingface


class SparseLayout(WeightLayout):
    """Experts are stacks; those of a file are read one by one, or as transformers 5 packs them."""

    architectures = tuple(one.name for one in huggingface.ARCHITECTURES)

    def __init__(self, config: object, /) -> None: ...

    def model_table(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        return huggingface.config_from_hf(config_json)

    def config_json(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return huggingface.hf_config(config, vocab_size)

    def to_forge(self, config: TransformerConfig, names: Collection[str]) -> Mapping[str, Recipe]:
        from forge_plugins_moe import huggingface_weights  # with torch, which forge validate does without

        made = huggingface_weights.how_to_read(names, config)
        return {name: Recipe(one.reads, one.make) for name, one in made.items()}

    def to_huggingface(self, config: TransformerConfig) -> Mapping[str, Recipe]:
        from forge_plugins_moe import huggingface_weights

        return {name: Recipe(one.reads, one.make) for name, one in huggingface_weights.how_to_write(config).items()}
