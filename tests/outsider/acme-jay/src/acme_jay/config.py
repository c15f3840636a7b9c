"""The keys of ``jay``."""

import attrs
from attrs.validators import gt


def _divides_width(config, _, value):
    if config.width % value:
        raise ValueError(f"must divide width = {config.width}, got {value}")


@attrs.frozen(kw_only=True)
class JayConfig:
    """A decoder whose attention and MLP read the same normed stream, side by side."""

    width: int = attrs.field(validator=gt(0))
    """Width of the stream."""
    depth: int = attrs.field(validator=gt(0))
    """Blocks."""
    looks: int = attrs.field(validator=[gt(0), _divides_width])
    """Attention heads."""
    longest: int = attrs.field(default=64, validator=gt(0))
    """Rows of the table of positions: the longest sequence, in tokens."""
    tied: bool = False
    """Whether the head multiplies by the table of words."""

    def check(self, job):
        """What is wrong with this model in this job."""
        if job.train.seq_len > self.longest:
            yield "longest", f"{self.longest} is shorter than train.seq_len = {job.train.seq_len}"
