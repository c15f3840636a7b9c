"""Ways to lengthen the context of a model with rotary positions."""

from __future__ import annotations

import math

import attrs
from attrs.validators import ge, gt, le, optional

_MOST = 10**6
"""Of a factor, and one over it the least: fp32 has what these make of a frequency or a logit."""


def _above_low_freq_factor(scaling: Llama3Scaling, _: attrs.Attribute[float], value: float) -> None:
    if value <= scaling.low_freq_factor:
        raise ValueError(f"must be greater than low_freq_factor = {scaling.low_freq_factor}, got {value}")


@attrs.frozen(kw_only=True)
class Llama3Scaling:
    """Llama 3.1's way to lengthen the context: slow rotations become slower, fast ones stay as they are."""

    factor: float = attrs.field(default=8.0, validator=ge(1))
    """What the frequency of a slow rotation is divided by."""
    low_freq_factor: float = attrs.field(default=1.0, validator=[gt(0), le(_MOST)])
    """Rotations that turn less often than this within ``original_max_seq_len`` are slow."""
    high_freq_factor: float = attrs.field(default=4.0, validator=[gt(0), le(_MOST), _above_low_freq_factor])
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
    beta_slow: float = attrs.field(default=1.0, validator=[gt(0), le(_MOST)])
    """Rotations that turn less often than this within ``original_max_seq_len`` are slow."""
    beta_fast: float = attrs.field(default=32.0, validator=[gt(0), le(_MOST), _above_beta_slow])
    """Rotations that turn more often than this within ``original_max_seq_len`` are fast; between the two, the frequency
    is interpolated."""
    truncate: bool = True
    """Take whole pairs of features for the ends of what is interpolated; gpt-oss does not."""
    logit_scale: float | None = attrs.field(default=None, validator=optional([gt(0), le(_MOST)]))
    """What the logits of attention are multiplied by; by default ``(0.1 · ln(factor) + 1)²``."""


def _are_positive(_: LongRope, __: attrs.Attribute[tuple[float, ...]], value: tuple[float, ...]) -> None:
    if wrong := [factor for factor in value if not 1 / _MOST <= factor <= _MOST]:
        raise ValueError(f"must be factors of at least {1 / _MOST:g} and at most {_MOST}, got {wrong[0]}")


def _are_as_many(scaling: LongRope, _: attrs.Attribute[tuple[float, ...]], value: tuple[float, ...]) -> None:
    if len(value) != len(scaling.short_factor):
        raise ValueError(f"has {len(value)} factors, and short_factor has {len(scaling.short_factor)}")


@attrs.frozen(kw_only=True)
class LongRope:
    """LongRoPE's way to lengthen the context (Ding et al. 2024, arXiv 2402.13753; Phi-3 and Phi-4-mini): each pair of
    features has a factor of its own, and sequences beyond the original context have other factors."""

    short_factor: tuple[float, ...] = attrs.field(validator=_are_positive)
    """What the frequency of each pair is divided by in sequences up to ``original_max_seq_len``; as many as half of
    the features of a head that are rotated."""
    long_factor: tuple[float, ...] = attrs.field(validator=[_are_positive, _are_as_many])
    """The same in longer sequences; a packed document counts by itself."""
    original_max_seq_len: int = attrs.field(validator=gt(1))
    """The sequence length, in tokens, that the model was first trained on."""
    attention_factor: float | None = attrs.field(default=None, validator=optional([gt(0), le(_MOST)]))
    """What rotated features are multiplied by; by default ``√(1 + ln(s) / ln(original_max_seq_len))``, where ``s`` is
    ``model.max_seq_len / original_max_seq_len``, and 1 if ``s`` is below 1."""

    def magnitude(self, max_seq_len: float) -> float:
        """The attention factor, the default filled in, as transformers has it."""
        if self.attention_factor is not None:
            return self.attention_factor
        stretch = max(max_seq_len / self.original_max_seq_len, 1.0)
        return math.sqrt(1 + math.log(stretch) / math.log(self.original_max_seq_len))
