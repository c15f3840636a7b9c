"""The keys of the passes."""

import attrs


@attrs.frozen(kw_only=True)
class LabelBlocksConfig:
    """``label_blocks`` has no keys."""


@attrs.frozen(kw_only=True)
class OffloadInputsConfig:
    """Offloading of what full recomputation keeps."""

    every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Offload the inputs of every n-th block only."""
