"""Layers that differ from the rest of the model: ``[[model.layers]]``."""

from __future__ import annotations

from typing import Annotated

import attrs
from attrs.validators import ge, gt, le, optional

from forge_core.api import ComponentRef, Slot
from forge_plugins_dense.mixer_config import AttentionMixerConfig, MixerConfig


def _is_selection(_: object, __: attrs.Attribute[int | str], value: int | str) -> None:
    if isinstance(value, str):
        parts = value.split(":")
        numbers = [part.strip().removeprefix("-") for part in parts]
        if len(parts) not in (2, 3) or any(part and not part.isdecimal() for part in numbers):
            raise ValueError(f'must be the number of a layer, or "start:stop:step" as Python has it, got {value!r}')
        if len(parts) == 3 and parts[2].strip() and int(parts[2]) < 1:
            raise ValueError(f"must have a step of at least 1, got {value!r}")


@attrs.frozen(kw_only=True)
class LayerConfig:
    """Keys that differ in some layers; what is not given is as in the rest of the model. Of several tables that name
    one layer, the last that has a key counts."""

    at: int | str = attrs.field(validator=_is_selection)
    """The number of a layer, from 0; or ``"start:stop:step"``, as Python selects from a list: ``"5::6"`` is every sixth
    layer, ``"-2:"`` the last two."""
    window: int | None = attrs.field(default=None, validator=optional(ge(0)))
    """Same as ``model.window``; 0: none."""
    attention_sinks: bool | None = None
    """Same as ``model.attention_sinks``."""
    rope_theta: float | None = attrs.field(default=None, validator=optional(gt(1)))
    """Same as ``model.rope_theta``."""
    rope_factor: float | None = attrs.field(default=None, validator=optional(ge(1)))
    """Same as ``model.rope_factor``."""
    rope_stretched: bool | None = None
    """Whether the model's ``rope_scaling``, ``yarn`` or ``long_rope`` counts; by default it does. OLMo 3 stretches the
    layers without a window alone."""
    rotary_fraction: float | None = attrs.field(default=None, validator=optional([ge(0), le(1)]))
    """Same as ``model.rotary_fraction``; 0: no rotary positions."""
    feed_forward: Annotated[ComponentRef | None, Slot("feed_forward")] = None
    """Same as ``model.feed_forward``."""
    mixer: Annotated[ComponentRef | None, Slot("sequence_mixer")] = None
    """Same as ``model.mixer``."""

    def layers(self, n_layers: int) -> range:
        """The layers that ``at`` selects."""
        if isinstance(self.at, int):
            number = self.at + n_layers if self.at < 0 else self.at
            return range(number, number + 1) if 0 <= number < n_layers else range(0)
        return range(n_layers)[slice(*(int(part) if part.strip() else None for part in self.at.split(":")))]


@attrs.frozen(kw_only=True)
class Layer:
    """What one layer is, everything filled in."""

    window: int
    attention_sinks: bool
    rope_theta: float
    rope_factor: float
    rope_stretched: bool
    rotary_fraction: float
    feed_forward: ComponentRef
    mixer: ComponentRef | None

    @property
    def mixer_config(self) -> MixerConfig:
        """What the decoder asks its mixer."""
        if self.mixer is None:
            return AttentionMixerConfig()
        return self.mixer.config if isinstance(self.mixer.config, MixerConfig) else MixerConfig()
