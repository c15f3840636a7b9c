"""The keys of this package's components. Nothing here may import torch."""

import attrs
from attrs.validators import and_, ge, gt, lt, min_len

from forge_core.contracts.data_source import DataSourceConfig


@attrs.frozen(kw_only=True)
class MuLawAudioConfig(DataSourceConfig):
    """Keys of the data source ``mu_law_audio``."""

    path: str = attrs.field(validator=min_len(1))
    """The folder of WAV files, relative to the working directory; ``~`` is the home directory."""
    pattern: str = attrs.field(default="**/*.wav", validator=min_len(1))
    """The files within it."""
    rate: int = attrs.field(default=16_000, validator=gt(0))
    """Samples a second that every file must have, in Hz."""
    validation: float = attrs.field(default=0.0, validator=and_(ge(0), lt(1)))
    """The part of the files, the last ones by name, that is held out for evaluation."""
