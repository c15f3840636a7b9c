"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, Component, Kind, hookimpl

FORGE_API = "1.2"


@hookimpl
def forge_callbacks() -> Iterable[Component]:
    """What happens beside training."""
    yield Component(
        name="export",
        summary="writes checkpoints as folders for transformers, too",
        factory="forge_plugins_hf.export:Export",
        config="forge_plugins_hf.export_config:ExportConfig",
    )


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge convert``."""
    yield Command(
        name="convert",
        summary="make a checkpoint of a model of Hugging Face, or the reverse",
        run="forge_plugins_hf.command:convert",
    )


@hookimpl
def forge_kinds() -> Iterable[Kind]:
    """How a model's weights are laid out in files of others."""
    contract = "forge_plugins_hf.weight_layout:WeightLayout"
    yield Kind(
        name="weight_layout",
        hook="forge_weight_layouts",
        summary="configuration and weights of a published architecture, both ways",
        contract=contract,
        returns=contract,
    )


@hookimpl
def forge_weight_sources() -> Iterable[Component]:
    """For ``[checkpoint.load] path``."""
    yield Component(
        name="huggingface",
        summary="a model as downloaded from Hugging Face: config.json and safetensors",
        factory="forge_plugins_hf.weight_source:HuggingFaceFolder",
        config="forge_plugins_hf.layout_config:LayoutConfig",
    )


@hookimpl
def forge_evaluations() -> Iterable[Component]:
    """Tasks that everybody uses."""
    yield Component(
        name="lm_eval",
        summary="tasks of EleutherAI's lm-evaluation-harness, and of one's own in its format",
        factory="forge_plugins_hf.harness:Harness",
        config="forge_plugins_hf.harness_config:HarnessConfig",
        modules=("lm_eval", "transformers", "forge_plugins_inference"),
    )
    yield Component(
        name="lmms_eval",
        summary="tasks about images of lmms-eval, and of one's own in its format",
        factory="forge_plugins_hf.lmms:Lmms",
        config="forge_plugins_hf.lmms_config:LmmsConfig",
        modules=("lmms_eval", "forge_plugins_vlm"),
    )
