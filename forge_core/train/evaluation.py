"""The loss on the validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from forge_core.contracts.module import LooksAhead
from forge_core.distributed.mesh import DATA_AXES, LOSS_AXES
from forge_core.train.build import BuiltModel
from forge_core.train.executor import Batch
from forge_core.train.metrics import Metrics
from forge_core.train.run import Run
from forge_core.train.scales import count_targets, to_device


class Evaluation:
    """All ranks call it at the same steps.

    Args:
        batches: makes this rank's batches of the validation data, once more at each call.
        metrics: measure training alone.
    """

    def __init__(self, run: Run, batches: Callable[[], Iterable[Batch]], model: BuiltModel, metrics: Metrics) -> None:
        self._run = run
        self._batches = batches
        self._model = model
        self._metrics = metrics

    def run_if_due(self, step: int) -> Mapping[str, float]:
        """Evaluate, log and return the values; nothing if it is not due, or given up as the run is to stop."""
        run = self._run
        if not run.is_due(step, run.job.eval.interval):
            return {}
        self._metrics.log_pending()
        values = self._evaluate(lambda: run.consensus.any_rank(bool(run.requests.stop)))
        if values:
            run.record({"step": step, **values})
            run.emit("eval_end", step=step, metrics=values)
            self._metrics.restart()
        return values

    def _evaluate(self, is_given_up: Callable[[], bool]) -> dict[str, float]:
        """The mean loss, weighted by tokens, over all ranks; nothing if it is given up.

        Args:
            is_given_up: asked after each batch; all ranks are told the same.
        """
        wide = torch.float32 if self._run.device.type == "mps" else torch.float64
        sums = torch.zeros(2, dtype=wide, device=self._run.device)
        self._set_training(False)
        n_ahead = torch.full_like(sums, sum(one.looks_ahead for one in self._modules() if isinstance(one, LooksAhead)))
        n_targets = 0
        for batch in self._batches():
            n_targets += count_targets(batch)
            sums += torch.stack(self._model.executor.evaluate(to_device(batch, self._run.device)))
            if is_given_up():
                break
        self._set_training(True)
        if is_given_up():
            return {}  # a part of the validation set is not what was asked for; a resumed run evaluates again
        total, count = self._run.mesh.sum_over(sums, LOSS_AXES).tolist()
        n_valid = self._run.mesh.sum_over(torch.full_like(sums, n_targets), DATA_AXES)[0].item()
        if sums.dtype == torch.float64:  # fp32 does not count beyond 2**24
            self._model.loss.refuse_count(count, n_valid)
        loss = total / max(count, 1)
        perplexity = math.inf if loss > 700 else math.exp(loss)
        values = {"eval/loss": loss, "eval/perplexity": perplexity, "eval/tokens": count}
        if self._run.mesh.sum_over(n_ahead, ("pp",))[0].item():
            values["eval/looks_ahead"] = 1
        return values

    def _modules(self) -> Iterator[nn.Module]:
        return (module for part in self._model.parts for module in part.modules())

    def _set_training(self, training: bool) -> None:
        for part in self._model.parts:
            part.train(training)
