"""Checks of a model's mixers together, and of keys that they do not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from forge_plugins_dense.mixer_config import ATTENTION_KEYS

if TYPE_CHECKING:
    from forge_core.config.sections import Job
    from forge_plugins_dense.config import TransformerConfig


def idle_keys(model: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Keys of attention that no layer's mixer reads, and a mixer that no layer has."""
    mixers = [layer.mixer for layer in model.built_layers]
    names = ", ".join(dict.fromkeys("attention" if one is None else one.name for one in mixers))
    for one in attrs.fields(type(model)):
        value, default = getattr(model, one.name), one.default
        if one.name == "n_kv_heads":
            value, default = model.kv_heads, model.n_heads
        if one.name in ATTENTION_KEYS and value != default and not model.has_mixer_with(one.name):
            yield one.name, f"has no effect on the mixer {names}, which every layer has; remove it"
    for number, changes in enumerate(model.layers):
        selected = [model.layer(layer).mixer_config for layer in changes.layers(model.n_layers)]
        for key in ("attention_sinks", "rotary_fraction"):
            if getattr(changes, key) and not any(key in mixer.reads for mixer in selected):
                yield f"layers[{number}].{key}", "has no effect on the mixer of these layers; remove it"
    if model.mixer is not None and model.mixer not in mixers:
        yield "mixer", "no layer has it, as layers names others for all of them; remove it"


def heads_that_grow_apart(model: TransformerConfig, job: Job) -> Iterator[tuple[str, str]]:
    """A parametrization scales the logits of attention in all layers by one factor, that of ``head_size``."""
    config: Any = getattr(job.parametrization, "config", None)
    base = getattr(config, "base", None)
    own = ["head_dim" in mixer.reads for mixer in model.mixers]
    if base is None or all(own) or len(own) == 1:
        return
    before = base.get("head_dim", model.head_dim) or base.get("dim", model.dim) // base.get("n_heads", model.n_heads)
    if base.keys() & {"mixer", "layers", "latent_attention"} or (any(own) and before != model.head_size):
        reason = "so that no one factor on the logits of attention fits all layers"
        yield "mixer", f"parametrization.base changes heads of some mixers, {reason}; give it the heads of this model"
