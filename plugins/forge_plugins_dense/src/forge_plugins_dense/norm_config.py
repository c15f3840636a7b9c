"""The choice of a norm. Nothing here imports torch."""

from __future__ import annotations

import attrs

from forge_core.api import ComponentRef
from forge_plugins_dense.own_component import own_component

_OWN = ("rmsnorm", "layernorm", "zero_centered_rmsnorm")


@attrs.frozen(kw_only=True)
class NormConfig:
    """The norms of this package have no keys: the decoder says how wide they are, and ``norm_eps``."""


def as_norm(norm: ComponentRef | str) -> ComponentRef:
    """A choice of norm, which may be given as the name of one of this package.

    Raises:
        ValueError: it has none of this name.
    """
    return own_component("norm", norm, dict.fromkeys(_OWN, NormConfig))


RMSNORM, LAYERNORM, ZERO_CENTERED_RMSNORM = map(as_norm, _OWN)
