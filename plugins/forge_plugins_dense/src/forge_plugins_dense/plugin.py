"""What this package registers. Imported by every command, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.api import Component, Kind, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_kinds() -> Iterator[Kind]:
    yield Kind(
        name="activation",
        hook="forge_activations",
        summary="the function between the products of a feed-forward layer, feature by feature",
        contract="forge_plugins_dense.activation:Activation",
        optional=("activation_limit", "activation_slope"),
    )
    yield Kind(
        name="norm",
        hook="forge_norms",
        summary="a decoder's norm: what its layers read of the residual stream, position by position",
        contract="forge_plugins_dense.norm:Norm",
    )
    yield Kind(
        name="predictor",
        hook="forge_predictors",
        summary="a further block of a decoder, which predicts a token beyond the next",
        contract="forge_plugins_dense.predictor:Predictor",
    )
    yield Kind(
        name="sequence_mixer",
        hook="forge_sequence_mixers",
        summary="the half of a decoder's block that works between positions: attention, or a layer in its place",
        contract="forge_plugins_dense.mixer:SequenceMixer",
    )


@hookimpl
def forge_models() -> Iterator[Component]:
    yield Component(
        name="transformer",
        summary="decoder: attention and a feed-forward layer of your choice, of Llama's, Gemma's or GPT's kind",
        factory="forge_plugins_dense.transformer:Transformer",
        config="forge_plugins_dense.config:TransformerConfig",
    )


@hookimpl
def forge_sequence_mixers() -> Iterator[Component]:
    yield Component(
        name="attention",
        summary="grouped-query attention, as the decoder's own keys describe it",
        factory="forge_plugins_dense.mixer:attention",
        config="forge_plugins_dense.mixer_config:AttentionMixerConfig",
    )
    yield Component(
        name="latent",
        summary="multi-head latent attention (DeepSeek): keys and values of all heads from one narrow vector",
        factory="forge_plugins_dense.mixer:latent",
        config="forge_plugins_dense.latent_config:LatentAttentionConfig",
    )


@hookimpl
def forge_feed_forwards() -> Iterator[Component]:
    yield Component(
        name="mlp",
        summary="SwiGLU and other gated layers, or a two-matrix MLP, with or without biases",
        factory="forge_plugins_dense.feed_forward:MLP",
        config="forge_plugins_dense.feed_forward_config:MLPConfig",
    )


@hookimpl
def forge_activations() -> Iterator[Component]:
    for name, gated, summary in (
        ("silu", "Gated", "x · σ(x), by default with a gate: SwiGLU (Llama)"),
        ("gelu", "", "GELU, exact"),
        ("gelu_tanh", "", "GELU by its approximation with tanh (GPT-2, Gemma)"),
        ("relu", "", "ReLU"),
        ("relu2", "", "squared ReLU (Primer, Nemotron)"),
        ("clamped_swiglu", "Gated", "SwiGLU within limits, with keys of the layer (gpt-oss)"),
    ):
        yield Component(
            name=name,
            summary=summary,
            factory=f"forge_plugins_dense.activation:{name}",
            config=f"forge_plugins_dense.activation_config:{gated}ActivationConfig",
        )


@hookimpl
def forge_norms() -> Iterator[Component]:
    for name, summary in (
        ("rmsnorm", "RMSNorm, with a weight and no bias (Llama)"),
        ("layernorm", "LayerNorm, with a weight and a bias (GPT-2)"),
        ("zero_centered_rmsnorm", "RMSNorm that multiplies by 1 plus its weight (Gemma)"),
    ):
        yield Component(
            name=name,
            summary=summary,
            factory=f"forge_plugins_dense.norm:{name}",
            config="forge_plugins_dense.norm_config:NormConfig",
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
    for name, summary, factory in (
        ("llama", "Llama and Qwen3 as Hugging Face has them", "weight_layouts:LlamaLayout"),
        ("mistral", "Mistral", "weight_layouts:MistralLayout"),
        ("ministral", "Ministral 8B", "weight_layouts:MinistralLayout"),
        ("arcee", "Arcee's AFM", "weight_layouts:ArceeLayout"),
        ("seed_oss", "Seed-OSS", "weight_layouts:SeedOssLayout"),
        ("qwen2", "Qwen2 and Qwen2.5", "weight_layouts:Qwen2Layout"),
        ("olmo2", "OLMo 2", "output_norm_layouts:Olmo2Layout"),
        ("olmo3", "OLMo 3", "output_norm_layouts:Olmo3Layout"),
        ("exaone4", "EXAONE 4", "output_norm_layouts:Exaone4Layout"),
        ("smollm3", "SmolLM3", "weight_layouts:SmolLM3Layout"),
        ("granite", "Granite 3", "weight_layouts:GraniteLayout"),
        ("phi3", "Phi-3 and Phi-4", "weight_layouts:Phi3Layout"),
        ("gemma1", "Gemma 1", "gemma_layouts:Gemma1Layout"),
        ("gemma2", "Gemma 2", "gemma_layouts:Gemma2Layout"),
        ("gemma3", "Gemma 3, for text", "gemma_layouts:Gemma3Layout"),
        ("starcoder2", "StarCoder2", "layer_norm_layouts:Starcoder2Layout"),
        ("stablelm", "StableLM", "layer_norm_layouts:StableLmLayout"),
        ("gpt2", "GPT-2", "gpt_layouts:GPT2Layout"),
        ("gpt_neox", "GPT-NeoX and Pythia", "gpt_layouts:GPTNeoXLayout"),
    ):
        yield Component(
            name=name,
            summary=summary,
            factory=f"forge_plugins_dense.{factory}",
            config="forge_plugins_hf.layout_config:LayoutConfig",
        )
