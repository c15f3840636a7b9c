"""What can be set for predicting tokens beyond the next. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs
from attrs.validators import gt

from forge_core.api import ComponentRef, Slot


@attrs.frozen(kw_only=True)
class SequentialConfig:
    """No keys."""


@attrs.frozen(kw_only=True)
class MultiTokenConfig:
    """Further blocks after the last, the k-th of which predicts the token k + 1 ahead (DeepSeek-V3, arXiv 2412.19437,
    section 2.2). They are there for training; generation and evaluation do without."""

    depths: int = attrs.field(default=1, validator=gt(0))
    """How many further tokens are predicted, by one block each."""
    weight: float = attrs.field(default=0.3, validator=gt(0))
    """What the mean of their losses is multiplied by: λ, in DeepSeek-V3 0.3 for the first 10 T of 14.8 T tokens, then
    0.1."""
    normalizer: Literal["valid", "paper"] = "valid"
    """What the summed loss of a depth is divided by. ``valid``: the number of its targets, of which a document has
    fewer the further ahead they are. ``paper``: the number of targets of the next token (equation 24 there)."""
    acceptance_every: int = attrs.field(default=16, validator=gt(0))
    """At every n-th position it is looked whether the likeliest token is the target, which is what
    ``multi_token_acceptance`` reports; it takes the logits of these positions once more."""
    predictor: Annotated[ComponentRef, Slot("predictor", default="sequential")]
    """How such a block reads what the one before gives, and the token that it is told."""
