"""The one block of an autoencoder: encoder, sparse code, decoder.

Shapes: ``…`` = rows in any dimensions, D = width, E = width of what is reconstructed, F = latents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer
from forge_plugins_interp.autoencoders.codes import batch_top_k, jump_relu, step, top_k
from forge_plugins_interp.autoencoders.config import (
    AutoencoderConfig,
    BatchTopKConfig,
    JumpReluConfig,
    MatryoshkaConfig,
    TopKConfig,
    TranscoderConfig,
)


class Coded(NamedTuple):
    """What the dictionary makes of rows."""

    reconstruction: torch.Tensor
    """``(…, E)``."""
    penalty: torch.Tensor
    """``(…)``: what the loss has beside the squared error a feature."""


class Dictionary(nn.Module):
    """``x̂ = W_dec z + b_dec`` of the sparse code ``z`` of ``W_enc (x − b_dec) + b_enc``; a transcoder takes x as it is.

    Rows of ``W_dec`` are divided by their norms wherever they are used, so that they have norm 1 after every update.
    """

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        width, latents = config.width, config.latents
        target = config.target_width if isinstance(config, TranscoderConfig) else width
        self.encoder = nn.Parameter(torch.empty(latents, width))
        self.encoder_bias = nn.Parameter(torch.empty(latents))
        self.decoder = nn.Parameter(torch.empty(latents, target))
        self.decoder_bias = nn.Parameter(torch.empty(target))
        has_skip = isinstance(config, TranscoderConfig) and config.skip
        self.skip = nn.Parameter(torch.empty(target, width)) if has_skip else None
        self.log_threshold = nn.Parameter(torch.empty(latents)) if isinstance(config, JumpReluConfig) else None
        self.code = nn.Identity()
        """Is given the code ``(…, F)``, for whoever looks at it."""
        self.register_buffer("idle", torch.empty(latents))
        """Rows since each latent has fired."""
        self.register_buffer("scales", torch.empty(2))
        """By which the data divide what is read and what is predicted."""
        self.register_buffer("threshold", torch.empty(()))
        """Of ``batch_topk_sae``, in evaluations."""
        for name, size in (("fired", latents), ("sums", 5)):
            self.register_buffer(name, torch.empty(size), persistent=False)
        self.idle: torch.Tensor
        self.scales: torch.Tensor
        self.threshold: torch.Tensor
        self.fired: torch.Tensor
        self.sums: torch.Tensor
        """Rows, active latents, both scales times rows, and the least active values times rows."""

    def init_weights(self, name: str, rng: Initializer) -> None:
        """Decoder rows of norm 1 in random directions, and the encoder their transpose."""

        def directions(full: torch.Tensor, generator: torch.Generator) -> None:
            full.normal_(generator=generator)
            full.div_(full.norm(dim=-1, keepdim=True))

        rng.fill(f"{name}.encoder", self.encoder, directions)
        rng.fill(f"{name}.decoder", self.decoder, directions)
        if self.encoder.shape == self.decoder.shape:
            rng.fill(f"{name}.decoder", self.encoder, directions)  # the values that the decoder has
        for key in ("encoder_bias", "decoder_bias", "skip", "idle", "threshold", "fired", "sums"):
            tensor = getattr(self, key)
            if tensor is not None:
                rng.fill(f"{name}.{key}", tensor, lambda full, _: full.zero_())
        rng.fill(f"{name}.scales", self.scales, lambda full, _: full.fill_(1))
        if self.log_threshold is not None:
            assert isinstance(self.config, JumpReluConfig), "it has thresholds"
            value = math.log(self.config.initial_threshold)
            rng.fill(f"{name}.log_threshold", self.log_threshold, lambda full, _: full.fill_(value))

    def forward(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None = None,
        target: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
    ) -> Coded:
        """
        Args:
            x: ``(…, D)``, scaled.
            scales: ``(B, 2)``, how the samples of the first dimension were, for training.
            target: ``(…, E)``, what is to be reconstructed; without it, there is no penalty.
            valid: ``(…)`` bool, the rows that are no padding; by default all.
        """
        pre = self._pre(x)
        code = self.code(self._sparse(pre, valid))
        decoder = F.normalize(self.decoder, dim=-1)
        reconstruction = self._decode(code, decoder, x)
        penalty = x.new_zeros(x.shape[:-1])
        if target is not None:
            penalty = self._penalty(target, pre, code, decoder, reconstruction)
        if self.training and scales is not None:
            self._count(code.detach(), scales, x.new_ones(x.shape[:-1], dtype=torch.bool) if valid is None else valid)
        return Coded(reconstruction, penalty)

    def _pre(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.config, TranscoderConfig):
            x = x - self.decoder_bias
        return F.linear(x, self.encoder, self.encoder_bias)

    def _sparse(self, pre: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        config = self.config
        if self.log_threshold is not None:
            assert isinstance(config, JumpReluConfig), "it has thresholds"
            return jump_relu(pre, self.log_threshold.exp(), config.bandwidth)
        assert isinstance(config, TopKConfig), "all others are by the largest"
        if isinstance(config, BatchTopKConfig):
            return batch_top_k(pre, config.k, valid) if self.training else pre * (pre > self.threshold.clamp(min=0))
        return top_k(pre, config.k)

    def _decode(self, code: torch.Tensor, decoder: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found = code @ decoder + self.decoder_bias
        return found if self.skip is None else found + F.linear(x, self.skip)

    def _penalty(
        self,
        target: torch.Tensor,
        pre: torch.Tensor,
        code: torch.Tensor,
        decoder: torch.Tensor,
        reconstruction: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        if self.log_threshold is not None:
            assert isinstance(config, JumpReluConfig), "it has thresholds"
            active: torch.Tensor = step(pre, self.log_threshold.exp(), config.bandwidth).sum(-1)
            of_active: torch.Tensor = config.l0_coefficient * active
            return of_active
        assert isinstance(config, TopKConfig), "all others are by the largest"
        penalty = self._auxiliary(pre, decoder, target - reconstruction)
        if isinstance(config, MatryoshkaConfig):
            for size in config.prefixes:
                part = code[..., :size] @ decoder[:size] + self.decoder_bias
                penalty = penalty + (target - part).square().mean(-1)
        return penalty

    def _auxiliary(self, pre: torch.Tensor, decoder: torch.Tensor, left_over: torch.Tensor) -> torch.Tensor:
        """By which dead latents learn to reconstruct what the others leave (arXiv 2406.04093, appendix A.2)."""
        assert isinstance(self.config, TopKConfig), "it is asked for there"
        dead = self.idle > self.config.dead_after
        n_most = min(max(1, self.config.width // 2), self.config.latents)
        if not self.training or self.config.aux_coefficient == 0:
            return pre.new_zeros(pre.shape[:-1])
        # as long as none is dead, this is 0, and connected to the graph on every rank alike
        code = top_k(pre.where(dead, 0.0), n_most)
        share = (dead.sum() / n_most).clamp(max=1)
        error = (left_over.detach() - code @ decoder).square().mean(-1)
        auxiliary: torch.Tensor = self.config.aux_coefficient * share * error * dead.any()
        return auxiliary

    @torch.no_grad()
    def _count(self, code: torch.Tensor, scales: torch.Tensor, valid: torch.Tensor) -> None:
        active = (code > 0) & valid[..., None]
        self.fired += active.flatten(0, -2).sum(0)
        of_sample = valid.reshape(len(scales), -1).float().sum(1)
        n_rows = of_sample.sum()
        least = code.where(active, float("inf")).min().float().clamp(max=torch.finfo(torch.float32).max)
        least = least.where(active.any(), 0.0)
        self.sums += torch.stack([n_rows, active.sum(), *(scales * of_sample[:, None]).sum(0), least * n_rows])

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        """Same as ``StepModule.accumulators``."""
        return {"fired": self.fired, "sums": self.sums}

    @torch.no_grad()
    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor], progress: float) -> None:
        """Same as ``StepModule.before_optimizer_step``."""
        count, active, first, second, least = reduced["sums"].unbind()
        has_rows, rows = count > 0, count.clamp(min=1)  # a step may be all padding, and then changes nothing
        self.idle.copy_(torch.where(reduced["fired"] > 0, 0.0, self.idle + count))
        self.scales.copy_(torch.where(has_rows, torch.stack((first, second)) / rows, self.scales))
        self._active = active / rows
        if isinstance(self.config, BatchTopKConfig):
            is_first = self.threshold == 0
            decay = self.config.threshold_decay
            mean = least / rows
            moved = torch.where(is_first, mean, decay * self.threshold + (1 - decay) * mean)
            self.threshold.copy_(torch.where(has_rows, moved, self.threshold))

    def step_metrics(self) -> Mapping[str, torch.Tensor]:
        """Same as ``ReportsMetrics.step_metrics``: active latents a row, and the share of dead ones."""
        dead = (self.idle > self.config.dead_after).float().mean()
        return {"l0": self._active.float(), "dead": dead}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """The code ``(…, F)`` of unscaled rows ``(…, D)``, as an evaluation has it."""
        was_training = self.training
        self.eval()
        code: torch.Tensor = self.code(self._sparse(self._pre(x / self.scales[0])))
        self.train(was_training)
        return code

    def decode(self, code: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Unscaled rows ``(…, E)`` of a code ``(…, F)``.

        Args:
            x: the unscaled rows ``(…, D)`` that it is of, which a transcoder may have a linear map of.
        """
        scale = self.scales[1] if self.predicts() else self.scales[0]
        return self._decode(code, F.normalize(self.decoder, dim=-1), x / self.scales[0]) * scale

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        """Unscaled rows ``(…, D)`` to unscaled ones ``(…, E)``, as an evaluation does."""
        return self.decode(self.encode(x), x)

    def predicts(self) -> bool:
        """Return whether it predicts another site."""
        return isinstance(self.config, TranscoderConfig)
