"""The keys of this package's components."""

from __future__ import annotations

from typing import Annotated

import attrs

from forge_core.api import ComponentRef, Slot
from forge_core.contracts.evaluation import EvaluationConfig


@attrs.frozen(kw_only=True)
class PerplexityConfig(EvaluationConfig):
    """The loss and the perplexity on data of its own."""

    data: Annotated[ComponentRef | None, Slot("data_source")] = None
    """Evaluated whole; by default the part that ``[data]`` holds out."""
    samples: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How many sequences of ``train.seq_len`` tokens, from the first; 0 takes all."""


@attrs.frozen(kw_only=True)
class AccuracyConfig(PerplexityConfig):
    """How often the next token is the likeliest one, and among the likeliest."""

    top: int = attrs.field(default=5, validator=attrs.validators.ge(1))
    """``accuracy_top_<top>`` counts the next token among so many likeliest."""
