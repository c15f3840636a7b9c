"""What this package registers."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.api import Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_optimizers() -> Iterator[Component]:
    """Optimizers."""
    yield Component(
        name="adamw",
        summary="AdamW with decoupled weight decay, one fused kernel; decays matrices only",
        factory="forge_plugins_optim.adamw:adamw",
        config="forge_plugins_optim.config:AdamWConfig",
    )
    yield Component(
        name="grouped",
        summary="one optimizer on some parameters and another on the rest, by role or name",
        factory="forge_plugins_optim.grouped:Grouped",
        config="forge_plugins_optim.config:GroupedConfig",
    )
    yield Component(
        name="lion",
        summary="Lion: steps of one length against the sign of a momentum, which is all its state",
        factory="forge_plugins_optim.lion:Lion",
        config="forge_plugins_optim.config:LionConfig",
    )
    yield Component(
        name="muon",
        summary="Muon: momentum made orthogonal, for matrices and experts; 'grouped' gives the rest another",
        factory="forge_plugins_optim.muon:Muon",
        config="forge_plugins_optim.config:MuonConfig",
    )
    yield Component(
        name="sgd",
        summary="gradient descent with momentum, Nesterov's if wanted, and weight decay of either kind",
        factory="forge_plugins_optim.sgd:SGD",
        config="forge_plugins_optim.config:SGDConfig",
    )


@hookimpl
def forge_schedulers() -> Iterator[Component]:
    """Learning-rate schedules."""
    yield Component(
        name="constant",
        summary="the base learning rate throughout, after a linear warm-up",
        factory="forge_plugins_optim.constant:constant",
        config="forge_plugins_optim.config:ConstantConfig",
    )
    yield Component(
        name="cosine",
        summary="half a cosine from the base learning rate down to a fraction of it, after a linear warm-up",
        factory="forge_plugins_optim.cosine:cosine",
        config="forge_plugins_optim.config:CosineConfig",
    )


@hookimpl
def forge_losses() -> Iterator[Component]:
    """Losses."""
    yield Component(
        name="cross_entropy",
        summary="next-token cross-entropy in fp32, on the full logits",
        factory="forge_plugins_optim.cross_entropy:cross_entropy",
        config="forge_plugins_optim.config:CrossEntropyConfig",
    )
    yield Component(
        name="chunked_cross_entropy",
        summary="the same cross-entropy with the head in chunks of tokens, so that the full logits never exist",
        factory="forge_plugins_optim.chunked_cross_entropy:chunked_cross_entropy",
        config="forge_plugins_optim.config:ChunkedCrossEntropyConfig",
    )
