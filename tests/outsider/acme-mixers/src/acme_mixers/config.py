"""The keys of this package's components. Nothing here may import torch."""

import attrs
from attrs.validators import gt

from forge_plugins_dense.mixer_config import Heads, MixerConfig


@attrs.frozen(kw_only=True)
class GatedLinearConfig(MixerConfig):
    """Keys of the mixer ``gated_linear``."""

    memory: float = attrs.field(default=8.0, validator=gt(0))
    """Positions after which the state has faded to 1/e, where the gate says nothing else."""

    def heads(self, head_size, rotary_fraction):
        return Heads(keys=head_size, values=head_size, rotary=0)
