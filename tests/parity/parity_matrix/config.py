"""Configuration of the components of ``plugin.py`` that have none of their own."""

from typing import Literal

import attrs

from forge_core.contracts.evaluation import EvaluationConfig
from forge_plugins_moe.router_config import ExpertChoiceConfig


@attrs.frozen(kw_only=True)
class NothingToChoose:
    """No keys."""


@attrs.frozen(kw_only=True)
class LogitsLossConfig(EvaluationConfig):
    """Of the data that are held out."""

    gives: Literal["the loss", "nan", "a tensor", "a list"] = "the loss"


@attrs.frozen(kw_only=True)
class ReplayedChoiceConfig(ExpertChoiceConfig):
    """The keys of ``expert_choice``, and two more."""

    choices: str = "choices"
    """The file that the choices of all steps are written to."""
    replays: bool = False
    """Read them instead."""
