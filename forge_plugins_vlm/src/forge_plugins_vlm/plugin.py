"""What this package registers. Every forge command imports this file: keep it free of torch."""

from collections.abc import Iterable

from forge_core.api import Command, Component, Kind, hookimpl

FORGE_API = "1.1"


@hookimpl
def forge_kinds() -> Iterable[Kind]:
    """What a vision-language model is made of."""
    contracts = "forge_plugins_vlm.contracts"
    yield Kind(
        name="vision_encoder",
        hook="forge_vision_encoders",
        summary="from pixels to features",
        contract=f"{contracts}.vision_encoder:VisionEncoderFactory",
    )
    yield Kind(
        name="connector",
        hook="forge_connectors",
        summary="from features of images to tokens of the decoder's width",
        contract=f"{contracts}.connector:ConnectorFactory",
    )
    yield Kind(
        name="fusion",
        hook="forge_fusions",
        summary="how a decoder reads images",
        contract=f"{contracts}.fusion:FusionFactory",
    )
    yield Kind(
        name="image_processor",
        hook="forge_image_processors",
        summary="from a picture to tiles of pixels",
        contract=f"{contracts}.image_processor:ImageProcessorFactory",
    )


@hookimpl
def forge_models() -> Iterable[Component]:
    """A decoder that reads images."""
    yield Component(
        name="vision_language",
        summary="a decoder that reads images among text, by a fusion of your choice",
        factory="forge_plugins_vlm.model:VisionLanguageModel",
        config="forge_plugins_vlm.config:VisionLanguageConfig",
    )


@hookimpl
def forge_vision_encoders() -> Iterable[Component]:
    """From pixels to features."""
    encoders = "forge_plugins_vlm.encoders"
    yield Component(
        name="conv_vit",
        summary="a small vision transformer behind convolutions, to be trained from nothing",
        factory=f"{encoders}.conv_vit:ConvViT",
        config=f"{encoders}.conv_vit_config:ConvViTConfig",
    )
    yield Component(
        name="clip",
        summary="the vision tower of CLIP, of a folder or with random weights",
        factory=f"{encoders}.transformers_encoder:ClipEncoder",
        config=f"{encoders}.transformers_config:ClipConfig",
    )
    yield Component(
        name="dinov2",
        summary="DINOv2, of a folder or with random weights",
        factory=f"{encoders}.transformers_encoder:Dinov2Encoder",
        config=f"{encoders}.transformers_config:Dinov2Config",
    )
    yield Component(
        name="mllama",
        summary="the vision tower of Llama 3.2 Vision",
        factory=f"{encoders}.mllama:MllamaEncoder",
        config=f"{encoders}.mllama_config:MllamaConfig",
    )
    yield Component(
        name="siglip",
        summary="SigLIP, of a folder or with random weights",
        factory=f"{encoders}.transformers_encoder:SiglipEncoder",
        config=f"{encoders}.transformers_config:SiglipConfig",
    )
    yield Component(
        name="siglip2",
        summary="SigLIP 2 for pictures of one size",
        factory=f"{encoders}.transformers_encoder:SiglipEncoder",
        config=f"{encoders}.transformers_config:Siglip2Config",
    )
    yield Component(
        name="siglip2_naflex",
        summary="SigLIP 2 for pictures of any size and aspect",
        factory=f"{encoders}.naflex:NaFlexEncoder",
        config=f"{encoders}.transformers_config:NaFlexConfig",
    )
    yield Component(
        name="concatenated",
        summary="several encoders, their features side by side (Prismatic)",
        factory=f"{encoders}.concatenated:Concatenated",
        config=f"{encoders}.concatenated_config:ConcatenatedConfig",
    )


@hookimpl
def forge_connectors() -> Iterable[Component]:
    """From features to tokens of the decoder's width."""
    connectors = "forge_plugins_vlm.connectors"
    yield Component(
        name="linear",
        summary="one matrix (LLaVA)",
        factory=f"{connectors}.linear:LinearConnector",
        config=f"{connectors}.linear_config:LinearConfig",
    )
    yield Component(
        name="mlp",
        summary="matrices with GELU between them (LLaVA-1.5)",
        factory=f"{connectors}.linear:MLPConnector",
        config=f"{connectors}.linear_config:MLPConnectorConfig",
    )
    yield Component(
        name="fused_mlp",
        summary="matrices by way of four times the encoder's width (Prismatic)",
        factory=f"{connectors}.linear:FusedMLP",
        config=f"{connectors}.linear_config:FusedMLPConfig",
    )
    yield Component(
        name="average_pool",
        summary="the mean of a window of features",
        factory=f"{connectors}.pooling:AveragePool",
        config=f"{connectors}.pooling_config:AveragePoolConfig",
    )
    yield Component(
        name="attention_pool",
        summary="attention of a window's mean to its features (Molmo)",
        factory=f"{connectors}.pooling:AttentionPool",
        config=f"{connectors}.pooling_config:AttentionPoolConfig",
    )
    yield Component(
        name="pixel_shuffle",
        summary="the features of a square side by side (Idefics3, nanoVLM)",
        factory=f"{connectors}.pooling:PixelShuffle",
        config=f"{connectors}.pooling_config:PixelShuffleConfig",
    )
    yield Component(
        name="resampler",
        summary="a fixed number of learned queries (Flamingo)",
        factory=f"{connectors}.resampler:Resampler",
        config=f"{connectors}.resampler_config:ResamplerConfig",
    )


@hookimpl
def forge_fusions() -> Iterable[Component]:
    """How a decoder reads images."""
    fusions = {
        "cross_attention": ("layers that look at images, as in Flamingo and Llama 3.2", "CrossAttention"),
        "joint_decoder": ("image tokens among those of text, as in LLaVA", "JointDecoder"),
        "mixture_of_transformers": ("weights for each modality, attention over both", "MixtureOfTransformers"),
        "moma": ("feed-forward layers for each modality, such as experts", "MoMa"),
    }
    for name, (summary, factory) in fusions.items():
        own = factory + "Fusion" * (name == "cross_attention")
        yield Component(
            name=name,
            summary=summary,
            factory=f"forge_plugins_vlm.fusions.{name}:{own}",
            config=f"forge_plugins_vlm.fusions.config:{factory}Config",
        )


@hookimpl
def forge_image_processors() -> Iterable[Component]:
    """From pictures to tiles."""
    processors = {
        "anyres": ("a picture as one tile, and again on the best of several grids of tiles (LLaVA-NeXT)", "Anyres"),
        "naflex": ("a picture in its own shape, padded, of so many patches at most (SigLIP 2)", "Naflex"),
        "square": ("a picture as one square tile: stretched, cropped or padded", "Square"),
        "tiles": ("a picture cut into tiles, and the whole of it as one (Idefics 3, nanoVLM)", "Tiles"),
    }
    for name, (summary, noun) in processors.items():
        yield Component(
            name=name,
            summary=summary,
            factory=f"forge_plugins_vlm.images.{name}:{noun}",
            config=f"forge_plugins_vlm.images.config:{noun}Config",
        )


@hookimpl
def forge_evaluations() -> Iterable[Component]:
    """Answers about images."""
    yield Component(
        name="image_answers",
        summary="answers about images by the likeliest tokens, against those of the data",
        factory="forge_plugins_vlm.evaluation.image_answers:ImageAnswers",
        config="forge_plugins_vlm.evaluation.config:ImageAnswersConfig",
    )
    yield Component(
        name="image_choices",
        summary="multiple choice about images by log-likelihood",
        factory="forge_plugins_vlm.evaluation.image_choices:ImageChoices",
        config="forge_plugins_vlm.evaluation.config:ImageChoicesConfig",
    )
    yield Component(
        name="image_dependence",
        summary="the same with real, shuffled and blank images: whether the model looks at them",
        factory="forge_plugins_vlm.evaluation.image_answers:ImageDependence",
        config="forge_plugins_vlm.evaluation.config:ImageDependenceConfig",
    )


@hookimpl
def forge_data_sources() -> Iterable[Component]:
    """Images among text."""
    yield Component(
        name="image_text",
        summary="images and videos among text, of which the answers are learned: LLaVA, WebDataset, Parquet, folders",
        factory="forge_plugins_vlm.data.source:open_image_text",
        config="forge_plugins_vlm.data.config:ImageTextConfig",
    )
    yield Component(
        name="image_text_streaming",
        summary="images among text of a data set of Hugging Face, read and tokenised while the run goes on",
        factory="forge_plugins_vlm.data.streams:open_image_text_streaming",
        config="forge_plugins_vlm.data.streaming_config:ImageTextStreamingConfig",
    )


@hookimpl(optionalhook=True)
def forge_weight_layouts() -> Iterable[Component]:
    """For ``forge convert``."""
    layouts = {
        "idefics3": ("Idefics3 and the first SmolVLM as Hugging Face has them", "idefics3:Idefics3Layout"),
        "llava": ("LLaVA 1.5", "llava:LlavaLayout"),
        "llava_next": ("LLaVA-NeXT (LLaVA 1.6)", "llava:LlavaNextLayout"),
        "mllama": ("Llama 3.2 Vision", "mllama:MllamaLayout"),
        "smolvlm": ("SmolVLM 2", "idefics3:SmolVLMLayout"),
    }
    for name, (summary, factory) in layouts.items():
        yield Component(
            name=name,
            summary=summary,
            factory=f"forge_plugins_vlm.layouts.{factory}",
            config="forge_plugins_hf.layout_config:LayoutConfig",
        )


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge vlm``."""
    yield Command(
        name="vlm",
        summary="draw image tasks, look at what a step sees, caption images",
        run="forge_plugins_vlm.commands:vlm",
    )
