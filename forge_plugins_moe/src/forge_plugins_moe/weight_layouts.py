"""The weight layouts of sparse decoders, for forge-plugins-hf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from forge_plugins_dense.config import TransformerConfig
from forge_plugins_hf.weight_layout import Recipe, WeightLayout, stack_of
from forge_plugins_moe import huggingface

if TYPE_CHECKING:
    import torch


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
        return {name: _read_in_part(one.reads, one.make) for name, one in made.items()}

    def to_huggingface(self, config: TransformerConfig) -> Mapping[str, Recipe]:
        from forge_plugins_moe import huggingface_weights

        return {name: Recipe(one.reads, one.make) for name, one in huggingface_weights.how_to_write(config).items()}


def _read_in_part(reads: tuple[str, ...], make: Callable[..., torch.Tensor]) -> Recipe:
    """A recipe that tells a rank when a part of a tensor, or some of the experts, are enough."""
    from forge_plugins_moe.huggingface_weights import Rows, as_it_is, stacked

    if make is as_it_is:
        return Recipe(reads)
    if make is stacked:
        return stack_of(reads)
    return Recipe(reads, make, partial(make.part, name=reads[0]) if isinstance(make, Rows) else None)
