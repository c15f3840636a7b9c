"""What this package registers. Every forge command imports this file: keep it free of torch."""

from collections.abc import Iterator

from forge_core.api import Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_data_sources() -> Iterator[Component]:
    """One component: ``mu_law_audio``."""
    yield Component(
        name="mu_law_audio",
        summary="sound as tokens, 256 levels of the mu-law a moment",
        factory="mu_law_audio.data_source:MuLawAudio",
        config="mu_law_audio.config:MuLawAudioConfig",
    )
