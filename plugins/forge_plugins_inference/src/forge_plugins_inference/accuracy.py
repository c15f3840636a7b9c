"""The evaluation ``accuracy``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from forge_core.config.sections import Job
from forge_core.contracts.callback import RanksByAxis
from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from forge_plugins_inference.config import AccuracyConfig


class Accuracy(Evaluation):
    """Fractions of targets that are the likeliest token, and among the ``top`` likeliest."""

    def __init__(self, config: AccuracyConfig, /, *, open_data: OpenData) -> None:
        self._source = open_data(config.data, "data")
        self._samples = config.samples
        self._top = config.top

    def look_at(self, parts: Sequence[nn.Module], mesh: RanksByAxis, job: Job) -> None:
        """Same as ``Evaluation.look_at``."""
        if self._source.vocab_size == 1:
            raise ConfigError("evaluations accuracy: its data have no tokens to predict; remove it, or name others")

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        hits = torch.zeros(3, dtype=torch.int64, device=context.device)
        for batch in context.batches(self._source, samples=self._samples):
            logits = context.predict(batch)
            if logits is not None:
                hits += self._hits(logits, batch["targets"])
        totals = context.sum_over_ranks(dict(zip(("first", "top", "targets"), hits, strict=True)))
        targets = max(totals["targets"], 1)
        return {"accuracy": totals["first"] / targets, f"accuracy_top_{self._top}": totals["top"] / targets}

    def _hits(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """``(3,)`` int64: targets that are the likeliest, that are among the likeliest, and that there are."""
        likeliest = logits.topk(min(self._top, logits.shape[-1]), dim=-1).indices
        found = (likeliest == targets[..., None]) & (targets != IGNORED)[..., None]
        return torch.stack((found[..., 0].sum(), found.sum(), (targets != IGNORED).sum()))
