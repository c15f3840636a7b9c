"""The keys of this package's components."""

from __future__ import annotations

import attrs

COORDINATES = "coordinates"
"""How names of what the callback ``coordinates`` reports begin."""
PLACES = ("embed", "middle_block", "last_block", "logits")
"""Where activations are measured, from below."""


@attrs.frozen(kw_only=True)
class CoordinatesConfig:
    """The coordinate check of Yang et al. (2022, https://arxiv.org/abs/2203.03466, appendix D.1) has no keys."""
