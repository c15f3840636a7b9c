"""The choice of a norm. Nothing here imports torch."""

from __future__ import annotations

import attrs

from forge_core.api import ComponentRef

_OWN = ("rmsnorm", "layernorm", "zero_centered_rmsnorm")


@attrs.frozen(kw_only=True)
class NormConfig:
    """The norms of this package have no keys: the decoder says how wide they are, and ``norm_eps``."""


def as_norm(norm: ComponentRef | str) -> ComponentRef:
    """A choice of norm, which may be given as the name of one of this package.

    Raises:
        ValueError: it has none of this name.
    """
    if isinstance(norm, ComponentRef):
        return norm
    if norm not in _OWN:
        raise ValueError(f"must be a component or one of {', '.join(_OWN)}, got {norm!r}")
    factory = f"forge_plugins_dense.norm:{norm}"
    return ComponentRef(kind="norm", name=norm, provider="forge-plugins-dense", factory=factory, config=NormConfig())


RMSNORM, LAYERNORM, ZERO_CENTERED_RMSNORM = map(as_norm, _OWN)
