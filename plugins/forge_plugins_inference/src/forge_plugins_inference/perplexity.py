"""The evaluation ``perplexity``."""

from __future__ import annotations

from collections.abc import Mapping

from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_plugins_inference.config import PerplexityConfig


class Perplexity(Evaluation):
    """Mean loss in nats a token, its exponential if the loss has a perplexity, and the number of targets."""

    def __init__(self, config: PerplexityConfig, /, *, open_data: OpenData) -> None:
        self._source = open_data(config.data, "data")
        self._samples = config.samples

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        loss = context.losses(self._source, samples=self._samples)
        of_sources = {f"loss/{name}": one.mean for name, one in loss.sources.items() if one.count}
        perplexity = {"perplexity": loss.perplexity} if loss.has_perplexity else {}
        return {"loss": loss.mean, **perplexity, "tokens": loss.count, **of_sources}
