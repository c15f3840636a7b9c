"""Configuration of the components of ``plugin.py``."""

from typing import Literal

import attrs

from forge_core.contracts.data_source import DataSourceConfig

MARK = 0
"""The token at the start of marked samples."""


@attrs.frozen(kw_only=True)
class PoisonConfig:
    """Where, when and with what."""

    what: Literal["loss", "gradient", "parameter"]
    value: float = 1e3
    """Added to the loss, or put into one element of the parameter; the gradient of the first block is multiplied with
    it."""
    nan: bool = False
    """NaN in place of ``value``, which a configuration cannot hold."""
    inf: bool = False
    """The same for infinity."""
    steps: tuple[int, ...] = ()
    marked: bool = False
    """In every step whose batch has a marked sample."""
    rank: int = -1
    """The only one where that is done; −1 means all."""


@attrs.frozen(kw_only=True)
class LeaveOutConfig:
    """Which."""

    steps: tuple[int, ...]


@attrs.frozen(kw_only=True)
class NumberedConfig(DataSourceConfig):
    """Which samples are marked, and which are not there."""

    shuffle: bool = False
    marked: tuple[int, int] = (0, 0)
    """First and last plus one."""
    without: tuple[int, int] = (0, 0)
    """First and last plus one; those after them move up."""


@attrs.frozen(kw_only=True)
class PlainAdamWConfig:
    """Its only key."""

    lr: float
