"""Ways to lengthen the context of a model with rotary positions."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt, optional


def _above_low_freq_factor(scaling: Llama3Scaling, _: attrs.Attribute[float], value: float) -> None:
    if value <= scaling.low_freq_factor:
        raise ValueError(f"must be greater than low_freq_factor = {scaling.low_freq_factor}, got {value}")


@attrs.frozen(kw_only=True)
class Llama3Scaling:
    """Llama 3.1's way to lengthen the context: slow rotations become slower, fast ones stay as they are."""

    factor: float = attrs.field(default=8.0, validator=ge(1))
    """What the frequency of a slow rotation is divided by."""
    low_freq_factor: float = attrs.field(default=1.0, validator=gt(0))
    """Rotations that turn less often than this within ``original_max_seq_len`` are slow."""
    high_freq_factor: float = attrs.field(default=4.0, validator=[gt(0), _above_low_freq_factor])
    """Rotations that turn more often than this within ``original_max_seq_len`` are fast; between the two, the frequency
    is interpolated."""
    original_max_seq_len: int = attrs.field(default=8192, validator=gt(0))
    """The sequence length, in tokens, that the model was first trained on."""


def _above_beta_slow(scaling: YarnScaling, _: attrs.Attribute[float], value: float) -> None:
    if value <= scaling.beta_slow:
        raise ValueError(f"must be greater than beta_slow = {scaling.beta_slow}, got {value}")


@attrs.frozen(kw_only=True)
class YarnScaling:
    """YaRN's way to lengthen the context (Peng et al. 2023, arXiv 2309.00071): slow rotations become slower, and
    attention sharper."""

    factor: float = attrs.field(validator=ge(1))
    """What the frequency of a slow rotation is divided by."""
    original_max_seq_len: int = attrs.field(validator=gt(0))
    """The sequence length, in tokens, that the model was first trained on."""
    beta_slow: float = attrs.field(default=1.0, validator=gt(0))
    """Rotations that turn less often than this within ``original_max_seq_len`` are slow."""
    beta_fast: float = attrs.field(default=32.0, validator=[gt(0), _above_beta_slow])
    """Rotations that turn more often than this within ``original_max_seq_len`` are fast; between the two, the frequency
    is interpolated."""
    truncate: bool = True
    """Take whole pairs of features for the ends of what is interpolated; gpt-oss does not."""
    logit_scale: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """What the logits of attention are multiplied by; by default ``(0.1 · ln(factor) + 1)²``."""
