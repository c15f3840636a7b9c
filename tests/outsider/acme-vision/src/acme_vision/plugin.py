"""What this package registers."""

from forge_core.api import Component, hookimpl

FORGE_API = "1.1"


@hookimpl
def forge_vision_encoders():
    yield Component(
        name="patch_mixer",
        summary="patches that are mixed by two matrices a layer, without attention",
        factory="acme_vision.patch_mixer:PatchMixer",
        config="acme_vision.config:PatchMixerConfig",
    )


@hookimpl
def forge_connectors():
    yield Component(
        name="row_pool",
        summary="the mean of each row of features",
        factory="acme_vision.row_pool:RowPool",
        config="acme_vision.config:RowPoolConfig",
    )


@hookimpl
def forge_fusions():
    yield Component(
        name="gated_prefix",
        summary="images as further keys of the decoder's own attention, behind a gate of each head",
        factory="acme_vision.gated_prefix:GatedPrefix",
        config="acme_vision.config:GatedPrefixConfig",
    )


@hookimpl
def forge_image_processors():
    yield Component(
        name="halves",
        summary="a picture as two tiles: its left or upper half, and the other one",
        factory="acme_vision.halves:Halves",
        config="acme_vision.config:HalvesConfig",
    )
