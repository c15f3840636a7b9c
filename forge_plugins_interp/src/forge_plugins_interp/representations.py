"""The evaluation ``representations``: how layers change in the course of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from forge_core.checkpoint.fsync import flush, make_folder
from forge_core.config.sections import Job
from forge_core.contracts.builder import Builder
from forge_core.contracts.callback import RanksByAxis
from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.contract import RepresentationMetric
from forge_plugins_interp.monitoring_config import RepresentationsConfig
from forge_plugins_interp.observation import observe
from forge_plugins_interp.placement import whole
from forge_plugins_interp.reduction import Reduction, token_mask
from forge_plugins_interp.sites import PlacedSite, sites_of_run


class Representations(Evaluation):
    """Compares each site with itself at the run's first evaluation, by a metric, over the samples.

    What it compares with is kept in ``representations/<label>.safetensors`` in the run's directory, for resumes.
    """

    def __init__(self, config: RepresentationsConfig, /, *, open_data: OpenData, build: Builder) -> None:
        self._config = config
        self._source = open_data(config.data, "data")
        self._metric: RepresentationMetric = build(config.metric)
        self._reduction = Reduction(over=config.over)
        self._first: dict[str, torch.Tensor] | None = None

    def look_at(self, parts: Sequence[nn.Module], mesh: RanksByAxis, job: Job) -> None:
        try:
            sites_of_run(parts, mesh, job).chosen(self._config.sites)
        except ConfigError as error:
            raise ConfigError(f"evaluations {self._label()}: {error}") from error
        if len(self._source) < self._config.least:
            needs = f"{self._config.metric.name} needs at least {self._config.least} samples"
            raise ConfigError(f"evaluations {self._label()}: {needs}, and its data have {len(self._source)}")

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        sites = sites_of_run(context.parts, context.mesh, context.job)
        found = self._values(context, sites.chosen(self._config.sites))
        every = {name: value for stage in context.mesh.gather_over("pp", found) for name, value in stage.items()}
        first = self._first_values(context, every)
        missing = sorted(every.keys() ^ first.keys())
        if missing:
            raise ConfigError(
                f"evaluations {self._label()}: the first evaluation of this run had other sites ({missing[0]}); give "
                "this evaluation another label"
            )
        try:
            return {name: self._metric.compare(value, first[name]) for name, value in every.items()}
        except ConfigError as error:
            raise ConfigError(f"evaluations {self._label()}: {error}") from error

    def _values(self, context: EvaluationContext, chosen: Sequence[PlacedSite]) -> dict[str, torch.Tensor]:
        """``(n, width)`` of each site of this stage, of all samples in their order."""
        forwards: dict[str, list[torch.Tensor]] = defaultdict(list)
        rows: dict[str, list[torch.Tensor]] = defaultdict(list)

        def take(placed: PlacedSite, value: torch.Tensor) -> None:
            forwards[placed.name].append(whole(value, placed.cuts))

        for batch in context.batches(self._source, samples=self._config.samples):
            forwards.clear()
            with observe(chosen, take):
                context.predict(batch)
            is_token = token_mask(batch, *batch["tokens"].shape)
            is_sample = (batch["targets"] != IGNORED).flatten(1).any(1)
            for placed in chosen:
                if placed.name not in forwards:
                    raise ConfigError(f"site {placed.name}: the model has not computed it in an evaluation")
                value = torch.cat(forwards[placed.name])
                kept = self._reduction.rows(placed.site, value, is_token, context.job.train.seed)
                rows[placed.name].append(self._of_all_ranks(context, kept[is_sample].float().cpu()))
        return {name: torch.cat(batches) for name, batches in rows.items()}

    def _of_all_ranks(self, context: EvaluationContext, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a batch, in the order of samples: of the ranks along ``dp_shard``, then ``dp_replicate``."""
        for axis in ("dp_shard", "dp_replicate"):
            rows = torch.cat(context.mesh.gather_over(axis, rows))
        return rows

    def _label(self) -> str:
        return self._config.label or "representations"

    def _first_values(self, context: EvaluationContext, now: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the run's first evaluation; of this one, which is kept, if there was none."""
        if self._first is None:
            run = context.job.run
            path = Path(run.dir).expanduser() / str(run.name) / "representations" / f"{self._label()}.safetensors"
            first = load_file(path) if context.rank == 0 and path.exists() else None
            for axis in context.mesh.degrees:  # from rank 0 to all
                first = next((one for one in context.mesh.gather_over(axis, first) if one is not None), None)
            self._first = now if first is None else first
            if first is None and context.rank == 0:
                _write(path, now)
        return self._first


def _write(path: Path, values: Mapping[str, torch.Tensor]) -> None:
    make_folder(path.parent)
    temporary = path.with_suffix(".new")
    save_file({name: value.contiguous() for name, value in values.items()}, temporary)
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)
