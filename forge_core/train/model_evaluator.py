"""The trained model as evaluations see it, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import attrs
import torch

from forge_core.contracts.batch import NamesSources
from forge_core.contracts.callback import RanksByAxis
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.evaluation import LossTotal
from forge_core.contracts.executor import PredictingExecutor
from forge_core.contracts.module import LooksAhead
from forge_core.contracts.parallel_pass import PassContext
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.data.loader import evaluation_batches
from forge_core.distributed.mesh import DATA_AXES, LOSS_AXES, widest
from forge_core.errors import PluginError
from forge_core.train.build import BuiltModel
from forge_core.train.executor import Batch
from forge_core.train.metrics import zeros_of_sources
from forge_core.train.scales import count_targets, to_device


class GivenUpError(Exception):
    """The run is to stop: a part of the data is not what was asked for. Raised on all ranks alike."""


@attrs.define(slots=False, eq=False)
class ModelEvaluator:
    """The ``EvaluationContext`` of the contract."""

    _context: PassContext
    _model: BuiltModel
    tokenizer: Tokenizer | None
    log: Callable[[str], None]
    _after_batch: Callable[[Batch], bool] = lambda batch: False
    """Called with each batch; returns whether to give up, on all ranks the same."""
    _in_place: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which the parameters are those to be evaluated."""

    def __attrs_post_init__(self) -> None:
        self.job = self._context.job
        self.device = self._context.device
        self.parts = self._model.parts
        self._mesh = self._context.mesh
        self.mesh: RanksByAxis = self._mesh
        self.rank = self._mesh.rank
        self.world_size = self._mesh.world_size

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode, with the weights to be evaluated, without gradients."""
        self._set_training(False)
        try:
            with self._in_place(), torch.no_grad():  # and not inference_mode: FSDP keeps tensors made here
                yield
        finally:
            self._set_training(True)

    def losses(self, source: DataSource, *, samples: int = 0, by: Literal["source", "sample"] = "source") -> LossTotal:
        """Same as ``EvaluationContext.losses``."""
        sums = torch.zeros(2, dtype=widest(self.device), device=self.device)
        n_targets, loss, has_perplexity = 0, self._model.loss, True
        names: Sequence[str] = source.names if by == "source" and isinstance(source, NamesSources) else ()
        n_parts = min(samples or len(source), len(source)) if by == "sample" else len(names)
        loss.sums_of_sources = zeros_of_sources(n_parts, self.device) if n_parts else None
        try:
            for batch, numbers in self._numbered_batches(source, samples):
                n_targets += count_targets(batch)
                has_perplexity &= loss.has_perplexity(batch)
                on_device = to_device(batch, self.device)
                loss.parts_of_rows = numbers if by == "sample" else None
                sums += torch.stack(self._model.executor.evaluate(on_device))
                self._note(on_device)
        finally:
            of_parts, loss.sums_of_sources, loss.parts_of_rows = loss.sums_of_sources, None, None
        total, count = self._mesh.sum_over(sums, LOSS_AXES).tolist()
        n_valid = self._mesh.sum_over(torch.full_like(sums, n_targets), DATA_AXES)[0].item()
        if sums.dtype == torch.float64:  # fp32 does not count beyond 2**24
            self._model.loss.refuse_count(count, n_valid)
        if of_parts is None:
            return LossTotal(total, count, has_perplexity=has_perplexity)
        totals = [LossTotal(*one) for one in self._mesh.sum_over(of_parts, LOSS_AXES).tolist()]
        if by == "source":
            return LossTotal(total, count, dict(zip(names, totals, strict=True)), has_perplexity=has_perplexity)
        if sum(one.count for one in totals) != count:
            raise PluginError(f"{loss.words} does not tell the loss of each position (LossSum.each), nor of a sample")
        return LossTotal(total, count, samples=totals, has_perplexity=has_perplexity)

    def batches(self, source: DataSource, *, samples: int = 0) -> Iterator[Batch]:
        """Same as ``EvaluationContext.batches``."""
        for batch, _ in self._numbered_batches(source, samples):
            on_device = to_device(batch, self.device)
            yield on_device
            self._note(on_device)

    def predict(self, batch: Batch) -> torch.Tensor | None:
        """Same as ``EvaluationContext.predict``.

        Raises:
            PluginError: the pass that has cut the model cannot do it.
        """
        executor = self._model.executor
        if not isinstance(executor, PredictingExecutor):
            name = type(executor).__qualname__
            raise PluginError(f"{name} has no predict, so that an evaluation cannot look at logits in this layout")
        return executor.predict({name: entry for name, entry in batch.items() if name != "targets"})

    def sum_over_ranks(self, values: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
        """Same as ``EvaluationContext.sum_over_ranks``."""
        sums = torch.tensor([float(value) for value in values.values()], dtype=widest(self.device), device=self.device)
        return dict(zip(values, self._mesh.sum_over(sums, (*DATA_AXES, "pp")).tolist(), strict=True))

    def looks_ahead(self) -> bool:
        """Return whether a position's output depends on later ones, in the mode that is set, on any pipeline stage."""
        modules = (module for part in self._model.parts for module in part.modules())
        ahead = sum(one.looks_ahead for one in modules if isinstance(one, LooksAhead))
        return bool(self._mesh.sum_over(torch.tensor(float(ahead), device=self.device), ("pp",)).item())

    def _numbered_batches(self, source: DataSource, samples: int) -> Iterator[tuple[Batch, torch.Tensor]]:
        """This rank's batches, and which sample each row is ``(B,)``; rows beyond the last are that one."""
        mesh, n = self._mesh, self.job.train.batch_size
        batches = evaluation_batches(source, batch_size=n, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, samples=samples)
        rows = torch.arange(mesh.dp_rank * n, (mesh.dp_rank + 1) * n, device=self.device)
        last = min(samples or len(source), len(source)) - 1
        for index, batch in enumerate(batches):
            yield batch, (rows + index * n * mesh.dp_size).clamp(max=last)

    def _note(self, batch: Batch) -> None:
        if self._after_batch(batch):
            raise GivenUpError

    def _set_training(self, training: bool) -> None:
        for part in self._model.parts:
            part.train(training)
