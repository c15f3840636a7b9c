"""The weight layout of Llama and Qwen3, for forge-plugins-hf."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from forge_plugins_dense import huggingface
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_hf.weight_layout import Recipe, WeightLayout


class LlamaLayout(WeightLayout):
    """Weights have other names, and are the same."""

    architectures = ("LlamaForCausalLM", "Qwen3ForCausalLM")

    def __init__(self, config: object, /) -> None: ...

    def model_table(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        return huggingface.config_from_hf(config_json)

    def config_json(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return huggingface.hf_config(config, vocab_size)

    def to_forge(self, config: TransformerConfig, names: Collection[str]) -> Mapping[str, Recipe]:
        ours = huggingface.from_hf_state({name: name for name in names}, config)
        return {name: Recipe((theirs,)) for name, theirs in ours.items()}

    def to_huggingface(self, config: TransformerConfig) -> Mapping[str, Recipe]:
        names = huggingface.weight_names(config)
        return {theirs: Recipe((ours,)) for ours, theirs in names.items()}
