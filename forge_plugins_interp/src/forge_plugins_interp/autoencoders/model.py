"""Autoencoders as models, which ``forge run`` trains.

Shapes: B = samples, S = rows of a sample, D = width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from forge_core.contracts.loss import IGNORED, LossSum
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_core.contracts.observation import Site
from forge_core.errors import ConfigError
from forge_plugins_interp.autoencoders.config import AutoencoderConfig
from forge_plugins_interp.autoencoders.dictionary import Coded, Dictionary

_NO_LIMIT = 2**31
"""Rows of a sample have no order."""


class Autoencoder(nn.Module):
    """One dictionary as a model of one block, with nothing before and after it.

    The loss of a row is the squared error a feature, and what the dictionary adds. It is the model's own: the ``loss``
    that forward is given says no more than that one is wanted.
    """

    def __init__(self, config: AutoencoderConfig, /, *, vocab_size: int, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.max_seq_len = vocab_size, _NO_LIMIT
        self.embed = self.norm = self.head = None
        self.blocks = nn.ModuleDict({"0": Dictionary(config)})

    def forward(
        self,
        tokens: torch.Tensor,
        activation: torch.Tensor,
        scales: torch.Tensor | None = None,
        target_activation: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        loss: Any = None,
        **_: Any,
    ) -> torch.Tensor | LossSum:
        """
        Args:
            activation: ``(B, S, D)``, scaled.
            scales: ``(B, 2)``, by which rows were divided.
            target_activation: of a transcoder, what is predicted.
            targets: ``(B, S)``, −100 at padding, which is no row: nothing is learned from it, and nothing counts it.

        Returns:
            The reconstruction ``(B, S, E)``; with ``loss``, its ``LossSum``.

        Raises:
            ConfigError: rows have another width.
        """
        expected = activation if target_activation is None else target_activation
        self._refuse_widths(activation, expected)
        valid = None if targets is None else targets != IGNORED
        coded: Coded = self.blocks["0"](activation, scales, expected, valid)
        if loss is None:
            return coded.reconstruction
        assert valid is not None, "a loss needs targets"
        error = (expected.float() - coded.reconstruction.float()).square().mean(-1)
        each = (error + coded.penalty.float()) * valid
        return LossSum(each.sum(), valid.sum(), each.detach())

    def _refuse_widths(self, activation: torch.Tensor, expected: torch.Tensor) -> None:
        target = getattr(self.config, "target_width", self.config.width)
        for key, wanted, value in (("width", self.config.width, activation), ("target_width", target, expected)):
            if value.shape[-1] != wanted:
                raise ConfigError(f"model.{key}: {wanted} is not the width of the site, which is {value.shape[-1]}")

    def init_weights(self, rng: Initializer) -> None:
        dictionary: Any = self.blocks["0"]
        dictionary.init_weights("blocks.0", rng)

    def sites(self) -> Mapping[str, Site]:
        return {"code": Site(module="blocks.0.code", dims=("sample", "position", "latent"))}

    def parallel_plan(self) -> Mapping[str, ShardRole]:
        return {}

    def recompute_plan(self) -> Mapping[str, Recompute]:
        return {}

    def parameter_roles(self) -> Mapping[str, ParameterRole]:
        return {name: "matrix" if one.ndim == 2 else "bias" for name, one in self.named_parameters()}

    def flops_per_token(self, seq_len: int) -> float:
        """Of a row."""
        return 6.0 * sum(one.numel() for one in self.parameters() if one.ndim == 2)
