"""The keys of this package's components. Nothing here may import torch."""

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, lt


@attrs.frozen(kw_only=True)
class CautiousAdamWConfig:
    """Keys of the optimizer ``cautious_adamw``."""

    lr: float = attrs.field(validator=gt(0))
    """Base learning rate, which the schedule multiplies."""
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=deep_iterable(and_(ge(0), lt(1))))
    """Decay of the mean of gradients, and of that of their squares, a step."""
    eps: float = attrs.field(default=1e-8, validator=gt(0))
    """Added to the root of the mean of squares."""
    weight_decay: float = attrs.field(default=0.1, validator=ge(0))
    """A step multiplies matrices by ``1 − lr · weight_decay``; embeddings, norms and biases are not decayed."""
    cautious: bool = True
    """Leave out what goes against the gradient; ``false`` is AdamW itself, for comparison."""
