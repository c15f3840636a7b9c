"""The keys of the callback ``trace``."""

from __future__ import annotations

import attrs
from attrs.validators import ge, min_len


def _not_before_first(config: TraceConfig, _: attrs.Attribute[int], value: int) -> None:
    if value < config.first:
        raise ValueError(f"must not be before first = {config.first}, got {value}")


@attrs.frozen(kw_only=True)
class TraceConfig:
    """Fingerprints of values, gradients and updates of some steps. ``forge trace`` sets it."""

    out: str = attrs.field(validator=min_len(1))
    """The folder of ``trace.jsonl``."""
    first: int = attrs.field(default=1, validator=ge(1))
    """The first step."""
    last: int = attrs.field(default=1, validator=[ge(1), _not_before_first])
    """The last step."""
    sites: tuple[str, ...] = ()
    """Names or patterns of sites; by default all that modules have, without sites that are computed for an observer."""
    stop: bool = False
    """End the run after the last one."""
