"""What this package registers."""

from forge_core.api import Component, hookimpl

FORGE_API = "1.1"


@hookimpl
def forge_sequence_mixers():
    yield Component(
        name="gated_linear",
        summary="linear attention whose state fades by a gate of each head",
        factory="acme_mixers.gated_linear:GatedLinear",
        config="acme_mixers.config:GatedLinearConfig",
    )


@hookimpl(optionalhook=True)
def forge_weight_layouts():
    yield Component(
        name="acme_linear",
        summary="Acme's linear decoder as Hugging Face would have it",
        factory="acme_mixers.layout:LinearLayout",
        config="forge_plugins_hf.layout_config:LayoutConfig",
    )
