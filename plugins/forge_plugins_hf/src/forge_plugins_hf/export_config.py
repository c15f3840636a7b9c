"""The keys of the callback that exports checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import attrs
from attrs.validators import ge, gt

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog


@attrs.frozen(kw_only=True)
class ExportConfig:
    """Writes checkpoints as folders of Hugging Face, too, beside training."""

    interval: int = attrs.field(default=1, validator=gt(0))
    """Export the checkpoints whose step is a multiple of this, and the last one; 1 exports all."""
    keep_last: int = attrs.field(default=0, validator=ge(0))
    """Keep so many of the newest exports; 0 keeps all."""
    path: Path | None = None
    """The folder to write to, in which each run has one of its name; by default ``exports`` in the run's directory."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The dtype of the files; by default that of the checkpoint."""

    def check(self, job: Job, catalog: Catalog) -> Iterator[tuple[str, str]]:
        """Refuse a model without a weight layout, and an interval that checkpoints do not have."""
        every = job.checkpoint.interval
        if every and self.interval > 1 and self.interval % every:
            yield "interval", f"must be a multiple of checkpoint.interval = {every}, got {self.interval}"
        try:
            _refuse_model(job, catalog)
        except ConfigError as error:
            yield "", str(error)


def _refuse_model(job: Job, catalog: Catalog) -> None:
    """
    Raises:
        ConfigError: it has no form in Hugging Face's format.
    """
    from forge_plugins_hf.layouts import layout_of_model  # imports all that packages have; few jobs export

    model = job.model
    if job.parametrization is not None:
        from forge_core.train.parametrization import with_multipliers  # imports torch

        model = with_multipliers(job, ComponentBuilder(catalog))
    vocab_size = getattr(model.config, "vocab_size", None) or 1  # any will do: the data's is not known yet
    layout_of_model(model.config, vocab_size, catalog)
