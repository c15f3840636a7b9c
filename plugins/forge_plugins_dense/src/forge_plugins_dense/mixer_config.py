"""Facts that the keys of a sequence mixer state before the build. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    from forge_core.contracts.model import ShardRole
    from forge_plugins_dense.config import TransformerConfig


@attrs.frozen
class Heads:
    """Features of a mixer's heads, as kernels and rotary tables see them."""

    keys: int
    """Of queries and keys."""
    values: int
    rotary: int
    """Features of queries and keys that are rotated; 0: none."""


@attrs.frozen(kw_only=True)
class MixerConfig:
    """Base class of the configs of mixers, with what the decoder asks them. A config that is not derived from it counts
    as this class."""

    reads: ClassVar[frozenset[str]] = frozenset({"head_dim", "rotary_fraction"})
    """Those of ``ATTENTION_KEYS`` that have an effect on it. ``head_dim``: its heads are as wide as ``head_size``."""

    def heads(self, head_size: int, rotary_fraction: float) -> Heads:
        """Features of its heads.

        Args:
            head_size: features of a head as ``model.head_dim`` says, the default filled in.
            rotary_fraction: that of the layer.
        """
        return Heads(keys=head_size, values=head_size, rotary=int(head_size * rotary_fraction))

    def matrices(self, model: TransformerConfig) -> Mapping[str, tuple[int, int, ShardRole]] | None:
        """Same as ``ModelConfig.matrices`` of the model, of this mixer; a key with a dot before it is the mixer's own.
        ``None``: not known before the build."""
        return None


@attrs.frozen(kw_only=True)
class AttentionMixerConfig(MixerConfig):
    """The mixer ``attention`` has no keys: those of the model describe it."""

    reads: ClassVar[frozenset[str]] = frozenset(
        {
            *("n_kv_heads", "head_dim", "qk_norm", "window", "rotary_fraction"),
            *("attention_bias", "attention_sinks", "attention_softcap", "attention_dropout"),
        }
    )

    def matrices(self, model: TransformerConfig) -> Mapping[str, tuple[int, int, ShardRole]]:
        """Same as ``MixerConfig.matrices``."""
        queries, keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
        return {
            "n_heads": (queries, model.dim, "column"),
            "n_kv_heads": (keys, model.dim, "column"),
            "head_dim": (model.dim, queries, "row"),
        }


ATTENTION_KEYS = AttentionMixerConfig.reads
"""Keys of the model that are about attention, and have no effect where no mixer reads them."""
