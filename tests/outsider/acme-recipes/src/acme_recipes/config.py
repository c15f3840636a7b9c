from typing import ClassVar

import attrs
from attrs.validators import ge, gt

from forge_core.contracts.data_source import DataSourceConfig
from forge_core.contracts.evaluation import EvaluationConfig


@attrs.frozen(kw_only=True)
class SignumConfig:
    """Keys of ``signum``, ``cubic`` and ``row_scaled``."""

    lr: float = attrs.field(validator=gt(0))
    """Base learning rate."""
    momentum: float = attrs.field(default=0.9, validator=ge(0))
    """Decay of the momentum, or of the mean, a step."""


@attrs.frozen(kw_only=True)
class InverseSqrtConfig:
    """Keys of ``inverse_sqrt``."""

    warmup_steps: int = attrs.field(default=2, validator=gt(0))
    """Steps of linear warm-up."""


@attrs.frozen(kw_only=True)
class ZLossConfig:
    """Keys of ``z_loss``."""

    coefficient: float = attrs.field(default=1e-4, validator=ge(0))
    """Of the squared logarithm of the normaliser."""


@attrs.frozen(kw_only=True)
class RampConfig(DataSourceConfig):
    """Keys of ``ramp``."""

    has_own_order: ClassVar[bool] = True
    vocab_size: int = attrs.field(default=64, validator=gt(2))
    """Numbers are counted modulo this."""


@attrs.frozen(kw_only=True)
class TidesConfig(DataSourceConfig):
    """Keys of ``tides``."""

    has_own_order: ClassVar[bool] = True
    vocab_size: int = attrs.field(default=64, validator=gt(2))
    """Numbers are below this."""
    streams: int = attrs.field(default=4, validator=gt(0))
    """How many walks there are."""


@attrs.frozen(kw_only=True)
class PolyakConfig:
    """No keys."""


@attrs.frozen(kw_only=True)
class SurpriseConfig(EvaluationConfig):
    """Keys of ``surprise``."""

    below: float = attrs.field(default=0.01, validator=gt(0))
    """A target of less probability is rare."""


@attrs.frozen(kw_only=True)
class FinalsConfig:
    """No keys."""


@attrs.frozen(kw_only=True)
class MeanDistanceConfig:
    """No keys."""
