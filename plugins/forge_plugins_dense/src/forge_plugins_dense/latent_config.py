"""What can be set for multi-head latent attention. Nothing here imports torch."""

from __future__ import annotations

import attrs
from attrs.validators import gt, optional


def _is_even(_: LatentAttentionConfig, __: attrs.Attribute[int], value: int) -> None:
    if value % 2:
        raise ValueError(f"must be even, because rotary embeddings turn pairs of features; got {value}")


@attrs.frozen(kw_only=True)
class LatentAttentionConfig:
    """Keys and values of all heads from one narrow vector a position, which is all that generation has to keep
    (DeepSeek-V2, arXiv 2405.04434, section 2.1). By default in the proportions of DeepSeek-V3."""

    kv_rank: int = attrs.field(default=512, validator=gt(0))
    """Features of that vector."""
    q_rank: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Features of a narrow vector that queries come from; by default they come from the residual stream. DeepSeek-V3:
    1536."""
    plain_dim: int = attrs.field(default=128, validator=gt(0))
    """Features of a head's queries and keys that are not rotated."""
    rotary_dim: int = attrs.field(default=64, validator=[gt(0), _is_even])
    """Features of a head's queries and keys that are rotated. All heads have the same of such keys."""
    value_dim: int = attrs.field(default=128, validator=gt(0))
    """Features of a head's values."""
    pad_values: bool = attrs.field(default=False)
    """Whether values get zeros up to the features of a key, which are cut from what attention gives. The kernels
    ``flash``, and that of ``method = "ring"`` of ``context_parallel``, take values as wide as keys only; the
    products with values cost as much as those with keys."""

    @property
    def key_dim(self) -> int:
        """Features of a head's queries and keys."""
        return self.plain_dim + self.rotary_dim

    @pad_values.validator
    def _values_are_narrower(self, _: attrs.Attribute[bool], pads: bool) -> None:
        if pads and self.value_dim >= self.key_dim:
            raise ValueError(
                f"pads values to the {self.key_dim} features of a key, and they have {self.value_dim}; leave it out"
            )
