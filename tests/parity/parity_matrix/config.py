"""Configuration of the components of ``plugin.py`` that have none of their own."""

from typing import Literal

import attrs

from forge_core.contracts.evaluation import EvaluationConfig


@attrs.frozen(kw_only=True)
class NothingToChoose:
    """No keys."""


@attrs.frozen(kw_only=True)
class LogitsLossConfig(EvaluationConfig):
    """Of the data that are held out."""

    gives: Literal["the loss", "nan", "a tensor", "a list"] = "the loss"
