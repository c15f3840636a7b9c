"""The evaluation ``logits_loss``: cross-entropy of logits, which no loss of the job has seen."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from forge_core.contracts.evaluation import Evaluation


class LogitsLoss(Evaluation):
    """The mean over targets, in float64."""

    def __init__(self, config, /, *, open_data):
        self._source = open_data(None, "data")
        self._gives = config.gives

    def run(self, context):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for batch in context.batches(self._source):
            logits = context.predict(batch)
            if logits is not None:
                targets = batch["targets"]
                assert logits.shape[:2] == targets.shape, "whole sequences"
                total += F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
                count += int((targets != -100).sum())
        sums = context.sum_over_ranks({"total": total, "count": count})
        loss = sums["total"] / sums["count"]
        each = context.losses(self._source, by="sample").samples
        first = context.losses(self._source, samples=3)  # an odd number, so that ranks have unequally many
        assert len(each) == len(self._source)
        assert math.isclose(sum(one.total for one in each[:3]), first.total, rel_tol=1e-5)
        assert sum(one.count for one in each[:3]) == first.count
        samples = sum(number * one.total for number, one in enumerate(each, start=1)) / sums["count"]
        values = {"the loss": loss, "nan": math.nan, "a tensor": torch.tensor(loss)}
        return (
            [loss]
            if self._gives == "a list"
            else {
                "loss": values[self._gives],
                "targets": sums["count"],
                "samples": samples,
            }
        )
