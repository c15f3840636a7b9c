"""The evaluation ``autoencoder``: what it explains of held-out activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from forge_plugins_interp.autoencoders.config import AutoencoderEvaluationConfig
from forge_plugins_interp.autoencoders.model import Autoencoder


class Explained(Evaluation):
    """``fvu``, the fraction of variance unexplained, ``Σ ‖x − x̂‖² / Σ ‖x − x̄‖²`` with the mean over all rows; ``l0``,
    active latents a row; ``silent``, the share of latents that fire for none of the rows."""

    def __init__(self, config: AutoencoderEvaluationConfig, /, *, open_data: OpenData) -> None:
        self._samples = config.samples
        self._source = open_data(None, "data")

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        (model,) = context.parts
        if not isinstance(model, Autoencoder):
            raise ConfigError("evaluations: autoencoder measures autoencoders, such as the model topk_sae")
        sums = _Sums(model, context.device)
        hook = model.blocks["0"].code.register_forward_hook(sums.see)  # type: ignore[union-attr]  # declared
        try:
            for batch in context.batches(self._source, samples=self._samples):
                sums.is_padding = batch["targets"].flatten()[:, None] == IGNORED
                found = context.predict(batch)
                assert found is not None, "an autoencoder has one block, and so no pipeline"
                sums.add(batch.get("target_activation", batch["activation"]), found)
        finally:
            hook.remove()
        return sums.result(context)


class _Sums:
    """Over rows that are no padding, which is not cut out: the host would have to wait for how many rows are left."""

    def __init__(self, model: Autoencoder, device: torch.device) -> None:
        width = getattr(model.config, "target_width", model.config.width)
        kind = torch.float32 if device.type == "mps" else torch.float64
        self.is_padding = torch.empty(0)
        self._fired = torch.zeros(model.config.latents, dtype=kind, device=device)
        self._total = torch.zeros(width, dtype=kind, device=device)
        self._others = torch.zeros(3, dtype=kind, device=device)
        """Rows, squares, squared errors."""

    def see(self, module: nn.Module, args: Any, code: torch.Tensor) -> None:
        self._fired += (code.flatten(0, -2) > 0).masked_fill(self.is_padding, False).sum(0)

    def add(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        x, y = (one.flatten(0, 1).to(self._total.dtype).masked_fill(self.is_padding, 0) for one in (expected, found))
        self._total += x.sum(0)
        rows = (~self.is_padding).sum().to(x.dtype)
        self._others += torch.stack([rows, x.square().sum(), (x - y).square().sum()])

    def result(self, context: EvaluationContext) -> Mapping[str, float]:
        for tensor in (self._fired, self._total, self._others):
            context.mesh.sum_over(tensor, ("dp_replicate", "dp_shard"))
        rows, squares, errors = self._others.tolist()
        variance = squares - float(self._total.square().sum()) / rows
        return {
            "fvu": errors / variance,
            "l0": float(self._fired.sum()) / rows,
            "silent": float((self._fired == 0).double().mean()),
        }
