"""The keys of this package's components. Nothing here may import torch."""

from collections.abc import Iterator

import attrs
from attrs.validators import gt


@attrs.frozen(kw_only=True)
class ReluRouterConfig:
    """Keys of the router ``relu_router``."""

    experts_per_token: float = attrs.field(default=1.0, validator=gt(0))
    """Experts that a token visits on average, once training has got there."""
    first_penalty: float = attrs.field(default=1e-8, validator=gt(0))
    """Coefficient of the sparsity loss at the first step."""
    growth: float = attrs.field(default=1.2, validator=gt(1))
    """Each step multiplies the coefficient by this where too many experts are visited, and divides it where too few."""

    def contradictions(self, n_experts: int) -> Iterator[tuple[str, str]]:
        """What cannot be with so many experts, as a key and a sentence; ``forge validate`` asks."""
        if self.experts_per_token >= n_experts:
            sentence = f"{self.experts_per_token:g} experts a token are not less than the {n_experts} that there are"
            yield "experts_per_token", sentence
