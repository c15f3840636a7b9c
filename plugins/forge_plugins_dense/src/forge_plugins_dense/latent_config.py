"""What can be set for multi-head latent attention. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs
from attrs.validators import gt, optional

from forge_plugins_dense.mixer_config import Heads, MixerConfig

if TYPE_CHECKING:
    from forge_core.contracts.model import ShardRole
    from forge_plugins_dense.config import TransformerConfig


def _is_even(_: LatentAttentionConfig, __: attrs.Attribute[int], value: int) -> None:
    if value % 2:
        raise ValueError(f"must be even, because rotary embeddings turn pairs of features; got {value}")


@attrs.frozen(kw_only=True)
class LatentAttentionConfig(MixerConfig):
    """Keys and values of all heads from one narrow vector a position, which is all that generation has to keep
    (DeepSeek-V2, arXiv 2405.04434, section 2.1). By default in the proportions of DeepSeek-V3."""

    reads: ClassVar[frozenset[str]] = frozenset({"window", "attention_softcap", "attention_dropout"})

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

    def heads(self, head_size: int, rotary_fraction: float) -> Heads:
        """Same as ``MixerConfig.heads``."""
        values = self.key_dim if self.pad_values else self.value_dim
        return Heads(keys=self.key_dim, values=values, rotary=self.rotary_dim)

    def matrices(self, model: TransformerConfig) -> Mapping[str, tuple[int, int, ShardRole]]:
        """Same as ``MixerConfig.matrices``."""
        dim, n_heads = model.dim, model.n_heads
        down: dict[str, tuple[int, int, ShardRole]] = {
            ".rotary_dim": (self.kv_rank + self.rotary_dim, dim, "replicate")
        }
        if self.q_rank is not None:
            down[".q_rank"] = (self.q_rank, dim, "replicate")
        return {
            **down,
            ".plain_dim": (n_heads * self.key_dim, self.q_rank or dim, "column"),
            ".kv_rank": (n_heads * (self.plain_dim + self.value_dim), self.kv_rank, "column"),
            ".value_dim": (dim, n_heads * self.value_dim, "row"),
        }

    @pad_values.validator
    def _values_are_narrower(self, _: attrs.Attribute[bool], pads: bool) -> None:
        if pads and self.value_dim >= self.key_dim:
            raise ValueError(
                f"pads values to the {self.key_dim} features of a key, and they have {self.value_dim}; leave it out"
            )


def latent_of(model: TransformerConfig) -> LatentAttentionConfig | None:
    """The latent attention that the model has where ``layers`` names no other mixer."""
    config = None if model.mixer is None else model.mixer.config
    return config if isinstance(config, LatentAttentionConfig) else None
