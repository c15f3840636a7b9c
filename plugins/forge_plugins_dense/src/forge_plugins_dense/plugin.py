"""What this package registers. Imported by every command, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.api import Component, Kind, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_kinds() -> Iterator[Kind]:
    yield Kind(
        name="predictor",
        hook="forge_predictors",
        summary="a further block of a decoder, which predicts a token beyond the next",
        contract="forge_plugins_dense.predictor:Predictor",
    )


@hookimpl
def forge_models() -> Iterator[Component]:
    yield Component(
        name="transformer",
        summary="pre-norm decoder: RoPE, grouped-query attention, a feed-forward layer of your choice",
        factory="forge_plugins_dense.transformer:Transformer",
        config="forge_plugins_dense.config:TransformerConfig",
    )


@hookimpl
def forge_feed_forwards() -> Iterator[Component]:
    yield Component(
        name="mlp",
        summary="SwiGLU (activation silu) or a two-matrix MLP (gelu, relu), without biases",
        factory="forge_plugins_dense.feed_forward:MLP",
        config="forge_plugins_dense.config:MLPConfig",
    )


@hookimpl
def forge_predictors() -> Iterator[Component]:
    yield Component(
        name="sequential",
        summary="DeepSeek-V3's module: a projection of hidden states and the token ahead, then a block",
        factory="forge_plugins_dense.predictor:SequentialPredictor",
        config="forge_plugins_dense.multi_token_config:SequentialConfig",
    )


@hookimpl(optionalhook=True)
def forge_weight_layouts() -> Iterator[Component]:
    """For ``forge convert``."""
    yield Component(
        name="llama",
        summary="Llama and Qwen3 as Hugging Face has them",
        factory="forge_plugins_dense.weight_layouts:LlamaLayout",
        config="forge_plugins_hf.layout_config:LayoutConfig",
    )
