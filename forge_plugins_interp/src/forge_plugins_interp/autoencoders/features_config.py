"""How much of an autoencoder is looked at, and how closely."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt


@attrs.frozen(kw_only=True)
class FeaturesConfig:
    """What pages of latents show. The section of ``forge report`` has the defaults."""

    rows: int = attrs.field(default=50_000, validator=ge(1))
    """Rows of the store that are read, held-out samples first; whole samples, and at least one."""
    latents: int = attrs.field(default=12, validator=ge(0))
    """Latents with a card: the ones with the strongest activations, among latents with a density between the bounds."""
    least_density: float = attrs.field(default=1e-4, validator=ge(0.0))
    """A share of rows. A latent that fires less often has no card, unless it is asked for by number."""
    most_density: float = attrs.field(default=0.1, validator=gt(0.0))
    """Likewise, more often."""
    contexts: int = attrs.field(default=6, validator=ge(1))
    """Samples of a card, each with the row at which the latent is strongest."""
    before: int = attrs.field(default=24, validator=ge(0))
    """Tokens of a context before that row."""
    after: int = attrs.field(default=8, validator=ge(0))
    """Tokens after it."""
    bins: int = attrs.field(default=30, validator=ge(1))
    """Bars of a histogram of activations."""
    tokens: int = attrs.field(default=8, validator=ge(1))
    """Tokens that a latent raises most, and as many that it lowers most."""
    runs: int = attrs.field(default=3, validator=ge(0))
    """Runs of a report that have cards, the first ones; others are on the curve of L0 against FVU alone."""
    model_gib: float = attrs.field(default=8.0, validator=ge(0.0))
    """GiB of a checkpoint that is opened for its tokenizer, norm and head, at most."""
