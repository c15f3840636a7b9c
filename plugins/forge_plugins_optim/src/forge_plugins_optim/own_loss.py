"""The loss ``own``: for models that compute their loss themselves."""

from __future__ import annotations

import torch
from torch import nn

from forge_core.contracts.loss import LossSum
from forge_core.errors import ConfigError
from forge_plugins_optim.loss_config import OwnLossConfig


def own_loss(config: OwnLossConfig, /) -> OwnLoss:
    """Make it."""
    return OwnLoss()


class OwnLoss:
    """It stands where a loss must be named, and is not called by a model that has one of its own."""

    has_perplexity = False

    def __call__(self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> LossSum:
        """
        Raises:
            ConfigError: always, as the model has no loss of its own.
        """
        raise ConfigError("loss.name = 'own': this model has no loss of its own; choose another, such as cross_entropy")
